"""What a pipeline rank does: forwards, backwards, and the two halves of a backward, by name.

A name says what an action differs in by its place: it is the first or the last of its direction, or comes right after
one of the other direction on the same chunk, which has left the weights in another state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One pass of one micro-batch: F forward, B backward; I its part for the input's gradient and W its part for the
    weights', where a schedule splits it.

    `chunk` is the virtual stage of the rank.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0


Order = tuple[tuple[Action, ...], ...]  # by rank


@dataclass(frozen=True)
class ActionKind:
    """What an action differs in by its place: it is the step's first or last of its direction, or comes right after one
    of the other direction, which has left the weights in another state.
    """

    direction: Literal["forward", "backward", "input", "weight"]
    first: bool = False
    last: bool = False
    after_other: bool = False


KINDS = {
    "forward.first": ActionKind("forward", first=True),
    "forward": ActionKind("forward"),
    "forward.paired": ActionKind("forward", after_other=True),
    "backward.only": ActionKind("backward", first=True, last=True, after_other=True),
    "backward.first": ActionKind("backward", first=True, after_other=True),
    "backward.paired": ActionKind("backward", after_other=True),
    "backward.last_paired": ActionKind("backward", last=True, after_other=True),
    "backward": ActionKind("backward"),
    "backward.last": ActionKind("backward", last=True),
}
"""By name. A step's first backward always comes after a forward, and its last forward does what every other does."""
NAMES = tuple(KINDS)
SPLIT = {"I": "input", "W": "weight"}
"""The names of the halves of a backward, which nothing is told apart by yet."""
_NAMES_OF = {kind: name for name, kind in KINDS.items()}


_kind = lru_cache(maxsize=None)(ActionKind)  # few, of many actions
_DIRECTION: dict[Kind, Literal["forward", "backward", "input", "weight"]] = {
    "F": "forward",
    "B": "backward",
    "I": "input",
    "W": "weight",
}


def placed(actions: Iterable[Action]) -> list[tuple[Action, ActionKind]]:
    """Each action of a rank with its place among those of its chunk."""
    actions = tuple(actions)
    ends = {a.chunk: i for i, a in enumerate(actions) if a.kind in "BW"}
    before: dict[int, str] = {}
    begun: set[tuple[int, str]] = set()
    found = []
    for i, action in enumerate(actions):
        kind, _, chunk = action
        side = "BW" if kind in "BW" else kind
        other = chunk in before and (before[chunk] == "F") != (kind == "F")
        first = (chunk, side) not in begun
        found.append((action, _kind(_DIRECTION[kind], first, side == "BW" and ends[chunk] == i, other)))
        begun.add((chunk, side))
        before[chunk] = kind
    return found


def names(actions: Iterable[Action]) -> list[str]:
    """The name of each action of a rank: of `KINDS`, or of `SPLIT`."""
    return [SPLIT[a.kind] if a.kind in SPLIT else _NAMES_OF[kind] for a, kind in placed(actions)]
