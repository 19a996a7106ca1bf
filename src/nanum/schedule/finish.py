"""When a step ends: the exact (max,+) recurrence over a schedule's order, and a bound that it is never below."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nanum.schedule.actions import KINDS, Action, names
from nanum.schedule.orders import order, rank_of, stage_of
from nanum.schedule.runs import Size, warmup

Seconds = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class _Level:
    """Actions that may run at once, as rows of the table of finish times: theirs are `start` to `stop`, those of what
    each waits for are `before` (its stage) and `source` (over a boundary); `duration` is its row of the durations."""

    start: int
    stop: int
    before: NDArray[np.int64]
    source: NDArray[np.int64]
    duration: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Graph:
    """An order as levels, each of which waits only for earlier ones. Row 0 is the start of the step; the last row, at
    minus infinity, is what an action waits for that has no source."""

    rows: int
    levels: tuple[_Level, ...]
    last: NDArray[np.int64]  # row of each rank's last action
    names: tuple[str, ...]  # of the actions that any rank does
    used: NDArray[np.int64]  # [pp, names, stages]: how often each rank does what on which stage


@lru_cache(maxsize=256)
def _graph(schedule: str, pp: int, num_microbatches: int, chunks: int) -> _Graph:
    ranks = order(schedule, pp, num_microbatches, chunks)
    named = [names(actions) for actions in ranks]
    done = tuple(dict.fromkeys(name for each in named for name in each))
    total, stages = sum(map(len, ranks)), pp * chunks
    row: dict[tuple[str, int, int], int] = {}  # by direction, stage and micro-batch
    position, latest = [0] * pp, [0] * pp
    used = np.zeros((pp, len(done), stages), np.int64)
    levels = []
    count = 0
    while count < total:
        start = count + 1
        ready = []
        for rank, actions in enumerate(ranks):
            if position[rank] < len(actions):
                action = actions[position[rank]]
                stage = stage_of(schedule, pp, rank, action.chunk)
                source = _source(action, stage, stages)
                if source is None or rank_of(schedule, pp, source[1]) == rank:
                    ready.append((rank, stage, total + 1))  # what is handed over on a rank was done before
                elif source in row:
                    ready.append((rank, stage, row[source]))
        assert ready, "an order in which every rank waits"
        columns = []
        for offset, (rank, stage, came) in enumerate(ready):
            # Durations are stacked by name, of as many rows as there are stages.
            action, block = ranks[rank][position[rank]], done.index(named[rank][position[rank]])
            used[rank, block, stage] += 1
            columns.append((latest[rank], came, block * stages + stage))
            latest[rank] = start + offset
            if action.kind != "W":
                row[_direction(action), stage, action.micro_batch] = start + offset
            position[rank] += 1
        count += len(ready)
        before_rows, source_rows, duration = np.array(columns, dtype=np.int64).T
        levels.append(_Level(start, start + len(ready), before_rows, source_rows, duration))
    return _Graph(total + 2, tuple(levels), np.array(latest, dtype=np.int64), done, used)


def _direction(action: Action) -> str:
    return "forward" if action.kind == "F" else "backward"


def _source(action: Action, stage: int, stages: int) -> tuple[str, int, int] | None:
    """What an action needs of another stage; the weights' half of a backward needs nothing more."""
    source = stage - 1 if action.kind == "F" else stage + 1
    if action.kind == "W" or not 0 <= source < stages:
        return None
    return _direction(action), source, action.micro_batch


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
    stages = np.shape(next(iter(durations.values())))[0]
    graph = _graph(schedule, stages // chunks, num_microbatches, chunks)
    stacked, send = _stacked(graph.names, durations, send_seconds)
    *_, n = stacked.shape
    durations_by_row = stacked.reshape(-1, n)
    pp = len(graph.used)
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
            arrived += sent
            np.maximum(arrived, finished.take(level.before, axis=0), out=arrived)
            arrived += duration.take(level.duration, axis=0)
            finished[level.start : level.stop] = arrived
        ends[:, part] = finished[graph.last]
    for rank, used in enumerate(graph.used):
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
    send_seconds: ArrayLike = 0.0,
    pp: Size | None = None,
) -> Seconds:
    """[n] seconds that no exact time is below; equal to it where stages are alike and sends are free.

    All are [pp, n]: what each stage works in a step, its first forward and its last backward as they are there, and its
    shortest forward and backward. `send_seconds` is [n]; `num_microbatches` may be [n], and so may `pp`: where it is
    given, only the first `pp` rows of a layout are stages.

    Proof. Let m be num_microbatches, s the send, and i any stage. Its first action is F(0), which came through the
    stages j < i: it starts no sooner than head = sum of F_j(0) + s over j < i. Its last action is B(m-1), which must
    still go back through them: the step ends no sooner than tail = sum of B_j(m-1) + s over j < i after it. So head +
    middle + tail bounds the step, with either middle: (a) the stage works all its forwards and backwards, one at a
    time: its busy time; (b) B(x) ends no sooner than trip = 2 s (stages after i) + sum of F_j + B_j over j >= i after
    F(x) starts. With w forwards of warm-up, the stage's order has F(x+d) after B(x), d = w + 1. Write m - 1 = q d + r.
    For any a <= r, F(0) .. F(a-1), then F(a) to B(a), F(a+d) to B(a+d), .., F(a+qd) to B(a+qd), then B(a+qd+1) ..
    B(m-1), follow one another: a F_i + (q+1) trip + (r-a) B_i. The better of a = 0 and a = r is (q+1) trip + r max(F_i,
    B_i). (Where w = m, q = 0, and no F(x+d) is used.) In (b) the shortest F and B are counted.

    Raises:
        ValueError: the schedule is unknown.
    """
    given = (busy, first_forward, last_backward, least_forward, least_backward)
    working, first, last, forward, backward, sent = np.broadcast_arrays(
        *(np.asarray(q, np.float64) for q in given), np.asarray(send_seconds, np.float64)
    )
    send = sent[0]
    rows = len(working)
    stage = np.arange(rows)[:, None]
    stages = np.broadcast_to(np.asarray(rows if pp is None else pp), send.shape)
    m = np.asarray(num_microbatches)
    exists = stage < stages
    ends = np.cumsum(first + last, axis=0) - (first + last) + 2 * send * stage  # head + tail
    below = np.where(exists, forward + backward, 0.0)
    trip = np.cumsum(below[::-1], axis=0)[::-1] + 2 * send * (stages - 1 - stage)
    depth = np.maximum(warmup(schedule, stages, stage, m), 0) + 1
    rounds, rest = np.divmod(m - 1, depth)
    waiting = (rounds + 1) * trip + rest * np.maximum(forward, backward)
    bound: Seconds = np.where(exists, ends + np.maximum(working, waiting), -np.inf).max(axis=0)
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
