"""When a step ends: the exact (max,+) recurrence over a schedule's order, and a bound that it is never below."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nanum.schedule.actions import KINDS, names
from nanum.schedule.graph import graph_of_passes
from nanum.schedule.orders import order, ranks_of, stage_of, stages_of
from nanum.schedule.runs import Size, warmup

Seconds = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class _Named:
    """The durations of a schedule's passes, stacked by name, of as many rows as there are stages."""

    names: tuple[str, ...]  # of the actions that any rank does
    duration: NDArray[np.int64]  # of each row of the graph, its row of the durations
    used: NDArray[np.int64]  # [pp, names, stages]: how often each rank does what on which stage


@lru_cache(maxsize=256)
def _named(schedule: str, pp: int, num_microbatches: int, chunks: int) -> _Named:
    ranks = order(schedule, pp, num_microbatches, chunks)
    named = [names(actions) for actions in ranks]
    done = tuple(dict.fromkeys(name for each in named for name in each))
    block = {name: i for i, name in enumerate(done)}
    stages = stages_of(schedule, pp, chunks)
    duration: list[int] = []
    used = np.zeros((pp, len(done) * stages), np.int64)
    for rank, actions in enumerate(ranks):
        at = [stage_of(schedule, pp, rank, chunk) for chunk in range(chunks)]
        here = [block[name] * stages + at[a.chunk] for a, name in zip(actions, named[rank], strict=True)]
        used[rank] = np.bincount(here, minlength=used.shape[1])
        duration += here
    sequence = graph_of_passes(schedule, pp, num_microbatches, chunks).sequence
    return _Named(done, np.array(duration)[sequence], used.reshape(pp, len(done), stages))


@dataclass(frozen=True, eq=False)
class Finish:
    """When a pipelined step ends, for n layouts."""

    stage_seconds: Seconds  # [pp, n]: when each rank's last action ends
    busy_seconds: Seconds  # [pp, n]: what each rank works
    total_seconds: Seconds  # [n]

    @property
    def bubble_seconds(self) -> Seconds:
        """[pp, n]: how long each rank is idle."""
        return self.total_seconds - self.busy_seconds


def finish_times(
    schedule: str,
    num_microbatches: int,
    durations: Mapping[str, ArrayLike],
    send_seconds: ArrayLike = 0.0,
    chunks: int = 1,
) -> Finish:
    """The exact end of a step: each action starts when its rank is free and its input has come.

    Args:
        schedule: a name of `orders`.
        num_microbatches: of all n layouts.
        durations: [pp * chunks, n] seconds of the actions of each name that is done, by stage; one that is not given
            lasts as long as "forward" or "backward".
        send_seconds: [n], from the end of an action to the start of the next stage's; the sender does not wait, and
            what is handed over on a rank is not sent.
        chunks: of each rank.

    Raises:
        ValueError: the schedule is unknown, or has no order for these sizes.
    """
    pp = ranks_of(schedule, np.shape(next(iter(durations.values())))[0], chunks)
    graph = graph_of_passes(schedule, pp, num_microbatches, chunks)
    named = _named(schedule, pp, num_microbatches, chunks)
    stacked, send = _stacked(named.names, durations, send_seconds)
    *_, n = stacked.shape
    durations_by_row = stacked.reshape(-1, n)
    busy = np.zeros((pp, n))
    ends = np.empty((pp, n))
    # In blocks of layouts: the table of finish times stays within a few megabytes.
    width = max(1, 2_000_000 // graph.rows)
    for begin in range(0, n, width):
        part = slice(begin, begin + width)
        duration, sent = np.ascontiguousarray(durations_by_row[:, part]), send[part]
        finished = np.empty((graph.rows, duration.shape[1]))
        finished[0], finished[-1] = 0.0, -np.inf
        for level in graph.levels:
            arrived = finished.take(level.source, axis=0)
            if level.also is not None:
                np.maximum(arrived, finished.take(level.also, axis=0), out=arrived)
            arrived += sent
            np.maximum(arrived, finished.take(level.before, axis=0), out=arrived)
            arrived += duration.take(named.duration[level.start - 1 : level.stop - 1], axis=0)
            finished[level.start : level.stop] = arrived
        ends[:, part] = finished[graph.last]
    for rank, used in enumerate(named.used):
        here = used.any(axis=0)
        busy[rank] = np.tensordot(used[:, here], stacked[:, here], 2)
    return Finish(ends, busy, ends.max(axis=0))


def lower_bound(
    schedule: str,
    num_microbatches: Size,
    *,
    busy: ArrayLike,
    first_forward: ArrayLike,
    last_backward: ArrayLike,
    least_forward: ArrayLike,
    least_backward: ArrayLike,
    after: ArrayLike = 0.0,
    send_seconds: ArrayLike = 0.0,
    pp: Size | None = None,
) -> Seconds:
    """[n] seconds that no exact time is below; equal to it where stages are alike and sends are free.

    All are [pp, n]: what each stage works in a step, its first forward and its last backward as they are there, its
    shortest forward and backward, and what it does `after` its last backward, when the stage before has what it sends.
    `send_seconds` is [n]; `num_microbatches` may be [n], and so may `pp`: where it is given, only the first `pp` rows
    of a layout are stages.

    Proof. Let m be num_microbatches, s the send, and i any stage. Its first action is F(0), which came through the
    stages j < i: it starts no sooner than head = sum of F_j(0) + s over j < i. Its last action is B(m-1), which must
    still go back through them: the first stage has it no sooner than tail = sum of B_j(m-1) + s over j < i after it. So
    both head + middle + tail + after_0 and head + middle + after_i bound the step, with either middle: (a) the stage
    works all its forwards and backwards, one at a time: its busy time; (b) B(x) ends no sooner than trip = 2 s (stages
    after i) + sum of F_j + B_j over j >= i after F(x) starts. With w forwards of warm-up, the stage's order has F(x+d)
    after B(x), d = w + 1. Write m - 1 = q d + r. For any a <= r, F(0) .. F(a-1), then F(a) to B(a), F(a+d) to B(a+d),
    .., F(a+qd) to B(a+qd), then B(a+qd+1) .. B(m-1), follow one another: a F_i + (q+1) trip + (r-a) B_i. The better of
    a = 0 and a = r is (q+1) trip + r max(F_i, B_i). (Where w = m, q = 0, and no F(x+d) is used.) In (b) the shortest F
    and B are counted.

    Raises:
        ValueError: the schedule is unknown.
    """
    given = (busy, first_forward, last_backward, least_forward, least_backward, after)
    working, first, last, forward, backward, rest_of, sent = np.broadcast_arrays(
        *(np.asarray(q, np.float64) for q in given), np.asarray(send_seconds, np.float64)
    )
    send = sent[0]
    rows = len(working)
    stage = np.arange(rows)[:, None]
    stages = np.broadcast_to(np.asarray(rows if pp is None else pp), send.shape)
    m = np.asarray(num_microbatches)
    exists = stage < stages
    head, tail = (np.cumsum(pass_, axis=0) - pass_ + send * stage for pass_ in (first, last))
    below = np.where(exists, forward + backward, 0.0)
    trip = np.cumsum(below[::-1], axis=0)[::-1] + 2 * send * (stages - 1 - stage)
    depth = np.maximum(warmup(schedule, stages, stage, m), 0) + 1
    rounds, rest = np.divmod(m - 1, depth)
    waiting = (rounds + 1) * trip + rest * np.maximum(forward, backward)
    ends = head + np.maximum(working, waiting) + np.maximum(tail + rest_of[0], rest_of)
    bound: Seconds = np.where(exists, ends, -np.inf).max(axis=0)
    return bound


def _stacked(done: tuple[str, ...], durations: Mapping[str, ArrayLike], send: ArrayLike) -> tuple[Seconds, Seconds]:
    """Durations of what is done as [names, stages, n], the send as [n]."""
    alike: dict[str, ArrayLike] = {}
    for name, seconds in durations.items():
        direction = KINDS[name].direction if name in KINDS else name
        if name == direction or direction not in alike:
            alike[direction] = seconds
    of = [durations[name] if name in durations else alike[KINDS[name].direction] for name in done]
    sent = np.asarray(send, np.float64)
    *many, sent = np.broadcast_arrays(*(np.asarray(q, np.float64) for q in of), sent[None] if sent.ndim else sent)
    return np.stack(many), sent[0]
