"""One question, one answer: a model, a job, a cluster and a layout under an engine's conventions, as memory, exchanges
and time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from nanum import engines
from nanum.account.coefficients import Coefficients, Fitted, Range, Ranges, coefficients, on
from nanum.account.cost import Cost
from nanum.account.memory import moment, peak
from nanum.account.rank_time import RankTimes, rank_times
from nanum.account.step_time import Cut, StageTime, cut, stage_time
from nanum.account.timeline import TimeMap
from nanum.account.traffic import flops, groups_of
from nanum.build import build, build_ranks
from nanum.cluster import Cluster
from nanum.cluster.in_a_step import LIMITS, NAMES, OF_HOST, PHYSICAL
from nanum.engines.engine import Engine
from nanum.errors import Refused
from nanum.job import Job
from nanum.layout import Layout
from nanum.model import Experts, Model
from nanum.once import Once
from nanum.parallel.chunks import RankStep
from nanum.parallel.pipeline import Step
from nanum.prediction.ledger import Row, rows_of_rank
from nanum.prediction.memory import StageMemory, pooled_bytes
from nanum.prediction.reference import Reference, parameters, reference
from nanum.rules import GENERAL, broken

_ALONE: Once[StageTime] = Once(at_most=256)
"""Of the same model, job, cluster and engine, as the answers of a plan are: the time of a layout of one GPU.
Bounded, for it outlives the plan."""


@lru_cache(maxsize=256)
def _one_of(layout: Layout) -> Layout:
    """The first of equal layouts, so that they are one to a memory by identity."""
    return layout


@dataclass(frozen=True)
class Time:
    """One step, cut along the pipeline rank that works longest; the parts add up to the step."""

    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    compute_seconds: float
    exposed_communication_seconds: float
    bubble_seconds: float
    optimizer_seconds: float
    serial_fraction: float | None

    @property
    def bubble_fraction(self) -> float:
        return self.bubble_seconds / self.step_seconds


def karp_flatt(speedup: float, n: int) -> float:
    """The serial fraction that explains a speed-up on n > 1 processors: (1/S - 1/N) / (1 - 1/N) (Karp and Flatt 1990).

    Below 0 where the speed-up is more than n, above 1 where it is less than 1.
    """
    return (1 / speedup - 1 / n) / (1 - 1 / n)


def consistent(layout: Layout) -> Layout:
    """The structure says what the sizes say: a pipeline where pp > 1, tensor parallelism where tp > 1, and where cp > 1
    a kind of context parallelism (a ring, where it names none).
    """
    s = layout.structure
    tensor = "none" if layout.tp == 1 else "tensor" if s.tensor == "none" else s.tensor
    cp_kind = "none" if layout.cp == 1 else "ring" if s.cp_kind == "none" else s.cp_kind
    own = bool(layout.ep > 1) or s.own_experts
    pipelined = bool(layout.pp > 1)
    return replace(layout, structure=replace(s, pipelined=pipelined, tensor=tensor, cp_kind=cp_kind, own_experts=own))


def reasons(model: Model, job: Job, cluster: Cluster, layout: Layout, engine: Engine) -> list[str]:
    """Every reason why a layout is impossible, the engine's own among them; none where it is possible."""
    general = broken(GENERAL, model, job, cluster, layout)
    sizes = (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.pp, layout.micro_batch_size)
    if any(not isinstance(n, int | np.integer) or n < 1 for n in sizes):
        return general
    return [*general, *broken(engine.refuses, model, job, cluster, layout)]


@dataclass(frozen=True)
class Prediction:
    """The answer. Each part is worked out when it is asked for."""

    model: Model
    job: Job
    cluster: Cluster
    layout: Layout
    engine: Engine
    coefficients: Coefficients = field(default_factory=coefficients)

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefficients", on(self.cluster, self.coefficients))

    def by(self, known: Coefficients) -> Prediction:
        """The same by other coefficients; its Program is not built again."""
        other = replace(self, coefficients=known)
        vars(other)["steps"] = self.steps  # where a cached property is kept
        return other

    # --- the Program --------------------------------------------------------------------------------------------------
    @cached_property
    def steps(self) -> tuple[Step | RankStep, ...]:
        """One step of each pipeline rank, which has a stage or several."""
        return build_ranks(self.model, self.job, self.layout, self.engine)

    @property
    def num_microbatches(self) -> int:
        return int(self.job.num_microbatches(self.layout.micro_batch_size, self.layout.data_ranks))

    @cached_property
    def cost(self) -> Cost:
        return Cost(self.cluster, self.layout, self.coefficients)

    # --- memory -------------------------------------------------------------------------------------------------------
    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        at, cuda = self.layout, self.cluster.measured.streams
        groups = frozenset(group for step in self.steps for group in groups_of(step.counted))
        return tuple(
            StageMemory(i, moment(step.program), pooled_bytes(step), groups, at.mesh, self._host_bytes(step), cuda)
            for i, step in enumerate(self.steps)
        )

    def _host_bytes(self, step: Step | RankStep) -> int:
        return int(np.max(peak(step.program, host=True).peak)) if self.layout.structure.offload else 0

    @cached_property
    def worst(self) -> StageMemory:
        return max(self.memory, key=lambda m: m.device_bytes)

    @property
    def fits(self) -> bool:
        return self.worst.device_bytes <= self.cluster.chip.memory_bytes.value

    # --- time ---------------------------------------------------------------------------------------------------------
    @cached_property
    def stage_times(self) -> tuple[StageTime, ...]:
        """Of each rank that has one stage."""
        known: Once[TimeMap] = Once()
        alike: dict[Any, Step] = {}  # stages that hold the same do the same
        times = []
        for step in self.steps:
            if isinstance(step, Step):
                same = alike.setdefault(step.holds, step)
                like = replace(step, actions=same.actions, optimizer=same.optimizer)
                times.append(stage_time(like, self.cost, known))
        return tuple(times)

    @cached_property
    def _timed(self) -> RankTimes:
        """The exact step and its parts, and what each rank waits for its own streams; by each of several sets of
        coefficients, where these are arrays.
        """
        structure, m = self.layout.structure, self.num_microbatches
        several = [step for step in self.steps if isinstance(step, RankStep)]
        if several:
            return rank_times(structure.schedule, m, structure.virtual_stages, several, self.cost)
        waits = np.stack([np.atleast_1d(time.streamed_seconds) for time in self.stage_times])
        return RankTimes(cut(structure.schedule, m, self.stage_times, waits.shape[1]), waits)

    @property
    def parts(self) -> Cut:
        """The exact step and its parts."""
        return self._timed.cut

    @property
    def range(self) -> Range:
        """Least and most of the step, over it."""
        experts = any(isinstance(kind.mlp, Experts) for kind in self.model.kinds)
        return self._ranges.of(self.engine.name, self.cluster.chip.name, experts=experts)

    @property
    def _ranges(self) -> Ranges:
        """Those of what was observed of this model on this cluster."""
        own = self.cluster.in_a_step
        seen = own.seen(self.model.name, self.engine.name, self.job.precision) if own else 0
        return self.coefficients.ranges_after(seen)

    @cached_property
    def least_seconds(self) -> float:
        """Of the step, were nothing slower in it than alone, GPUs equal, and launches and exchanges beside compute
        free."""
        fitted = self.coefficients.fitted
        free = {name: LIMITS[name][0] for name in (*OF_HOST, "beside")}
        free["matmul_fp8"] = fitted.matmul_fp8.value
        best = {name: replace(getattr(fitted, name), value=free.get(name, PHYSICAL)) for name in NAMES}
        known = self.coefficients
        known = replace(known, uneven=replace(known.uneven, value=0.0), fitted=Fitted(**best))
        return float(self.by(known).parts.step[0])

    @cached_property
    def launch_seconds(self) -> float:
        """Of the step, by how much it would be shorter if launches were free: what kernels wait for the host."""
        fitted = self.coefficients.fitted
        free = {n: replace(getattr(fitted, n), value=LIMITS[n][0]) for n in OF_HOST}
        without = self.by(replace(self.coefficients, fitted=replace(fitted, **free)))
        return float(self.parts.step[0] - without.parts.step[0])

    @property
    def _low_seconds(self) -> float:
        """The least of the range; where steps were observed, coefficients may be near their bounds, which it keeps."""
        step = float(self.parts.step[0])
        low = self.range.low * step
        return low if self.cluster.in_a_step is None else min(step, max(low, self.least_seconds))

    @cached_property
    def time(self) -> Time:
        c = self.parts
        step_seconds = float(c.step[0])
        return Time(
            step_seconds,
            self._low_seconds,
            self.range.high * step_seconds,
            float(c.compute[0]),
            float(c.exposed_communication[0]),
            float(c.bubble[0]),
            float(c.optimizer[0]),
            self._serial_fraction(step_seconds),
        )

    def _serial_fraction(self, step_seconds: float) -> float | None:
        """Of the speed-up over one GPU, virtual where the model does not fit it."""
        n = self.cluster.gpus
        return None if n == 1 else float(karp_flatt(self.one_gpu_seconds / step_seconds, n))

    @property
    def one_gpu_seconds(self) -> float:
        """The same step on one GPU, were its memory large enough."""
        return float(self.alone.busy_seconds + self.alone.optimizer_seconds)

    @cached_property
    def one_gpu_bytes(self) -> int:
        """What that step needs of one GPU's memory."""
        return replace(self, cluster=self._one_gpu, layout=self._layout_alone).worst.device_bytes

    @property
    def _one_gpu(self) -> Cluster:
        return replace(self.cluster, nodes=1, gpus_per_node=1)

    @property
    def _layout_alone(self) -> Layout:
        at = self.layout.structure
        again = at.recompute_layers * self.layout.pp * at.virtual_stages  # of one stage, what were those of each
        structure = replace(at, tensor="none", pipelined=False, cp_kind="none", recompute_layers=again)
        return _one_of(Layout(micro_batch_size=self.layout.micro_batch_size, structure=structure))

    @cached_property
    def alone(self) -> StageTime:
        """The time of the same step on one GPU, were its memory large enough."""
        layout = self._layout_alone
        made_of = self.model, self.job, self.cluster, self.engine, self.coefficients, layout
        return _ALONE(made_of, lambda: self._time_alone(layout))

    def _time_alone(self, layout: Layout) -> StageTime:
        step = build(self.model, self.job, layout, self.engine, 0)
        return stage_time(step, Cost(self._one_gpu, layout, self.coefficients))

    # --- exchanges ----------------------------------------------------------------------------------------------------
    @cached_property
    def communication(self) -> tuple[Row, ...]:
        """The ledger."""
        rows: list[Row] = []
        for i, step in enumerate(self.steps):
            time = self.stage_times[i] if self.stage_times else float(self._timed.streamed_seconds[i][0])
            rows += rows_of_rank(i, step, self.layout, self.cost, time, sends_seconds=float(self.parts.sends[0]))
        return tuple(rows)

    # --- throughput ---------------------------------------------------------------------------------------------------
    @cached_property
    def throughput(self) -> dict[str, float]:
        """Rates of the exact step. HFU counts what is recomputed too."""
        step_seconds = self.time.step_seconds
        hardware_flops = sum(float(flops(s.counted)) for s in self.steps) / self.layout.pp
        return {
            **self.rates(step_seconds),
            "model_flops": self.model_flops,
            "hfu": hardware_flops / (step_seconds * self.peak_flops_per_second),
            "peak_flops_per_second": self.peak_flops_per_second,
        }

    def rates(self, step_seconds: float) -> dict[str, float]:
        """Tokens a second, and the model's FLOPs over what the chips' peak would do in a step of that length."""
        gpus, tokens = self.cluster.gpus, self.job.tokens_per_step / step_seconds
        return {
            "tokens_per_second": tokens,
            "tokens_per_second_per_gpu": tokens / gpus,
            "mfu": self.model_flops / (step_seconds * gpus * self.peak_flops_per_second),
        }

    @property
    def reference(self) -> Reference:
        """What the model is, trained so, whatever the layout."""
        return reference(self.model, self.job.seq_len, self.job.trained)

    @property
    def model_flops(self) -> float:
        """Of the whole job in a step: forward and backward of what needs it, attention causal, nothing recomputed."""
        return self.reference.model_flops_per_sequence * self.job.global_batch_size

    @property
    def peak_flops_per_second(self) -> float:
        chip = self.cluster.chip
        peak = chip.peak_flops_per_second.get(self.job.precision) or chip.best_flops_per_second[self.job.precision]
        return peak.value

    # --- what it rests on ---------------------------------------------------------------------------------------------
    @property
    def assumptions(self) -> list[dict[str, Any]]:
        self._timed  # noqa: B018 - the cost lists what it has been asked for
        capacity = self.cluster.chip.memory_bytes
        ranges, spread = self._ranges, self.range
        stated = [
            ("device memory", capacity.value, "bytes", capacity.tag, capacity.source),
            ("least of the step's range, over the step", spread.low, "ratio", "derived", ranges.source),
            ("most of the step's range, over the step", spread.high, "ratio", "derived", ranges.source),
            ("counts of parameters, exchanges and memory", None, "", "derived", "read off the Program"),
            *self._observed,
        ]
        keys = ("what", "value", "unit", "tag", "source")
        mine = [dict(zip(keys, each, strict=True)) for each in stated]
        beyond = [{**asdict(term), "tag": "assumed"} for term in self.worst.terms]
        return [*beyond, *mine, *self.cost.assumptions()]

    @property
    def _observed(self) -> list[tuple[Any, ...]]:
        own = self.cluster.in_a_step
        return [
            (f"step of {e.model}, {e.layout}, {e.engine}, {e.precision}", e.seconds, "seconds", "measured", e.source)
            for e in (own.observations if own else ())
        ]

    def to_dict(self, *, communication: bool = True) -> dict[str, Any]:
        """The answer as one document, of plain Python values; without its ledger where that is not asked for."""
        from nanum.prediction.document import document

        return document(self, communication=communication)


def predict(model: Model, job: Job, cluster: Cluster, layout: Layout, engine: str = "torchtitan") -> Prediction:
    """Predict one layout. Raises Refused with every reason where it is impossible."""
    chosen = engines.load(engine)
    sized = all(isinstance(n, int | np.integer) for n in (layout.cp, layout.tp, layout.pp))
    layout = consistent(layout) if sized else layout
    if why := reasons(model, job, cluster, layout, chosen):
        raise Refused(why)
    return Prediction(model, job, cluster, layout, chosen)


__all__ = ["Prediction", "Row", "StageMemory", "Time", "consistent", "parameters", "predict", "reasons", "reference"]
