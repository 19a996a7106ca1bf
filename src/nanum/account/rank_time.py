"""The time of a step whose ranks hold several stages: what each turn does to a rank's clocks, and the pipeline's exact
recurrence over them.

A rank's streams run on from turn to turn: weights that are gathered ahead arrive while a pass computes, and gradients
are reduced beside the passes that follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from nanum.account.cost import Cost
from nanum.account.step_time import Cut, kernels_seconds, parts, sent
from nanum.account.timeline import COMPUTE, Clock, TimeMap, fold
from nanum.once import Once
from nanum.program import PIPELINE_STREAM, Collective, Node, Quantity
from nanum.schedule import Weights, finish_clocks, graph_of_turns


class RankStep(Protocol):
    """A rank's step as `parallel.chunks` builds it: its turns in order, of which the last is its update."""

    @property
    def turns(self) -> tuple[tuple[Node, ...], ...]: ...
    @property
    def send(self) -> Collective: ...
    @property
    def weights(self) -> Weights: ...


@dataclass(frozen=True, eq=False)
class RankTimes:
    """The steps of n pipelines, and of each rank what it waits for its own streams: [pp, n] seconds."""

    cut: Cut
    streamed_seconds: np.ndarray


def rank_times(schedule: str, num_microbatches: int, chunks: int, ranks: Sequence[RankStep], cost: Cost) -> RankTimes:
    """Fold each distinct turn once, and play the step: as it is, were sends free, and were no rank to wait for another
    (which is what each rank works).
    """
    kinds, maps = _folded(ranks, cost)
    send = np.atleast_1d(np.asarray(cost.collective_seconds(ranks[0].send), np.float64))
    compute, blocking = _rows(kernels_seconds(m) for m in maps), _rows(m.blocking_seconds for m in maps)
    n = max(compute.shape[1], len(send))
    matrices = _matrices(maps, n)[..., None, :].repeat(3, axis=3)
    sends = np.stack([np.broadcast_to(each, n) for each in (send, 0.0 * send, send - np.inf)])
    graph = graph_of_turns(schedule, len(ranks), num_microbatches, chunks, ranks[0].weights)
    shown = finish_clocks(graph, kinds, matrices.reshape(*matrices.shape[:3], 3 * n), sends.ravel())
    ends = shown.max(axis=1).reshape(len(ranks), 3, n)  # what is started and never waited for counts as well
    update = np.stack([compute[of_rank[-1]] for of_rank in kinds])
    worked = np.stack([compute[of_rank[:-1]].sum(axis=0) for of_rank in kinds])
    blocked = np.stack([blocking[of_rank].sum(axis=0) for of_rank in kinds])
    step, free = ends[:, 0].max(axis=0), ends[:, 1].max(axis=0)
    work = ends[:, 2]
    cut = parts(step, free, *(np.broadcast_to(q, (len(ranks), n)) for q in (work, worked, update)))
    return RankTimes(cut, np.maximum(work - worked - update - blocked, 0.0))


def _rows(quantities: Iterable[Quantity]) -> np.ndarray:
    """[maps, n] of one number or n in each."""
    return np.stack(np.broadcast_arrays(*(np.atleast_1d(np.asarray(q, np.float64)) for q in quantities)))


def _folded(ranks: Sequence[RankStep], cost: Cost) -> tuple[list[np.ndarray], list[TimeMap]]:
    """By rank, the place of each turn among the distinct ones, and what these do. What a turn waits for after its send
    is the next turn's, since the rank that is sent to need not wait for it.
    """
    known: Once[TimeMap] = Once()
    place: dict[tuple[int, int], int] = {}
    maps: list[TimeMap] = []
    kinds = []
    nothing: tuple[Node, ...] = ()
    for rank in ranks:
        turns = rank.turns
        here, late = [], nothing
        for nodes in turns:
            if (key := (id(late), id(nodes))) not in place:
                place[key] = len(maps)
                done = fold(nodes[: sent(nodes)], cost, known)
                maps.append(fold(late, cost, known).then(done) if late else done)
            here.append(place[key])
            late = nodes[sent(nodes) :] or nothing
        kinds.append(np.array(here))
    return kinds, maps


def _clocks(maps: Sequence[TimeMap]) -> dict[Clock, int]:
    """All clocks and their places, the compute's first. Sends are the recurrence's: their stream has none."""
    seen = dict.fromkeys([COMPUTE])
    for m in maps:
        for clock, row in m.rows.items():
            seen.update(dict.fromkeys([clock, *row]))
    return {clock: i for i, clock in enumerate(c for c in seen if c[:1] != (PIPELINE_STREAM,))}


def _matrices(maps: Sequence[TimeMap], n: int) -> np.ndarray:
    """[maps, clocks, clocks, n] seconds."""
    clocks = _clocks(maps)
    found = np.full((len(maps), len(clocks), len(clocks), n), -np.inf)
    found[:, range(len(clocks)), range(len(clocks))] = 0.0  # what a turn does not touch keeps its time
    for i, m in enumerate(maps):
        for clock, row in m.rows.items():
            if clock in clocks:
                found[i, clocks[clock]] = -np.inf
                for start, seconds in row.items():
                    if start in clocks:
                        found[i, clocks[clock], clocks[start]] = seconds
        found[i, 0, 0] = np.maximum(found[i, 0, 0], m.host_seconds)  # no sooner than all is launched
    return found
