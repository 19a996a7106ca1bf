"""Where the layers of a stage stand: in groups that repeat, which a stage may cut anywhere.

What crosses a border differs at the two ends of a repeat, so its first and its last round are peeled off. A repeat of a
single round is its last; its first and its middle then occur zero times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nanum.arrays import least, most
from nanum.model import Run

Part = Literal["embedding", "head"] | int
"""A part of a model: one of its ends, or a layer, by its kind."""
Direction = Literal["forward", "backward"]
Role = Literal["first", "middle", "last", "once"]
"""Of a group: a round of a repeat, or what is there once or not at all."""


@dataclass(frozen=True, eq=False)
class Place:
    """One part of a stage, where it stands."""

    part: Part


@dataclass(frozen=True, eq=False)
class Group:
    """Parts in turn, `count` times (0 or 1, but for the middle of a repeat), on each stage."""

    role: Role
    count: Any
    places: tuple[Place, ...]


EMBEDDING, HEAD = Place("embedding"), Place("head")


def groups(runs: Iterable[Run], begins: Any, layers: Any) -> tuple[Group, ...]:
    """The layers of a stage that has `layers` of the model's, from number `begins` on: ints, or arrays over stages."""
    found: list[Group] = []
    start = 0
    for count, kinds in runs:
        size = count * len(kinds)
        low, high = (least(most(at - start, 0), size) for at in (begins, begins + layers))
        found += _alike(kinds, high - low) if len(kinds) == 1 else _in_turn(kinds, low, high)
        start += size
    return tuple(found)


def divided(runs: Iterable[Run], begins: Any, layers: Any, first: int) -> tuple[Group, ...]:
    """As `groups`, where the `first` layers of a stage are done otherwise than the others, whose kinds then follow
    those of all.
    """
    runs = tuple(runs)
    several = 1 + max(kind for _, kinds in runs for kind in kinds)
    others = [(count, tuple(kind + several for kind in kinds)) for count, kinds in runs]
    here = least(layers, first)
    return (*groups(runs, begins, here), *groups(others, begins + here, layers - here))


def in_words(words: Callable[[int, int], Iterable[tuple[int, ...]]], begins: Any, layers: Any) -> tuple[Group, ...]:
    """The parts of a stage as `words` says them, of its first layer and how many there are: tuples of parts, of which
    like ones that follow each other are rounds of a repeat.
    """
    alone = not any(isinstance(q, np.ndarray) for q in (begins, layers))
    each = np.broadcast_arrays(np.atleast_1d(begins), np.atleast_1d(layers))
    left = [list(words(int(begin), int(count))) for begin, count in zip(*each, strict=True)]
    found: list[Group] = []
    while any(left):
        word = next(of[0] for of in left if of)
        rounds = [next((i for i, other in enumerate(of) if other != word), len(of)) for of in left]
        left = [of[n:] for of, n in zip(left, rounds, strict=True)]
        found += _alike(word, rounds[0] if alone else np.array(rounds))
    return tuple(found)


def every_nth(kinds: Ordered[int], n: int) -> Callable[[int, int], Iterable[tuple[int, ...]]]:
    """Words of layers of which each n-th of a stage is done otherwise than the others, whose kinds follow those of all;
    `kinds` are those of the model's layers.
    """
    several = 1 + max(kinds)

    def words(begin: int, count: int) -> Iterable[tuple[int, ...]]:
        of = tuple(kind if i % n == 0 else kind + several for i, kind in enumerate(kinds[begin : begin + count], 1))
        return (of[i : i + n] for i in range(0, count, n))

    return words


def in_chunks(
    kinds: Ordered[int], chunk: int, parts: Ordered[tuple[int, ...]]
) -> Callable[[int, int], Iterable[tuple[int, ...]]]:
    """Words of one part each: as many layers as `chunk` and, at a stage's end, those that are left."""

    def words(begin: int, count: int) -> Iterable[tuple[int, ...]]:
        of = tuple(kinds[begin : begin + count])
        return ((parts.index(of[i : i + chunk]),) for i in range(0, count, chunk))

    return words


def _alike(kinds: tuple[int, ...], rounds: Any) -> list[Group]:
    counts: tuple[tuple[Role, Any], ...] = (
        ("first", (rounds >= 2) * 1),
        ("middle", most(rounds - 2, 0)),
        ("last", (rounds >= 1) * 1),
    )
    return [Group(role, count, tuple(map(Place, kinds))) for role, count in counts]


def _in_turn(kinds: tuple[int, ...], low: Any, high: Any) -> list[Group]:
    """Layers `low` to `high` of a repeat: the rest of a round, whole rounds, and the beginning of one."""
    size = len(kinds)
    whole, end = -(-low // size) * size, high // size * size
    inside = (low < high) * (low % size > 0)  # of a round
    before = [(j, inside * (low % size <= j) * (low // size * size + j < high)) for j in range(1, size)]
    after = [(j, (low < high) * (end >= whole) * (j < high % size)) for j in range(size - 1)]

    def once(there: list[tuple[int, Any]]) -> list[Group]:
        return [Group("once", presence * 1, (Place(kinds[j]),)) for j, presence in there]

    return [*once(before), *_alike(kinds, most(end - whole, 0) // size), *once(after)]


@dataclass(frozen=True, eq=False)
class Sequence:
    """All parts of a stage in order, and what follows what: a quantity of a place is worked out of its neighbours'."""

    layers: tuple[Group, ...]
    embeds: Any
    heads: Any

    def in_order(self, direction: Direction) -> tuple[tuple[Group, tuple[Place, ...]], ...]:
        """Groups of layers, with the places of each, as a direction goes through them."""
        if direction == "forward":
            return tuple((g, g.places) for g in self.layers)
        return tuple((g, g.places[::-1]) for g in reversed(self.layers))

    def begins(self, direction: Direction) -> list[tuple[Part, Any]]:
        """The part that a direction begins with, as (part, 1 where it is so)."""
        here: tuple[Part, Any] = ("embedding", self.embeds) if direction == "forward" else ("head", self.heads)
        inner = self._beyond(direction, -1)
        return [here, *((part, (1 - here[1]) * presence) for part, presence in inner)]

    def follows(self, place: Place, direction: Direction) -> list[tuple[Part, Any]]:
        """The part that comes after `place`, as (part, 1 where it is so); none after the last."""
        if place.part in ("embedding", "head"):
            return self._beyond(direction, -1) if (place is EMBEDDING) == (direction == "forward") else []
        ordered = self.in_order(direction)
        at, group, places = next((i, g, ps) for i, (g, ps) in enumerate(ordered) if place in ps)
        where = places.index(place)
        if where + 1 < len(places):
            return [(places[where + 1].part, 1)]
        if group.role == "middle" or (group.role == "first" and direction == "forward"):
            return [(places[0].part, 1)]  # another round
        if group.role == "last" and direction == "backward":
            first = ordered[at + 2][0].count
            return _joined([(places[0].part, first), *self._beyond(direction, at + 2, 1 - first)])
        return self._beyond(direction, at)

    def _beyond(self, direction: Direction, at: int, weight: Any = 1) -> list[tuple[Part, Any]]:
        """The first part that is there after group `at` of those in order: of a repeat its last round always is."""
        found: list[tuple[Part, Any]] = []
        for group, places in self.in_order(direction)[at + 1 :]:
            if group.role in ("last", "once"):
                found.append((places[0].part, weight * group.count))
                weight = weight * (1 - group.count)
        return _joined([*found, ("head" if direction == "forward" else "embedding", weight)])


def _joined(found: list[tuple[Part, Any]]) -> list[tuple[Part, Any]]:
    """Each part once."""
    sums: dict[Part, Any] = {}
    for part, presence in found:
        sums[part] = sums[part] + presence if part in sums else presence
    return list(sums.items())
