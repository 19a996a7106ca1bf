"""How a job scales on a machine: the same step on ever more GPUs, the serial fraction of it, and what would cut it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nanum import engines
from nanum.cluster import Cluster
from nanum.errors import Refused
from nanum.job import Job
from nanum.layout import Layout
from nanum.model import Model
from nanum.prediction import Prediction
from nanum.rules import OF_JOB, broken
from nanum.scaling.curve import Curve, Point, Rejected, Sweep, refusals
from nanum.scaling.cuts import Cut, Serial, Uncut
from nanum.scaling.growth import FORMS, Form, Grows, Growth, doubling
from nanum.units import LARGEST

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Scaling:
    """The answer: a curve of each form."""

    asked: Sweep
    curves: dict[Form, Curve]

    @property
    def strong(self) -> Curve:
        """The same batch on any number of GPUs."""
        return self.curves["strong"]

    @property
    def weak(self) -> Curve:
        """A batch that grows with the GPUs."""
        return self.curves["weak"]

    @property
    def fits(self) -> bool:
        """Is there any point?"""
        return any(curve.predictions for curve in self.curves.values())

    @cached_property
    def one_gpu_bytes(self) -> int | None:
        """What the step that speed-ups are over needs of one GPU's memory; None without any speed-up."""
        predictions = self.strong.predictions
        return min(predictions, key=lambda p: p.one_gpu_seconds).one_gpu_bytes if predictions else None

    @property
    def one_gpu_fits(self) -> bool | None:
        """Could one GPU do it?"""
        needed = self.one_gpu_bytes
        return None if needed is None else needed <= self.asked.cluster.chip.memory_bytes.value

    @cached_property
    def serial(self) -> Serial | None:
        """The strong form's largest count; None where it has none of several GPUs."""
        points = [point for point in self.strong.points if point.gpus > 1]
        return Serial(points[-1].prediction, points[-1].one_gpu_seconds) if points else None

    @cached_property
    def cuts(self) -> tuple[Cut | Uncut, ...]:
        """What each cut of the serial part buys there, and why others are none."""
        return self.serial.cuts() if self.serial else ()

    def to_dict(self) -> dict[str, Any]:
        """The answer as one document, of plain Python values."""
        from nanum.scaling.document import document

        return document(self)


def scale(
    model: Model,
    job: Job,
    cluster: Cluster,
    layout: Layout | None = None,
    engine: str = "torchtitan",
    *,
    gpus: Sequence[int] | None = None,
    grows: Grows | None = None,
    progress: Progress | None = None,
) -> Scaling:
    """Predict a job on ever more GPUs of the same machine: with the same batch (strong), and with one that grows and is
    the job's on the cluster's GPUs (weak).

    Of `layout` one axis of data parallelism takes the GPUs that are added (`grows`: the copies where there are several
    or nothing is sharded, else the ranks that shard), whatever its size, and all else is held. Without a layout the
    best is sought for each count. `gpus` are the counts, by default doubling up to the cluster's; those beyond it are
    the same machine with more nodes.

    Raises Refused with every reason where no count is possible.
    """
    chosen = engines.load(engine)
    counts = sorted(set(gpus)) if gpus is not None else None
    why = [f"{n} GPUs: must be from 1 to {LARGEST:,}" for n in counts or () if not 1 <= n <= LARGEST]
    if counts is not None and not counts:
        why.append("no count of GPUs is given")
    why += broken(OF_JOB, model, job, cluster, Layout())
    if layout is not None and any(size < 1 for size in (*layout.sizes.values(), layout.ep, layout.micro_batch_size)):
        why.append("a layout's sizes must be whole numbers of at least 1")
    if why:
        raise Refused(why)
    growth = None if layout is None else Growth.of(layout, grows)
    asked = Sweep(model, job, cluster, chosen, growth)
    tried = counts or doubling(cluster, 1 if growth is None else int(growth.held.world))
    found: dict[Form, list[Prediction | Rejected]] = {}
    total = len(FORMS) * len(tried)
    for form in FORMS:
        of_form = found.setdefault(form, [])
        for n in tried:
            same = form == "weak" and n == cluster.gpus  # where the forms meet
            of_form.append(_in_form(found["strong"][tried.index(n)], form) if same else asked.on(n, form))
            if progress:
                progress(sum(map(len, found.values())), total, f"{form} form, {n:,} GPU{'s' * (n != 1)}")
    curves = {form: _curve(form, points) for form, points in found.items()}
    rejected = [each for curve in curves.values() for each in curve.rejected]
    impossible = all(each.device_bytes is None for each in rejected)
    answer = Scaling(asked, curves)
    if not answer.fits and impossible:
        raise Refused(refusals(asked, rejected))
    return answer


def _in_form(point: Prediction | Rejected, form: Form) -> Prediction | Rejected:
    return replace(point, form=form) if isinstance(point, Rejected) else point


def _curve(form: Form, points: Sequence[Prediction | Rejected]) -> Curve:
    predicted = tuple(point for point in points if isinstance(point, Prediction))
    return Curve(form, predicted, tuple(point for point in points if isinstance(point, Rejected)))


__all__ = ["Curve", "Cut", "Grows", "Growth", "Point", "Rejected", "Scaling", "Serial", "Uncut", "scale"]
