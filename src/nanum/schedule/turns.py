"""What a rank of several chunks does in turn: its passes, what it does about weights between them, and its update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from nanum.schedule.actions import Action
from nanum.schedule.ahead import ahead

Weights = Literal["each", "window", "aligned"]
"""Who sees to a chunk's weights: each pass itself; the schedule, in a window over what comes next (`ahead`, PyTorch's);
or the schedule once a step, on all ranks at about the same time (Megatron's).
"""


class Turn(NamedTuple):
    """A pass, which has an action; or a chunk's weights are dropped, begun to be gathered, or waited for before their
    first use; or its gradients are begun to be reduced; or the update, of all chunks.
    """

    does: Literal["pass", "drop", "gather", "await", "reduce", "update"]
    chunk: int
    action: Action | None = None


def turns(actions: Sequence[Action], weights: Weights, rank: int) -> Iterator[Turn]:
    """All that a rank does in a step."""
    if weights == "window":
        yield from _in_a_window(actions)
    elif weights == "aligned":
        yield from _aligned(actions, rank)
    else:
        for action in actions:
            yield Turn("pass", action.chunk, action)
    yield Turn("update", 0)


def _in_a_window(actions: Sequence[Action]) -> Iterator[Turn]:
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


def _aligned(actions: Sequence[Action], rank: int) -> Iterator[Turn]:
    """Megatron-LM (pipeline_parallel/schedules.py, core 0.20: `forward_backward_pipelining_with_interleaving`): the
    first two chunks' weights are gathered at once, a later chunk's when some rank begins the chunk before it: `rank`
    forwards before this one does. Gradients are reduced as much after a chunk's last backward, what is left at the end.
    The second gather is here begun after the first pass, whose weights are on the way before it.
    """
    forwards = [action for action in actions if action.kind == "F"]
    backwards = [action for action in actions if action.kind != "F"]
    begins = {chunk: i for i, (_, _, chunk) in reversed(list(enumerate(forwards)))}
    ends = {chunk: i for i, (_, _, chunk) in enumerate(backwards)}
    gathers = {begins[chunk] - rank: chunk + 1 for chunk in begins if chunk and chunk + 1 in begins}
    reduces = {ends[chunk] + rank: chunk for chunk in ends}
    came: set[int] = set()
    forward = backward = 0
    yield Turn("gather", 0)
    for action in actions:
        if action.kind == "F":
            if forward in gathers:
                yield Turn("gather", gathers[forward])
            if action.chunk not in came:
                came.add(action.chunk)
                yield Turn("await", action.chunk)
        yield Turn("pass", action.chunk, action)
        if action.kind == "F":
            forward += 1
            if forward == 1 and len(begins) > 1:
                yield Turn("gather", 1)
        else:
            if backward in reduces:
                yield Turn("reduce", reduces.pop(backward))
            backward += 1
    for chunk in sorted(reduces.values()):
        yield Turn("reduce", chunk)
