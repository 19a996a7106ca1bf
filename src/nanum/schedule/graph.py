"""What waits for what in a schedule: its passes as levels, each of which waits only for earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nanum.layout import TWO_WAY
from nanum.schedule.actions import Action
from nanum.schedule.orders import order, overlapped, stage_of, stages_of
from nanum.schedule.turns import Turn, Weights, turns

Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Level:
    """Turns that may be done at once, as rows of the table of finish times: theirs are `start` to `stop`, those of what
    each waits for are `before` (its rank), `source` (over a boundary) and, where one waits for two, `also`.
    """

    start: int
    stop: int
    before: Places
    source: Places
    also: Places | None


@dataclass(frozen=True, eq=False)
class Graph:
    """Row 0 is the start of the step; the last row, at minus infinity, is what a turn waits for that has no source.
    `sequence` has for each row between them the place of its turn among those of all ranks, one rank after the other.
    """

    rows: int
    levels: tuple[Level, ...]
    last: Places  # row of each rank's last turn
    sequence: Places


@lru_cache(maxsize=256)
def graph_of_passes(schedule: str, pp: int, num_microbatches: int, chunks: int) -> Graph:
    """Passes alone."""
    ranks = order(schedule, pp, num_microbatches, chunks)
    each = [[Turn("pass", action.chunk, action) for action in actions] for actions in ranks]
    return _graph(schedule, each, num_microbatches, chunks)


@lru_cache(maxsize=16)
def graph_of_turns(schedule: str, pp: int, num_microbatches: int, chunks: int, weights: Weights) -> Graph:
    """All that each rank does (`turns`)."""
    ranks = order(schedule, pp, num_microbatches, chunks)
    each = [list(turns(actions, weights, rank)) for rank, actions in enumerate(ranks)]
    return _graph(schedule, each, num_microbatches, chunks)


def _graph(schedule: str, ranks: Sequence[Sequence[Turn]], num_microbatches: int, chunks: int) -> Graph:
    pp = len(ranks)
    total = sum(map(len, ranks))
    nothing = total + 1
    edges = [_edges(schedule, pp, rank, turns_of, num_microbatches, chunks) for rank, turns_of in enumerate(ranks)]
    row = [0] * (2 * stages_of(schedule, pp, chunks) * num_microbatches)  # of what was given
    giver = [-1] * len(row)
    position, latest, length = [0] * pp, [0] * pp, [len(turns_of) for turns_of in ranks]
    begin = [sum(length[:rank]) for rank in range(pp)]
    levels: list[Level] = []
    sequence: list[int] = []
    count = 0
    while count < total:
        ready = []
        for rank in range(pp):
            if position[rank] < length[rank]:
                needs = edges[rank][position[rank]][0]
                if all(giver[need] >= 0 for need in needs):
                    # What is handed over on a rank was done before.
                    ready.append((rank, [row[need] for need in needs if giver[need] != rank]))
        assert ready, "an order in which every rank waits"
        start = count + 1
        before = [latest[rank] for rank, _ in ready]
        for here, (rank, _) in enumerate(ready, start):
            sequence.append(begin[rank] + position[rank])
            for give in edges[rank][position[rank]][1]:
                row[give], giver[give] = here, rank
            latest[rank] = here
            position[rank] += 1
        count += len(ready)
        source, also = (np.array([came[i] if i < len(came) else nothing for _, came in ready]) for i in (0, 1))
        two = any(len(came) > 1 for _, came in ready)
        levels.append(Level(start, start + len(ready), np.array(before), source, also if two else None))
    return Graph(total + 2, tuple(levels), np.array(latest), np.array(sequence))


Edges = tuple[tuple[int, ...], tuple[int, ...]]
"""What a turn needs of other stages and what it gives, each told by direction, stage and micro-batch."""


def _edges(
    schedule: str, pp: int, rank: int, turns_of: Sequence[Turn], num_microbatches: int, chunks: int
) -> list[Edges]:
    """Of each turn of a rank. Of a forward that is one with the backward that follows, the results are there when both
    are done; DualPipe begins both only when it has received what both need.
    """
    stages = stages_of(schedule, pp, chunks)
    at = [stage_of(schedule, pp, rank, chunk) for chunk in range(chunks)]
    each: list[Edges] = [_edge(turn.action, at[turn.chunk], stages, num_microbatches) for turn in turns_of]
    passes = [i for i, turn in enumerate(turns_of) if turn.action]
    actions = [turn.action for turn in turns_of if turn.action]
    for place in overlapped(schedule, pp, rank, actions):
        forward, backward = passes[place], passes[place + 1]
        (needs, gives), (more, other) = each[forward], each[backward]
        each[forward] = ((*needs, *more) if schedule in TWO_WAY else needs, ())
        each[backward] = (more, (*gives, *other))
    return each


def _edge(action: Action | None, stage: int, stages: int, num_microbatches: int) -> Edges:
    """The weights' half of a backward needs and gives nothing."""
    if action is None or action.kind == "W":
        return (), ()
    backward = action.kind != "F"
    source = stage + 1 if backward else stage - 1
    here = 2 * action.micro_batch + backward
    needs = (source * 2 * num_microbatches + here,) if 0 <= source < stages else ()
    return needs, (stage * 2 * num_microbatches + here,)
