"""What the serial part of a step consists of, and what each cut of it would buy: at one count of GPUs, of one layout.

A cut that is another question (faster links, a lower precision, another schedule, a sharded optimizer) is predicted
like any other; one that no engine could do whole (nothing exposed, no bubble) is a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from nanum.account.step_time import ROUNDING
from nanum.cluster import Cluster, Link
from nanum.cluster.measured import Exchange, Framework
from nanum.conventions import Conventions
from nanum.dtypes import ITEMSIZE
from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import ONE_STAGE, TWO_WAY, V_SHAPED, Structure
from nanum.model import Model
from nanum.prediction import Prediction, Row, consistent, karp_flatt, reasons

Kind = Literal["predicted", "bound"]
FREE = 1e15
"""Times as fast as they are, links cost nothing beside rounding."""
STAGES_TRIED = (2, 4)
"""Virtual stages of a schedule that may have any number of them."""


@dataclass(frozen=True)
class Part:
    """Seconds of a step beyond an even share of one GPU's, and what of the serial fraction that is."""

    name: str
    seconds: float
    serial_fraction: float


@dataclass(frozen=True)
class Cut:
    """A step without, or with less of, one part of what is serial. `fits` is None where that was not asked of it."""

    name: str
    what: str
    kind: Kind
    step_seconds: float
    times_faster: float
    serial_fraction: float
    fits: bool | None


@dataclass(frozen=True)
class Uncut:
    """A cut that is none here, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Serial:
    """One step on several GPUs, beside the same on one of them in `one_gpu_seconds`."""

    prediction: Prediction
    one_gpu_seconds: float

    @property
    def gpus(self) -> int:
        return self.prediction.cluster.gpus

    def fraction(self, step_seconds: float, one_gpu_seconds: float | None = None) -> float:
        """Karp and Flatt's of a step on these GPUs."""
        return karp_flatt((one_gpu_seconds or self.one_gpu_seconds) / step_seconds, self.gpus)

    # --- what it consists of ------------------------------------------------------------------------------------------
    def parts(self) -> tuple[Part, ...]:
        """They add up to `fraction(step)`. Of what one GPU does too, its even share is left out: what stays of the
        optimizer is what is not sharded, and of compute what stages are uneven by, what ranks do alike, what
        smaller pieces lose, and by how much the slowest GPU is slower than a usual one.
        """
        time, alone, n = self.prediction.time, self.prediction.alone, self.gpus
        optimizer = time.optimizer_seconds - float(alone.optimizer_seconds) / n
        computed = self.one_gpu_seconds - float(alone.optimizer_seconds)
        seconds = {
            "exposed_communication": time.exposed_communication_seconds,
            "bubble": time.bubble_seconds,
            "optimizer": optimizer,
            "uneven_compute": time.compute_seconds - computed / n,
        }
        least = ROUNDING * time.step_seconds  # what rounding leaves of nothing
        kept = {name: each if abs(each) > least else 0.0 for name, each in seconds.items()}
        return tuple(Part(name, each, self._share(each)) for name, each in kept.items())

    def _share(self, seconds: float) -> float:
        return seconds / (self.one_gpu_seconds * (1 - 1 / self.gpus))

    def exchanges(self) -> tuple[tuple[Row, float], ...]:
        """What is exposed, by the ledger's rows of the stage that works longest, most first, with what of the serial
        fraction it is.
        """
        rows: dict[int, list[Row]] = {}
        for row in self.prediction.communication:
            rows.setdefault(row.stage, []).append(row)
        exposed = self.prediction.time.exposed_communication_seconds
        if not rows or not exposed:
            return ()
        longest = min(rows.values(), key=lambda of: abs(sum(row.exposed_seconds for row in of) - exposed))
        found = sorted((row for row in longest if row.exposed_seconds > 0), key=lambda row: -row.exposed_seconds)
        return tuple((row, self._share(row.exposed_seconds)) for row in found)

    # --- what a cut buys ----------------------------------------------------------------------------------------------
    def cuts(self) -> tuple[Cut | Uncut, ...]:
        """All that apply, and of others why they do not."""
        ways: tuple[Callable[[], Iterator[Cut | Uncut]], ...] = (
            self._hidden, self._bucketed, self._half_gradients, self._fp8, self._faster_links,
            self._no_bubble, self._schedules, self._micro_batches, self._sharded_optimizer,
        )  # fmt: skip
        return tuple(cut for way in ways for cut in way())

    def _hidden(self) -> Iterator[Cut | Uncut]:
        what = "every exchange hidden behind compute, as if links were free"
        if not self.prediction.communication:
            yield Uncut("hide", "nothing is exchanged")
            return
        yield self._predicted("hide", what, "bound", cluster=faster(self.prediction.cluster, FREE, latency=0.0))

    def _bucketed(self) -> Iterator[Cut | Uncut]:
        cluster = self.prediction.cluster
        if cluster.measured.exchanges:
            why = "exchanges were measured whole: what of them is latency is not known"
            yield Uncut("bucket", why)
        elif self.prediction.communication:
            what = "exchanges without latency, the most that larger buckets could buy"
            yield self._predicted("bucket", what, "bound", cluster=faster(cluster, 1.0, latency=0.0))

    def _half_gradients(self) -> Iterator[Cut | Uncut]:
        p = self.prediction
        half = p.job.dtype
        wide = any(row.what == "grads" and ITEMSIZE[row.dtype] > ITEMSIZE[half] for row in p.communication)
        if not wide:
            yield Uncut("half_gradients", "no gradients are reduced in more bytes than they are computed in")
            return
        what = f"gradients reduced in {half}, half their bytes"
        yield self._predicted("half_gradients", what, engine=reducing_in(p.engine, half))

    def _fp8(self) -> Iterator[Cut | Uncut]:
        p = self.prediction
        if p.job.precision == "fp8":
            yield Uncut("fp8", "linear layers are in fp8")
            return
        job = replace(p.job, precision="fp8")
        asked = self._asked(job=job)
        less = isinstance(asked, Prediction) and _sent_bytes(asked) < _sent_bytes(p)
        what = f"linear layers in fp8: less to divide, {'and less' if less else 'as much'} to exchange"
        yield from self._tried("fp8", what, job=job)

    def _faster_links(self) -> Iterator[Cut | Uncut]:
        if self.prediction.communication:
            what = "links twice as fast, their latency as it is"
            yield self._predicted("links", what, cluster=faster(self.prediction.cluster, 2.0))

    def _no_bubble(self) -> Iterator[Cut | Uncut]:
        time = self.prediction.time
        if self.prediction.layout.pp == 1:
            yield Uncut("bubble", "there is no pipeline")
        elif time.bubble_seconds:
            what = "no bubble in this schedule, by endless micro-batches"
            yield self._cut("bubble", what, "bound", time.step_seconds - time.bubble_seconds)

    def _schedules(self) -> Iterator[Cut | Uncut]:
        """The fastest of the engine's other schedules that fits."""
        p = self.prediction
        if p.layout.pp == 1:
            return
        found: list[tuple[float, str, Prediction]] = []
        for schedule in p.engine.schedules:
            any_number = schedule not in (*ONE_STAGE, *V_SHAPED, *TWO_WAY)
            for stages in STAGES_TRIED if any_number else (1 if schedule in ONE_STAGE else 2,):
                structure = replace(p.layout.structure, schedule=schedule, virtual_stages=stages)
                if structure == p.layout.structure:
                    continue
                tried = self._asked(layout=replace(p.layout, structure=structure))
                if isinstance(tried, Prediction) and tried.fits:
                    words = f"{schedule}, {stages} stages a rank" if stages > 1 else schedule
                    found.append((tried.time.step_seconds, words, tried))
        if not found:
            yield Uncut("schedule", f"no other schedule of {p.engine.name} is possible and fits")
            return
        seconds, words, best = min(found, key=lambda each: each[0])
        yield self._cut("schedule", f"the schedule {words}, the fastest other that fits", "predicted", seconds, best)

    def _micro_batches(self) -> Iterator[Cut | Uncut]:
        layout = self.prediction.layout
        if layout.pp > 1 and layout.micro_batch_size > 1:
            what = f"micro-batches of 1 in place of {layout.micro_batch_size}"
            yield from self._tried("micro_batches", what, layout=replace(layout, micro_batch_size=1))

    def _sharded_optimizer(self) -> Iterator[Cut | Uncut]:
        layout = self.prediction.layout
        if layout.structure.zero:
            yield Uncut("optimizer", f"ZeRO-{layout.structure.zero} shards it")
        elif layout.data_ranks > 1:
            structure = replace(layout.structure, zero=1)
            sharded = replace(layout, dp_replicate=1, dp_shard=layout.data_ranks, structure=structure)
            yield from self._tried("optimizer", "the optimizer sharded over data ranks (ZeRO-1)", layout=sharded)

    # --- one of them --------------------------------------------------------------------------------------------------
    def _cut(self, name: str, what: str, kind: Kind, seconds: float, by: Prediction | None = None) -> Cut:
        """`by` predicted the step. One GPU would do the same work, but in another precision."""
        p = self.prediction
        alone = by.one_gpu_seconds if by is not None and by.job != p.job else None
        fits = None if by is None or kind == "bound" else by.fits
        faster = p.time.step_seconds / seconds
        return Cut(name, what, kind, seconds, faster, self.fraction(seconds, alone), fits)

    def _asked(self, **changed: Any) -> Prediction | list[str]:
        """The prediction with that changed, or every reason why it is impossible."""
        changed = {"layout": self.prediction.layout, **changed}
        p = replace(self.prediction, **{**changed, "layout": consistent(changed["layout"])})
        return reasons(p.model, p.job, p.cluster, p.layout, p.engine) or p

    def _predicted(self, name: str, what: str, kind: Kind = "predicted", **changed: Any) -> Cut:
        """With a cluster or an engine in place of the question's, which no rule refuses."""
        p = replace(self.prediction, **changed)
        return self._cut(name, what, kind, p.time.step_seconds, p)

    def _tried(self, name: str, what: str, **changed: Any) -> Iterator[Cut | Uncut]:
        asked = self._asked(**changed)
        if isinstance(asked, Prediction):
            yield self._cut(name, what, "predicted", asked.time.step_seconds, asked)
        else:
            yield Uncut(name, asked[0])


def _sent_bytes(p: Prediction) -> int:
    """Of all stages."""
    return sum(row.wire_bytes for row in p.communication)


def faster(cluster: Cluster, times: float, latency: float = 1.0) -> Cluster:
    """The same cluster with links `times` as fast, and `latency` times theirs. What was measured of exchanges takes as
    much less time as a whole; free links leave the host no work around them either.
    """

    def link(of: Link) -> Link:
        bandwidth, wait = of.bytes_per_second, of.latency_seconds
        return replace(
            of,
            bytes_per_second=replace(bandwidth, value=bandwidth.value * times),
            latency_seconds=replace(wait, value=wait.value * latency),
        )

    def exchange(of: Exchange) -> Exchange:
        return replace(of, grid=replace(of.grid, seconds=tuple(seconds / times for seconds in of.grid.seconds)))

    measured = replace(cluster.measured, exchanges=tuple(map(exchange, cluster.measured.exchanges)))
    if times == FREE:
        host = measured.framework
        of_kernels = Framework(parameter=host.parameter, sharded_parameter=host.sharded_parameter)
        measured = replace(measured, framework=of_kernels)
    return replace(cluster, intra_node=link(cluster.intra_node), inter_node=link(cluster.inter_node), measured=measured)


def reducing_in(engine: Engine, dtype: str) -> Engine:
    """The same engine, but for the dtype in which it reduces and keeps gradients."""

    def conventions(model: Model, job: Job, structure: Structure) -> Conventions:
        stated = engine.conventions(model, job, structure)
        return replace(stated, numerics=replace(stated.numerics, grad_dtype=dtype))

    return replace(engine, conventions=conventions)
