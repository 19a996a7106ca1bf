"""Which chunks' weights a rank gathers ahead of its passes, and which it drops: a window over what comes next.

torch.distributed.pipelining does so in its schedules of several chunks (read at 2.13), whether or not anything is
sharded: before each action it sees to it that the weights of the next three chunks to be used are there, and drops
those of a chunk that is not among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nanum.schedule.actions import Action

AT_ONCE = 3
"""Chunks of a rank whose weights are there together."""


class Ahead(NamedTuple):
    """What is done about weights before an action: chunks dropped, then chunks gathered, in order."""

    dropped: tuple[int, ...]
    gathered: tuple[int, ...]


def ahead(actions: Sequence[Action], at_once: int = AT_ONCE) -> Iterator[Ahead]:
    """What is done before each action of a rank."""
    there: tuple[int, ...] = ()
    nothing = Ahead((), ())
    for wanted in reversed(_wanted(actions, at_once)):
        if set(wanted) == set(there):
            yield nothing
            continue
        dropped = tuple(chunk for chunk in there if chunk not in wanted)
        gathered = tuple(chunk for chunk in wanted if chunk not in there)
        there = (*(chunk for chunk in there if chunk in wanted), *gathered)
        yield Ahead(dropped, gathered)


def _wanted(actions: Sequence[Action], at_once: int) -> list[tuple[int, ...]]:
    """The next chunks to be used, from each action on, the last action's first."""
    soonest: tuple[int, ...] = ()  # every chunk that comes, by its next use
    found = []
    for action in reversed(actions):
        if soonest[:1] != (action.chunk,):
            soonest = (action.chunk, *(chunk for chunk in soonest if chunk != action.chunk))
        found.append(soonest[:at_once])
    return found
