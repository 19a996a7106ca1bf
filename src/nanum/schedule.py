"""Who does which forward and backward, and when: the order of a pipeline schedule, written once.

A stage does `warmup` forwards, then `steady` pairs of one forward and one backward, then `cooldown` backwards (GPipe:
arXiv 1811.06965; 1F1B: PipeDream-Flush, arXiv 2006.09503, as in Megatron-LM's schedule without interleaving). Memory
reads from that order what is in flight; time is the exact (max,+) recurrence over it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Size = Any  # int, or np.ndarray of int64
Seconds = NDArray[np.float64]


class Action(NamedTuple):
    """One pass of one micro-batch: F forward, B backward, W the weights' part of it where a schedule splits it off.

    `chunk` is the virtual stage of the rank.
    """

    kind: Literal["F", "B", "W"]
    micro_batch: int
    chunk: int = 0


Order = tuple[tuple[Action, ...], ...]  # by stage


@dataclass(frozen=True)
class ActionKind:
    """What an action differs in by its place: it is the step's first or last of its direction, or comes right after one
    of the other direction, which has left the weights in another state.
    """

    direction: Literal["forward", "backward"]
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
_NAMES_OF = {kind: name for name, kind in KINDS.items()}


def name_of(action: Action, before: str | None, num_microbatches: int) -> str:
    """The name of an action whose stage did an action of kind `before` just before it."""
    first = action.micro_batch == 0
    if action.kind == "F":
        return _NAMES_OF[ActionKind("forward", first=first, after_other=before == "B")]
    last = action.micro_batch == num_microbatches - 1
    return _NAMES_OF[ActionKind("backward", first=first, last=last, after_other=before == "F")]


class Runs(NamedTuple):
    """The order of one stage, compressed: forwards, then pairs of a forward and a backward, then backwards."""

    warmup: Size
    steady: Size
    cooldown: Size


def _smaller(a: Size, b: Size) -> Size:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)


# By schedule, how many forwards a stage does before its first pair: (pp, stage, num_microbatches).
WARMUP: dict[str, Callable[[Size, Size, Size], Size]] = {
    "gpipe": lambda pp, stage, num_microbatches: num_microbatches + 0 * (pp + stage),
    "1f1b": lambda pp, stage, num_microbatches: _smaller(pp - 1 - stage, num_microbatches),
}


def warmup(schedule: str, pp: Size, stage: Size, num_microbatches: Size) -> Size:
    """Forwards that a stage does before its first pair. Sizes are ints or arrays.

    Raises:
        ValueError: the schedule is unknown.
    """
    if schedule not in WARMUP:
        raise ValueError(f"{schedule} is not a schedule: {', '.join(WARMUP)}")
    return WARMUP[schedule](pp, stage, num_microbatches)


def runs(schedule: str, pp: Size, stage: Size, num_microbatches: Size) -> Runs:
    """How many times a stage does what. Sizes are ints or arrays.

    Raises:
        ValueError: the schedule is unknown.
    """
    first = warmup(schedule, pp, stage, num_microbatches)
    return Runs(first, num_microbatches - first, first)


@lru_cache(maxsize=1024)
def order(schedule: str, pp: int, num_microbatches: int) -> Order:
    """What every stage does, in order.

    Raises:
        ValueError: the schedule is unknown, or a size is not positive.
    """
    if pp < 1 or num_microbatches < 1:
        raise ValueError(f"a pipeline needs a stage and a micro-batch: pp={pp}, num_microbatches={num_microbatches}")
    stages = []
    for stage in range(pp):
        count = runs(schedule, pp, stage, num_microbatches)
        actions = [Action("F", i) for i in range(count.warmup)]
        for i in range(count.steady):
            actions += [Action("F", count.warmup + i), Action("B", i)]
        actions += [Action("B", count.steady + i) for i in range(count.cooldown)]
        stages.append(tuple(actions))
    return tuple(stages)


@lru_cache(maxsize=1024)
def in_flight(schedule: str, pp: int, num_microbatches: int) -> tuple[int, ...]:
    """The most micro-batches that each stage holds the activations of at once, read off its order.

    Raises:
        ValueError: the schedule is unknown, or a size is not positive.
    """
    most = []
    for actions in order(schedule, pp, num_microbatches):
        held = peak = 0
        for action in actions:
            held += {"F": 1, "B": -1, "W": 0}[action.kind]
            peak = max(peak, held)
        most.append(peak)
    return tuple(most)


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
    last: NDArray[np.int64]  # row of each stage's last action
    used: NDArray[np.int64]  # [pp, names]: how often each stage does what


def _waits_for(action: Action, stage: int, pp: int) -> tuple[int, Action] | None:
    """The action on another stage whose result this one needs."""
    source = stage - 1 if action.kind == "F" else stage + 1
    return (source, action) if 0 <= source < pp else None


@lru_cache(maxsize=256)
def _graph(schedule: str, pp: int, num_microbatches: int) -> _Graph:
    stages = order(schedule, pp, num_microbatches)
    total = sum(map(len, stages))
    row: dict[tuple[int, Action], int] = {}
    position, latest = [0] * pp, [0] * pp
    used = np.zeros((pp, len(NAMES)), np.int64)
    levels = []
    while len(row) < total:
        start = len(row) + 1
        ready = []
        for stage, actions in enumerate(stages):
            if position[stage] < len(actions):
                action = actions[position[stage]]
                needed = _waits_for(action, stage, pp)
                if needed is None or needed in row:
                    ready.append((stage, action, total + 1 if needed is None else row[needed]))
        assert ready, "an order in which every stage waits"
        columns = []
        for offset, (stage, action, source) in enumerate(ready):
            # Durations are stacked by name, of pp rows each.
            before = stages[stage][position[stage] - 1].kind if position[stage] else None
            block = NAMES.index(name_of(action, before, num_microbatches))
            used[stage, block] += 1
            columns.append((latest[stage], source, block * pp + stage))
            row[stage, action] = latest[stage] = start + offset
            position[stage] += 1
        before_rows, source_rows, duration = np.array(columns, dtype=np.int64).T
        levels.append(_Level(start, start + len(ready), before_rows, source_rows, duration))
    return _Graph(total + 2, tuple(levels), np.array(latest, dtype=np.int64), used)


@dataclass(frozen=True, eq=False)
class Finish:
    """When a pipelined step ends, for n layouts."""

    stage_seconds: Seconds  # [pp, n]: when each stage's last action ends
    busy_seconds: Seconds  # [pp, n]: what each stage works
    total_seconds: Seconds  # [n]

    @property
    def bubble_seconds(self) -> Seconds:
        """[pp, n]: how long each stage is idle."""
        return self.total_seconds - self.busy_seconds


def finish_times(
    schedule: str, num_microbatches: int, durations: Mapping[str, ArrayLike], send_seconds: ArrayLike = 0.0
) -> Finish:
    """The exact end of a step: each action starts when its stage is free and its input has come.

    Args:
        schedule: a name of `WARMUP`.
        num_microbatches: of all n layouts.
        durations: [pp, n] seconds of the actions of each name of `NAMES` that is done; one that is not given lasts as
            long as "forward" or "backward".
        send_seconds: [n], from the end of an action to the start of the next stage's; the sender does not wait.

    Raises:
        ValueError: the schedule is unknown, or there is no micro-batch.
    """
    stacked, send = _stacked(durations, send_seconds)
    _, pp, n = stacked.shape
    durations_by_row = stacked.reshape(-1, n)
    graph = _graph(schedule, pp, num_microbatches)
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
    for stage, used in enumerate(graph.used):
        busy[stage] = np.tensordot(used, stacked[:, stage], 1)
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


def _stacked(durations: Mapping[str, ArrayLike], send: ArrayLike) -> tuple[Seconds, Seconds]:
    """Durations as [names, pp, n], the send as [n]."""
    alike: dict[str, ArrayLike] = {}
    for name, seconds in durations.items():
        direction = KINDS[name].direction
        if name == direction or direction not in alike:
            alike[direction] = seconds
    many = [np.asarray(durations.get(name, alike[kind.direction]), np.float64) for name, kind in KINDS.items()]
    sent = np.asarray(send, np.float64)
    *many, sent = np.broadcast_arrays(*many, sent[None] if sent.ndim else sent)
    return np.stack(many), sent[0]
