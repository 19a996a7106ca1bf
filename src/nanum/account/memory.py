"""Peak memory of a Program: a fold over a monoid, `(net, peak) . (n, p) = (net + n, max(peak, net + p))`.

Its k-th power has a closed form, so repeats are never unrolled: the peak is in the first round, or where a round leaves
bytes behind, in the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from nanum.arrays import most, take
from nanum.once import Once
from nanum.program import Collective, Compute, Held, Mark, Node, OnHost, Repeat, Wait

Bytes = Any  # int, or int64 array over layouts


class Use(NamedTuple):
    """Bytes that nodes leave behind, and the most they held meanwhile (0 before them)."""

    net: Bytes
    peak: Bytes


def peak(nodes: Iterable[Node], known: Once[Use] | None = None, *, apart: bool = True, host: bool = False) -> Use:
    """What nodes hold of the device, for one layout or for many, with or without what other streams hold `apart`; or
    what they hold of the `host`. `known` remembers bodies, which programs share.
    """
    holds = OnHost if host else Held
    known = Once() if known is None else known
    net: Bytes = 0
    high: Bytes = 0
    run: list[Bytes] = []
    for node in nodes:
        if isinstance(node, holds):
            if apart or not node.apart:  # type: ignore[union-attr]
                run.append(node.bytes)
            continue
        if not isinstance(node, Repeat):
            continue
        if run:
            more, top = _flat(run)
            high, net, run = most(high, net + top), net + more, []
        more, top = known((node.body,), partial(peak, node.body, known, apart=apart, host=host))
        if node.at is not None:
            more, top = take(more, node.at), take(top, node.at)
        count = node.count
        if isinstance(count, int):
            if count < 1:
                continue
            if count > 1:
                top = most(top, (count - 1) * more + top)
            more = count * more
        else:
            # The peak of a repeat is in its first round or, where rounds leave bytes behind, in its last.
            top = most(top, (count - 1) * more + top) * (count > 0)
            more = count * more
        high, net = most(high, net + top), net + more
    if run:
        more, top = _flat(run)
        high, net = most(high, net + top), net + more
    return Use(net, high)


def _flat(run: list[Bytes]) -> Use:
    """A run of holds and releases: a cumulative sum, and its largest."""
    if not any(isinstance(b, np.ndarray) for b in run):
        net = high = 0
        for b in run:
            net += int(b)
            high = max(high, net)
        return Use(net, high)
    if len(run) < 12:  # too short to be worth a table
        total: Bytes = 0
        high = 0
        for b in run:
            total = total + b
            high = most(high, total)
        return Use(total, high)
    levels = np.empty((len(run), max(np.size(b) for b in run)), np.int64)
    for i, b in enumerate(run):
        levels[i] = b
    np.cumsum(levels, axis=0, out=levels)
    return Use(levels[-1], np.maximum(levels.max(axis=0), 0))


@dataclass(frozen=True)
class Moment:
    """One layout's largest moment: bytes by category, the operation at work, and the phase it is in."""

    bytes: int
    by_category: dict[str, int]
    name: str


@dataclass(frozen=True)
class _Detail:
    net: dict[str, int]
    peak: dict[str, int]
    name: str


def moment(nodes: Iterable[Node]) -> Moment:
    """The peak of one layout, with its categories and its name. Raises TypeError where quantities are arrays."""
    found = _detail(tuple(nodes), Once())
    return Moment(sum(found.peak.values()), found.peak, found.name)


def held_after(nodes: Iterable[Node]) -> dict[str, int]:
    """Bytes by category that one layout's nodes leave behind."""
    return _detail(tuple(nodes), Once()).net


def _plus(a: dict[str, int], b: dict[str, int], times: int = 1) -> dict[str, int]:
    return {c: a.get(c, 0) + times * b.get(c, 0) for c in {**a, **b}}


def _detail(nodes: tuple[Node, ...], known: Once[_Detail]) -> _Detail:
    net: dict[str, int] = {}
    best: dict[str, int] = {}
    high = 0
    name = ""
    unnamed = False
    for node in nodes:
        if isinstance(node, Held):
            net[node.category] = net.get(node.category, 0) + int(node.bytes)
            if (now := sum(net.values())) > high:
                high, best, name, unnamed = now, dict(net), node.name, True
        elif isinstance(node, Repeat):
            if node.count <= 0:
                continue
            if unnamed and isinstance(kernel := next(iter(node.body), None), Compute):
                name, unnamed = f"{kernel.phase}: {kernel.name}", False
            body = known((node.body,), partial(_detail, node.body, known))
            grows = sum(body.net.values()) > 0
            here = _plus(_plus(net, body.net, node.count - 1) if grows else net, body.peak)
            if (now := sum(here.values())) > high:
                high, best, name, unnamed = now, here, body.name, False
            net = _plus(net, body.net, node.count)
        elif not isinstance(node, Wait | Mark | OnHost) and unnamed:
            # What was held for an operation is held when it runs: the moment has its name.
            name, unnamed = f"{node.phase}: {node.kind if isinstance(node, Collective) else node.name}", False
    return _Detail(net, best, name)
