"""What a rank of several chunks does in turn: its passes, what it does about weights between them, and its update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from nanum.schedule.actions import Action
from nanum.schedule.ahead import ahead


class Turn(NamedTuple):
    """A pass, which has an action; or a chunk's weights are dropped, begun to be gathered, or waited for before their
    first use; or the update, of all chunks.
    """

    does: Literal["pass", "drop", "gather", "await", "update"]
    chunk: int
    action: Action | None = None


def turns(actions: Sequence[Action], *, gathers_ahead: bool) -> Iterator[Turn]:
    """All that a rank does in a step. Without `gathers_ahead` a pass sees to its own weights."""
    if not gathers_ahead:
        for action in actions:
            yield Turn("pass", action.chunk, action)
    else:
        coming: set[int] = set()
        for action, weights in zip(actions, ahead(actions), strict=True):
            for chunk in weights.dropped:
                yield Turn("drop", chunk)
            for chunk in weights.gathered:
                coming.add(chunk)
                yield Turn("gather", chunk)
            if action.chunk in coming:
                coming.remove(action.chunk)
                yield Turn("await", action.chunk)
            yield Turn("pass", action.chunk, action)
    yield Turn("update", 0)
