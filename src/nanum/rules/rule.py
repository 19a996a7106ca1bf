"""The form of a rule, and what rules ask of sizes, one or many."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from nanum.cluster import Cluster
from nanum.job import Job
from nanum.layout import Layout
from nanum.model import Model


@dataclass(frozen=True)
class Rule:
    """`why` names the rule where refused layouts are counted. `broken` is a bool, or an array of them where the sizes
    that it reads are arrays (a rule that reads none answers with one bool). `say` puts it in words for one layout."""

    why: str
    broken: Callable[[Model, Job, Cluster, Layout], Any]
    say: Callable[[Model, Job, Cluster, Layout], str]


def is_whole(size: Any) -> bool:
    dtype = getattr(size, "dtype", None)  # of an array, or of one number out of it
    return dtype.kind in "iu" if dtype is not None else isinstance(size, Integral) and not isinstance(size, bool)


def fails_to_divide(size: Any, whole: Any) -> Any:
    """Sizes below 1 are another rule's; 1 stands in their place, so that nothing is divided by zero."""
    positive = size >= 1
    return (whole % (size * positive + (size < 1)) != 0) & positive & (whole >= 1)


def any_fails(size: Any, wholes: Iterable[int]) -> Any:
    found: Any = False
    for whole in wholes:
        found = found | fails_to_divide(size, whole)
    return found


def distinct(sizes: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(sizes))
