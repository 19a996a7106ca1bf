"""The time of a step: what each action of each stage takes, and the pipeline's exact recurrence (or its bound) over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nanum.account.cost import Cost
from nanum.account.timeline import COMPUTE, Known, TimeMap, fold
from nanum.program import Collective, Node, Quantity
from nanum.schedule import Finish, finish_times, lower_bound


class Step(Protocol):
    """A step as `parallel.pipeline` builds it: named actions, how often each is done, and what follows."""

    @property
    def actions(self) -> dict[str, tuple[Node, ...]]: ...
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
    maps: dict[str, TimeMap]
    optimizer: TimeMap
    send_seconds: Quantity

    def _sum(self, of: Mapping[str, Quantity]) -> Quantity:
        total: Quantity = 0.0
        for name, seconds in of.items():
            total = total + self.rounds[name] * seconds
        return total

    @property
    def busy_seconds(self) -> Quantity:
        """What the stage works in a step, the optimizer aside."""
        return self._sum(self.durations)

    @property
    def compute_seconds(self) -> Quantity:
        return self._sum({name: m.compute_seconds for name, m in self.maps.items()})

    @property
    def streamed_seconds(self) -> Quantity:
        """What the compute waits for streams."""
        return self.busy_seconds - self.compute_seconds - self._sum({name: m.blocking_seconds for name, m in self.maps.items()})

    def extreme(self, kind: str, which: str) -> Quantity:
        """The shortest action of a kind among those that are done, or its last one."""
        found: Quantity = np.inf if which == "least" else 0.0
        for name, seconds in self.durations.items():
            if not name.startswith(kind):
                continue
            done = self.rounds[name] > 0
            if which == "least":
                found = np.where(done, np.minimum(found, seconds), found)
            elif "last" in name or "only" in name:
                found = np.where(done, seconds, found)
        return found


def stage_time(step: Step, cost: Cost, known: Known | None = None) -> StageTime:
    """Fold each distinct action once. An action ends when its compute does; what it sends travels beside the next.

    `known` remembers the bodies that steps of one cost share.
    """
    known = {} if known is None else known
    maps = {name: fold(nodes, cost, known) for name, nodes in step.actions.items()}
    durations = {name: end_of_compute(m) for name, m in maps.items()}
    return StageTime(durations, step.rounds, maps, fold(step.optimizer, cost, known), cost.collective_seconds(step.send))


def end_of_compute(m: TimeMap) -> Quantity:
    """When the compute is done, all clocks having begun at 0."""
    latest: Quantity = 0.0
    for seconds in m.rows.get(COMPUTE, {}).values():
        latest = np.maximum(latest, seconds)
    return latest


@dataclass(frozen=True, eq=False)
class StepTime:
    """Exact times of n layouts of one pp and one number of micro-batches; [pp, n] by stage."""

    step_seconds: np.ndarray
    finish: Finish


def _rows(times: Sequence[StageTime], of: str) -> np.ndarray:
    return np.stack([np.atleast_1d(np.asarray(getattr(t, of), np.float64)) for t in times])


def exact(schedule: str, num_microbatches: int, times: Sequence[StageTime], send_seconds: Any = None) -> StepTime:
    """The exact step: every stage's last backward and optimizer. `times` has one entry for each stage."""
    send = np.atleast_1d(times[0].send_seconds if send_seconds is None else send_seconds)
    optimizer = np.stack([np.atleast_1d(np.asarray(t.optimizer.total_seconds, np.float64)) for t in times])
    if len(times) == 1:
        busy = _rows(times, "busy_seconds")
        finish = Finish(busy, busy, busy[0])
    else:
        names = times[0].durations
        durations = {name: np.stack([np.atleast_1d(t.durations[name]) for t in times]) for name in names}
        durations.setdefault("forward", durations["forward.first"])
        finish = finish_times(schedule, num_microbatches, durations, send)
    return StepTime((finish.stage_seconds + optimizer).max(axis=0), finish)


def bound(schedule: str, num_microbatches: Any, pp: Any, time: StageTime, shape: tuple[int, int], place: np.ndarray) -> np.ndarray:
    """[n] seconds that no exact step is below, for entries put by `place` into a [stages, n] table of `shape`.

    The pipeline's bound, and then at least the shortest optimizer.
    """

    def table(q: Any, fill: float = 0.0) -> np.ndarray:
        out = np.full(shape[0] * shape[1], fill)
        out[place] = q
        return out.reshape(shape)

    low = lower_bound(
        schedule,
        num_microbatches,
        busy=table(time.busy_seconds),
        first_forward=table(time.durations["forward.first"]),
        last_backward=table(time.extreme("backward", "last")),
        least_forward=table(time.extreme("forward", "least")),
        least_backward=table(time.extreme("backward", "least")),
        send_seconds=table(time.send_seconds).max(axis=0),
        pp=pp,
    )
    return low + table(time.optimizer.total_seconds, np.inf).min(axis=0)
