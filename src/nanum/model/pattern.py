"""Layers told one by one, as leading ones and a group that repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nanum.model.layer import Layer

T = TypeVar("T")
LONGEST = 64  # layers of a group


def arranged(marks: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """The leading marks and the group that repeats after them (the last time perhaps cut short), together as few as can
    be.
    """
    best = max(len(marks) - 1, 0), 1  # all but the last lead
    for period in range(1, min(len(marks), LONGEST) + 1):
        if period >= sum(best):
            break
        start = len(marks) - period
        while start > 0 and marks[start - 1] == marks[start - 1 + period]:
            start -= 1
        best = min(best, (start, period), key=sum)
    start, period = best
    return marks[:start], marks[start : start + period]


def layers(marks: Sequence[T], layer: Callable[[T], Layer]) -> dict[str, Any]:
    """The fields of a Model that say which layers it has: one mark for each, of which `layer` makes it."""
    leading, group = arranged(marks)
    *alternates, ordinary = map(layer, group)
    return {
        "attention": ordinary.attention,
        "mlp": ordinary.mlp,
        "leading": tuple(map(layer, leading)),
        "alternates": tuple(alternates),
    }
