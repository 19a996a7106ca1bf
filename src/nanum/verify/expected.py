"""What a rank of a real run must be found to exchange and to hold: the same Program, read for that rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from nanum.account.memory import Moment, held_after, moment
from nanum.account.traffic import traffic
from nanum.build import build_rank
from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import Layout
from nanum.model import Model
from nanum.parallel.chunks import RankStep
from nanum.parallel.pipeline import Step
from nanum.program import Repeat


class RowKey(NamedTuple):
    """What tells the rows of a ledger apart."""

    axis: str
    kind: str
    phase: str
    dtype: str
    group_size: int


class Counted(NamedTuple):
    calls: int
    payload_bytes: int


Ledger = dict[RowKey, Counted]


@dataclass(frozen=True)
class Expected:
    """One rank's step. Each part is worked out when it is asked for."""

    step: Step | RankStep
    layout: Layout

    @cached_property
    def ledger(self) -> Ledger:
        rows: Ledger = {}
        for key, total in traffic(self.step.program).items():
            row = RowKey(self._axis(key.axes), key.kind, key.phase, key.dtype, int(total.group_size))
            before = rows.get(row, Counted(0, 0))
            rows[row] = Counted(before.calls + int(total.calls), before.payload_bytes + int(total.payload_bytes))
        return rows

    def _axis(self, axes: Iterable[str]) -> str:
        """As a run names it, whose mesh has experts' own axes alone, where they have any."""
        if self.layout.structure.own_experts and "dp_shard" in axes:
            axes = {*axes, "edp", "ep"} - {"dp_shard"}
        return self.layout.named(axes)

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes by what a run counts: parameters and optimizer states, gradients when backward has ended, what is held
        over from a forward pass to its backward (without a pipeline), and the most of a step.
        """
        between = held_after(self.step.program)
        before_optimizer = held_after(self.step.before_update)
        found = {
            "params": between.get("params", 0),
            "grads": before_optimizer.get("grads", 0),
            "optimizer_states": between.get("optimizer_states", 0),
            "allocated_peak": self.peak.bytes,
        }
        if isinstance(self.step, Step) and not self.layout.structure.pipelined:
            first = Repeat(1, self.step.actions["forward.first"], self.step.at)
            found["saved"] = sum(held_after((first,)).values())
        return found

    @cached_property
    def peak(self) -> Moment:
        return moment(self.step.program)


def expected(model: Model, job: Job, layout: Layout, engine: Engine, place: Mapping[str, int]) -> Expected:
    """Of the rank at `place`, by its index along each axis."""
    return Expected(build_rank(model, job, layout, engine, place["pp"], at=place), layout)
