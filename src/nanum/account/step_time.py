"""The time of a step: what each action of each stage takes, and the pipeline's exact recurrence (or its bound) over
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nanum.account.cost import Cost
from nanum.account.timeline import COMPUTE, TimeMap, fold
from nanum.account.totals import Totals, totals
from nanum.arrays import take
from nanum.once import Once
from nanum.program import PIPELINE_STREAM, Collective, Node, Quantity
from nanum.schedule import KINDS, finish_times, lower_bound


class Step(Protocol):
    """A step as `parallel.pipeline` builds it: named actions, how often each is done, and what follows."""

    @property
    def actions(self) -> Mapping[str, tuple[Node, ...]]: ...
    @property
    def rounds(self) -> dict[str, Any]: ...
    @property
    def optimizer(self) -> tuple[Node, ...]: ...
    @property
    def send(self) -> Collective: ...
    @property
    def at(self) -> np.ndarray | None: ...


@dataclass(frozen=True, eq=False)
class StageTime:
    """Seconds of one stage, or arrays of them over (layout, stage) entries."""

    durations: dict[str, Quantity]  # of one action of each name
    rounds: dict[str, Quantity]  # how often it is done in a step
    busy_seconds: Quantity  # what the stage works in a step, the optimizer aside
    compute_seconds: Quantity  # kernels among it
    streamed_seconds: Quantity  # what it waits for streams; the rest are exchanges that it waits for at once
    optimizer_seconds: Quantity  # of all after the last backward has sent: reductions that go on, and the update
    update_seconds: Quantity  # its kernels alone
    send_seconds: Quantity

    def at(self, entries: Any) -> StageTime:
        """Some of many entries."""

        def pick(q: Quantity) -> Quantity:
            return q[entries] if isinstance(q, np.ndarray) and q.ndim else q

        several = ({name: pick(q) for name, q in table.items()} for table in (self.durations, self.rounds))
        rest = (
            self.busy_seconds,
            self.compute_seconds,
            self.streamed_seconds,
            self.optimizer_seconds,
            self.update_seconds,
            self.send_seconds,
        )
        return StageTime(*several, *map(pick, rest))


def sent(nodes: tuple[Node, ...]) -> int:
    """How many of an action's nodes are done when it has sent what the next stage waits for."""
    for i in range(len(nodes) - 1, -1, -1):
        node = nodes[i]
        if isinstance(node, Collective) and node.stream == PIPELINE_STREAM:
            return i + 1
    return len(nodes)


def stage_time(step: Step, cost: Cost, known: Once[TimeMap] | None = None, bodies: Cost | None = None) -> StageTime:
    """Fold each distinct action once. An action ends when its compute does; what it sends travels beside the next. The
    last backward ends with its send: the stage before need not wait for what is still reduced then.

    `cost` is of the step's distinct stages (`step.layout`); `known` remembers the bodies that steps of one cost share.
    """
    known = Once() if known is None else known
    rounds = step.rounds
    busy: Any = 0.0
    compute: Any = 0.0
    streamed: Any = 0.0
    end = fold(step.optimizer, cost, known, bodies)
    after = take(np.maximum(end.total_seconds, end.host_seconds), step.at)
    durations = {}
    for name, times in rounds.items():
        nodes = step.actions[name]
        stop = sent(nodes) if KINDS[name].last else len(nodes)
        m = fold(nodes[:stop], cost, known, bodies)
        ends = end_of_compute(m)
        if late := nodes[stop:]:
            until = end_of_streams(m)
            m = m.then(fold(late, cost, known, bodies))
            whole = np.maximum(m.then(end).total_seconds - until, end.host_seconds)
            after = np.where(times > 0, take(whole, step.at), after)
        waits = end_of_streams(m) - m.compute_seconds - m.blocking_seconds
        durations[name] = take(ends, step.at)
        busy = busy + times * durations[name]
        compute = compute + times * take(kernels_seconds(m), step.at)
        streamed = streamed + times * np.maximum(take(waits, step.at), 0.0)
    last = (kernels_seconds(end), cost.collective_seconds(step.send))
    return StageTime(durations, rounds, busy, compute, streamed, after, *(take(q, step.at) for q in last))


def kernels_seconds(m: TimeMap) -> Quantity:
    """Of kernels; or of the host, where it takes longer to launch them and the device waits for it."""
    return np.maximum(m.compute_seconds, m.host_seconds - m.blocking_seconds)


def end_of_compute(m: TimeMap) -> Quantity:
    """When the compute is done, all clocks having begun at 0, the host's too: no sooner than all is launched."""
    return np.maximum(end_of_streams(m), m.host_seconds)


def end_of_streams(m: TimeMap) -> Quantity:
    """The same, were launches free."""
    latest: Quantity = 0.0
    for seconds in m.rows.get(COMPUTE, {}).values():
        latest = np.maximum(latest, seconds)
    return latest


def _rows(times: Sequence[StageTime], read: Callable[[StageTime], Quantity], n: int) -> np.ndarray:
    return np.stack([np.broadcast_to(np.asarray(read(t), np.float64), (n,)) for t in times])


def exact(
    schedule: str, num_microbatches: int, times: Sequence[StageTime], n: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The exact step of n layouts, [n] seconds: every stage's last backward, and its optimizer; and the same were sends
    free.

    `times` has one entry for each stage.
    """
    optimizer = _rows(times, lambda t: t.optimizer_seconds, n)
    if len(times) == 1:
        alone = (_rows(times, lambda t: t.busy_seconds, n) + optimizer)[0]
        return alone, alone
    send = _rows(times[:1], lambda t: t.send_seconds, n)[0]
    names = {name for t in times for name in t.durations}

    def twice(name: str) -> np.ndarray:
        """Of an action that a stage does not do, any time will do."""
        return np.tile(_rows(times, lambda t: t.durations.get(name, 0.0), n), 2)

    durations = {name: twice(name) for name in names}
    finish = finish_times(schedule, num_microbatches, durations, np.concatenate([send, 0.0 * send]))
    ends = (finish.stage_seconds + np.tile(optimizer, 2)).max(axis=0)
    return ends[:n], ends[n:]


ROUNDING = 1e-12
"""Of a step: what sums of its parts may be off by."""


@dataclass(frozen=True, eq=False)
class Cut:
    """Steps of n layouts, cut along the stage that works longest; the parts add up to the step. All [n] seconds."""

    step: np.ndarray
    compute: np.ndarray
    exposed_communication: np.ndarray
    bubble: np.ndarray
    optimizer: np.ndarray
    sends: np.ndarray  # what the pipeline's sends add, a part of the exposed communication


def parts(step: np.ndarray, free: np.ndarray, work: np.ndarray, compute: np.ndarray, update: np.ndarray) -> Cut:
    """Steps of n layouts and the same were sends free, [n]; of each rank what it works, its kernels without the update
    and those of the update, [pp, n].
    """
    longest = work.argmax(axis=0), np.arange(work.shape[1])
    communication = work[longest] - compute[longest] - update[longest] + step - free
    communication[communication < ROUNDING * step] = 0.0
    bubble = step - compute[longest] - communication - update[longest]
    bubble[bubble < ROUNDING * step] = 0.0
    return Cut(step, compute[longest], communication, bubble, update[longest], step - free)


def cut(schedule: str, num_microbatches: int, times: Sequence[StageTime], n: int = 1) -> Cut:
    """The exact steps of n layouts and their parts."""
    step, free = exact(schedule, num_microbatches, times, n)
    of: tuple[Callable[[StageTime], Quantity], ...] = (
        lambda t: t.busy_seconds + t.optimizer_seconds,
        lambda t: t.compute_seconds,
        lambda t: t.update_seconds,
    )
    return parts(step, free, *(_rows(times, read, n) for read in of))


@dataclass(frozen=True, eq=False)
class Bound:
    """Seconds below which no stage's actions are, by name, and how often each is done; arrays over (layout, stage)
    entries.
    """

    durations: dict[str, Quantity]
    rounds: dict[str, Quantity]
    after_seconds: Quantity  # the last backward has sent: reductions that go on, and the update
    send_seconds: Quantity


def stage_bound(step: Step, cost: Cost, bodies: Cost, known: Once[Totals]) -> Bound:
    """As `stage_time`, by sums alone. `bodies` is the cost in the space of the bodies."""
    rounds = step.rounds
    durations = {}
    update = take(totals(step.optimizer, cost, bodies, known).least, step.at)
    after: Any = update
    for name, times in rounds.items():
        nodes = step.actions[name]
        whole = totals(nodes, cost, bodies, known)
        least = whole.bound
        if KINDS[name].last and sent(nodes) < len(nodes):
            least = whole.least
            after = np.where(times > 0, update + take(whole.bound - least, step.at), after)
        durations[name] = take(least, step.at)
    return Bound(durations, rounds, after, take(cost.collective_seconds(step.send), step.at))


def bound(schedule: str, num_microbatches: Any, pp: np.ndarray, stages: Bound) -> np.ndarray:
    """[n] seconds that no exact step of n layouts is below. Entries are ordered by layout, `pp[i]` stages of layout i
    in order.

    That of the pipeline (`schedule.lower_bound`).
    """
    n, rows = len(pp), int(pp.max())
    layout = np.repeat(np.arange(n), pp)
    stage = np.arange(len(layout)) - np.repeat(np.cumsum(pp) - pp, pp)

    def table(q: Any) -> np.ndarray:
        out = np.zeros((rows, n))
        out[stage, layout] = q
        return out

    busy: Any = 0.0
    least: dict[str, Any] = {"forward": np.inf, "backward": np.inf}
    last: Any = 0.0
    for name, seconds in stages.durations.items():
        times, kind = stages.rounds[name], KINDS[name]
        busy = busy + times * seconds
        so_far = least[kind.direction]
        least[kind.direction] = np.where(times > 0, np.minimum(so_far, seconds), so_far)
        if kind.last:
            last = np.where(times > 0, seconds, last)
    return lower_bound(
        schedule,
        num_microbatches,
        busy=table(busy),
        first_forward=table(stages.durations["forward.first"]),
        last_backward=table(last),
        least_forward=table(least["forward"]),
        least_backward=table(least["backward"]),
        after=table(stages.after_seconds),
        send_seconds=table(stages.send_seconds).max(axis=0),
        pp=pp,
    )
