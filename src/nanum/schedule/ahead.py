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
    there: list[int] = []
    for i in range(len(actions)):
        wanted: list[int] = []
        for action in actions[i:]:
            if action.chunk not in wanted:
                wanted.append(action.chunk)
                if len(wanted) == at_once:
                    break
        dropped = tuple(chunk for chunk in there if chunk not in wanted)
        gathered = tuple(chunk for chunk in wanted if chunk not in there)
        there = [*(chunk for chunk in there if chunk in wanted), *gathered]
        yield Ahead(dropped, gathered)
