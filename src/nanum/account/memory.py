"""Peak memory of a Program: a fold over a monoid, `(net, peak) . (n, p) = (net + n, max(peak, net + p))`.

Its k-th power has a closed form, so repeats are never unrolled: the peak is in the first round, or where a round leaves bytes
behind, in the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanum.arrays import most, take
from nanum.program import Collective, Held, Mark, Node, Repeat, Wait

Bytes = Any  # int, or int64 array over layouts


@dataclass(frozen=True, eq=False, slots=True)
class Use:
    """Bytes that nodes leave behind, and the most they held meanwhile (0 before them)."""

    net: Bytes = 0
    peak: Bytes = 0

    def then(self, other: Use) -> Use:
        return Use(self.net + other.net, most(self.peak, self.net + other.peak))

    def times(self, count: Bytes) -> Use:
        if isinstance(count, int) and count == 1:
            return self
        last = (count - 1) * self.net + self.peak
        return Use(count * self.net, most(self.peak, last) * (count > 0))

    def spread(self, at: np.ndarray) -> Use:
        return Use(take(self.net, at), take(self.peak, at))


Known = dict[int, tuple[tuple[Node, ...], Use]]
"""Results by the identity of a body, which is kept with them: an identity is only one's own while one lives."""


def peak(nodes: Iterable[Node], known: Known | None = None) -> Use:
    """What nodes hold, for one layout or for many. `known` remembers bodies, which programs share."""
    known = {} if known is None else known
    total = Use()
    run: list[Bytes] = []
    for node in nodes:
        if isinstance(node, Held):
            run.append(node.bytes)
        elif isinstance(node, Repeat):
            total = total.then(_flat(run))
            run = []
            key = id(node.body)
            if key not in known:
                known[key] = node.body, peak(node.body, known)
            body = known[key][1]
            if node.at is not None:
                body = body.spread(node.at)
            total = total.then(body.times(node.count))
    return total.then(_flat(run))


def _flat(run: list[Bytes]) -> Use:
    """A run of holds and releases: a cumulative sum, and its largest."""
    if not run:
        return Use()
    if not any(isinstance(b, np.ndarray) and b.ndim for b in run):
        net = high = 0
        for b in run:
            net += int(b)
            high = max(high, net)
        return Use(net, high)
    if len(run) < 12:  # too short to be worth a table
        total = run[0]
        high = most(total, 0)
        for b in run[1:]:
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
    found = _detail(tuple(nodes), {})
    return Moment(sum(found.peak.values()), found.peak, found.name)


def held_after(nodes: Iterable[Node]) -> dict[str, int]:
    """Bytes by category that one layout's nodes leave behind."""
    return _detail(tuple(nodes), {}).net


def _plus(a: dict[str, int], b: dict[str, int], times: int = 1) -> dict[str, int]:
    return {c: a.get(c, 0) + times * b.get(c, 0) for c in {**a, **b}}


def _detail(nodes: tuple[Node, ...], known: dict[int, _Detail]) -> _Detail:
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
            key = id(node.body)
            if key not in known:
                known[key] = _detail(node.body, known)
            body = known[key]
            grows = sum(body.net.values()) > 0
            here = _plus(_plus(net, body.net, node.count - 1) if grows else net, body.peak)
            if (now := sum(here.values())) > high:
                high, best, name, unnamed = now, here, body.name, False
            net = _plus(net, body.net, node.count)
        elif not isinstance(node, Wait | Mark) and unnamed:
            # What was held for an operation is held when it runs: the moment has its name.
            name, unnamed = f"{node.phase}: {node.kind if isinstance(node, Collective) else node.name}", False
    return _Detail(net, best, name)
