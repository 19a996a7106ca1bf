"""Points of one form of scaling: predictions on ever more GPUs, beside one GPU and beside the first of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from nanum.cluster import Cluster
from nanum.engines.engine import Engine
from nanum.errors import Refused
from nanum.job import Job
from nanum.model import Model
from nanum.prediction import Prediction, consistent, karp_flatt, reasons
from nanum.rules import BATCH, GENERAL, WORLD, broken
from nanum.rules.dispatch import on_nodes
from nanum.scaling.growth import NOT_NODES, Form, Growth, cluster_of, job_of
from nanum.scaling.laws import Pair
from nanum.search import plan


@dataclass(frozen=True)
class Rejected:
    """A count of GPUs that is no point, and every reason. `device_bytes` where it is possible but does not fit."""

    gpus: int
    form: Form
    why: tuple[str, ...]
    device_bytes: int | None = None


@dataclass(frozen=True)
class Point:
    """One count of GPUs. `one_gpu_seconds` are of the same step on one GPU, were its memory large enough."""

    prediction: Prediction
    one_gpu_seconds: float
    first: Prediction

    @property
    def gpus(self) -> int:
        return self.prediction.cluster.gpus

    @property
    def step_seconds(self) -> float:
        return self.prediction.time.step_seconds

    @property
    def speedup(self) -> float:
        """Over one GPU that does the same step."""
        return self.one_gpu_seconds / self.step_seconds

    @property
    def efficiency(self) -> float:
        return self.speedup / self.gpus

    @property
    def speedup_over_first(self) -> float:
        """Of the work done in a second; perfect scaling is the quotient of the GPUs."""
        batch, before = self.prediction.job.global_batch_size, self.first.job.global_batch_size
        return batch / before * self.first.time.step_seconds / self.step_seconds

    @property
    def efficiency_over_first(self) -> float:
        return self.speedup_over_first * self.first.cluster.gpus / self.gpus


@dataclass(frozen=True)
class Curve:
    """The counts that fit, ascending, and those that were rejected."""

    form: Form
    predictions: tuple[Prediction, ...]
    rejected: tuple[Rejected, ...]

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """Layouts of one job have one time of one GPU: that of the layout that is fastest there."""
        alone = [p.one_gpu_seconds for p in self.predictions]
        if self.form == "strong" and alone:
            alone = [min(alone)] * len(alone)
        return tuple(Point(p, seconds, self.predictions[0]) for p, seconds in zip(self.predictions, alone, strict=True))

    @property
    def pairs(self) -> list[Pair]:
        """As the laws take them."""
        return [(point.gpus, point.speedup) for point in self.points]

    @property
    def pairs_over_first(self) -> list[Pair]:
        """The same of the first count of GPUs as if it were one."""
        first = self.predictions[0].cluster.gpus if self.predictions else 1
        return [(point.gpus / first, point.speedup_over_first) for point in self.points]

    def serial_fraction(self, point: Point) -> float | None:
        """That explains one point: Karp and Flatt's or, in the weak form, of the time on the GPUs; None of one GPU."""
        n = point.gpus
        if n == 1:
            return None
        return karp_flatt(point.speedup, n) if self.form == "strong" else (n - point.speedup) / (n - 1)


@dataclass(frozen=True)
class Sweep:
    """What is asked for each count of GPUs: a job, whose batch is the whole cluster's, and a layout that grows or,
    where that is None, the best layout for each.
    """

    model: Model
    job: Job
    cluster: Cluster
    engine: Engine
    growth: Growth | None

    def on(self, gpus: int, form: Form) -> Prediction | Rejected:
        """The prediction for so many GPUs, or why it is no point."""
        why: list[str] = []
        job, cluster, layout = self.job, self.cluster, None
        try:
            cluster = cluster_of(self.cluster, gpus)
        except Refused as refused:
            why += refused.reasons
        try:
            job = job_of(self.job, self.cluster, gpus, form)
        except Refused as refused:
            why += refused.reasons
        if self.growth is not None:
            try:
                layout = on_nodes(consistent(self.growth.on(gpus)), cluster.gpus_per_node)
            except Refused as refused:
                why += refused.reasons
        if why:
            return Rejected(gpus, form, tuple(why))
        if layout is None:
            return self._best(job, cluster, form)
        if why := reasons(self.model, job, cluster, layout, self.engine):
            return Rejected(gpus, form, tuple(why))
        found = Prediction(self.model, job, cluster, layout, self.engine)
        return found if found.fits else _too_large(gpus, form, found.worst.device_bytes)

    def _best(self, job: Job, cluster: Cluster, form: Form) -> Prediction | Rejected:
        try:
            found = plan(self.model, job, cluster, engine=self.engine.name, top=1, fold=False)
        except Refused as refused:  # a batch of the weak form may be too large to count
            return Rejected(cluster.gpus, form, refused.reasons)
        if found.best:
            return found.best[0]
        if found.too_large.layout is not None:
            return _too_large(cluster.gpus, form, found.too_large.device_bytes)
        return Rejected(cluster.gpus, form, ("no layout is possible", *found.impossible))


def _too_large(gpus: int, form: Form, device_bytes: int) -> Rejected:
    return Rejected(gpus, form, ("more memory than the device has",), int(device_bytes))


def refusals(asked: Sweep, rejected: Sequence[Rejected]) -> list[str]:
    """Every reason of counts of which none is possible: what holds for all of them is said once. What is wrong with a
    layout, however far it grows, is said also where it cannot grow to any of them.
    """
    counts = sorted({each.gpus for each in rejected})
    where: dict[str, set[int]] = {}
    for each in rejected:
        for why in each.why:
            where.setdefault(why, set()).add(each.gpus)
    always = [] if asked.growth is None else _always_broken(asked, asked.growth, counts)
    for why in always:
        where[why] = set(counts)
    return [_where(why, gpus, counts) for why, gpus in where.items()]


def _where(why: str, gpus: set[int], counts: Sequence[int]) -> str:
    """A reason, with the counts that it holds for where it is not all of them, or these are what is wrong."""
    named = len(gpus) < len(counts) or why.startswith(NOT_NODES)
    return f"on {', '.join(f'{n:,}' for n in sorted(gpus))} GPUs: {why}" if named else why


def _always_broken(asked: Sweep, growth: Growth, counts: Sequence[int]) -> list[str]:
    """The rules that the layout breaks on all of the nearest counts that it can grow to, but for those of GPUs and
    batch.
    """
    rules = [rule for rule in (*GENERAL, *asked.engine.refuses) if rule not in (WORLD, BATCH)]
    ranks = int(growth.held.world)
    found = [
        broken(rules, asked.model, asked.job, asked.cluster, consistent(growth.on(max(1, n // ranks) * ranks)))
        for n in counts
    ]
    return [why for why in found[0] if all(why in other for other in found)]
