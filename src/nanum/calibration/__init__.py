"""A machine as steps that were observed on it have it: a new `Cluster`, whose coefficients are the most likely ones
given what a step took and how far coefficients differ between the machines of published runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nanum.account.coefficients import Coefficients, Fitted
from nanum.calibration.coefficients import WHAT
from nanum.calibration.update import Belief, Learned, Steps, observe
from nanum.cluster import Cluster, InAStep, Quantity
from nanum.cluster.in_a_step import LIMITS, NAMES, Observation
from nanum.errors import Refused
from nanum.prediction import Prediction
from nanum.search.rank import divided
from nanum.units import format_bytes, format_seconds

FAR = 3.0
"""Standard deviations that a step is off by, beyond which something else is more likely than such a machine."""
BEYOND = 100.0
"""Times, either way, that no machine is off by: another unit, or another job."""
ROUNDING = 1e-9
"""Of a logarithm: rounding."""
MOVED = 5e-4
"""Of a logarithm: what moves less is not worth telling."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """What a step of `before`, which took `seconds`, says of its cluster."""

    before: Prediction
    seconds: float
    learned: Learned
    held: Belief

    @cached_property
    def cluster(self) -> Cluster:
        """The same machine, as it was observed."""
        return replace(self.before.cluster, in_a_step=self._in_a_step)

    @cached_property
    def after(self) -> Prediction:
        """The same question to that machine."""
        p = self.before
        return Prediction(p.model, p.job, self.cluster, p.layout, p.engine)

    @cached_property
    def least_seconds(self) -> float:
        """What no machine of these chips and links goes below (`Prediction.least_seconds`), by what is now known."""
        known = self.before.coefficients
        fp8 = replace(known.fitted.matmul_fp8, value=self.values["matmul_fp8"])
        return self.before.by(replace(known, fitted=replace(known.fitted, matmul_fp8=fp8))).least_seconds

    @property
    def values(self) -> dict[str, float]:
        return dict(zip(NAMES, map(float, np.exp(self.learned.belief.mean)), strict=True))

    @property
    def moved(self) -> list[str]:
        """The coefficients that are others than before."""
        far = np.abs(self.learned.belief.mean - self.held.mean)
        return [name for name, one in zip(NAMES, far, strict=True) if one >= MOVED]

    @property
    def at_bound(self) -> list[str]:
        """Those among them that went as far as they can."""
        after = self.learned.belief
        ends = (after.mean >= after.most - ROUNDING) | (after.mean <= after.least + ROUNDING)
        return [name for name, end in zip(NAMES, ends, strict=True) if end and name in self.moved]

    @property
    def _in_a_step(self) -> InAStep:
        p, before, values = self.before, self.before.coefficients.fitted, self.values
        own = p.cluster.in_a_step
        seen = (*(own.observations if own else ()), self._observation)
        source = (
            f"observed: {len(seen)} step{'s' if len(seen) > 1 else ''}, the last of them "
            f"{format_seconds(self.seconds)} of {p.model.name} on {words(p)} by {p.engine.name}"
        )
        far = np.abs(self.learned.belief.mean - self.held.mean)
        return InAStep(
            tuple(
                (name, Quantity(values[name], "derived", source) if one > ROUNDING else getattr(before, name))
                for name, one in zip(NAMES, far, strict=True)
            ),
            NAMES,
            tuple(tuple(map(float, row)) for row in self.learned.belief.covariance),
            seen,
        )

    @property
    def _observation(self) -> Observation:
        p = self.before
        asked = p.model.name, p.engine.name, p.job.precision, words(p)
        return Observation(*asked, self.seconds, self.learned.before_seconds, tuple(self.doubts))

    @cached_property
    def doubts(self) -> list[str]:
        """Why the step may not be one of this question on this machine."""
        return list(_doubts(self))

    @property
    def notes(self) -> list[str]:
        """What one should know before one believes it."""
        return [*self.doubts, *_notes(self)]


def words(p: Prediction) -> str:
    """A layout in a line, for people."""
    at = p.layout
    sizes = " · ".join(f"{axis} {getattr(at, axis)}" for axis in divided(at)) or "one GPU"
    return f"{sizes}, zero {at.structure.zero}, recompute {at.structure.recompute}, micro-batch {at.micro_batch_size}"


def belief(known: Coefficients, own: InAStep | None = None) -> Belief:
    """What is held of the coefficients `known`: as unsure as of any machine, or as its own observations left it."""
    mean = np.log([getattr(known.fitted, name).value for name in NAMES])
    covariance = np.diag([known.spread.of[name] ** 2 for name in NAMES])
    if own is not None:
        at = [NAMES.index(name) for name in own.sure]
        covariance[np.ix_(at, at)] = np.array(own.covariance).reshape(len(at), len(at))
    least, most = (np.log([limits[i] for limits in LIMITS.values()]) for i in (0, 1))
    return Belief(mean, covariance, least, most)


def steps_of(p: Prediction) -> Steps:
    """The exact step by several sets of coefficients at once."""
    known = p.coefficients

    def steps(tried: np.ndarray) -> np.ndarray:
        columns = zip(NAMES, tried.T, strict=True)
        fitted = {name: replace(getattr(known.fitted, name), value=column) for name, column in columns}
        return np.broadcast_to(p.by(replace(known, fitted=Fitted(**fitted))).parts.step, len(tried))

    return steps


def calibrate(p: Prediction, seconds: float) -> Calibration:
    """The cluster as a step of this layout, which took `seconds` there, has it.

    Raises Refused: no coefficient has a part in the step, or it is off by a factor that no machine is.
    """
    known = p.coefficients
    held = belief(known, p.cluster.in_a_step)
    step = float(p.parts.step[0])
    if not 1 / BEYOND <= seconds / step <= BEYOND:
        times = f"{seconds / step:,.0f} times" if seconds > step else f"1/{step / seconds:,.0f} of"
        raise Refused(
            f"--observed {format_seconds(seconds)} is {times} what is predicted ({format_seconds(step)}): another "
            "unit, or not a step of this job"
        )
    learned = observe(held, steps_of(p), seconds, known.spread.run)
    if not learned.slopes.any():
        raise Refused(
            "--observed: no coefficient has a part in this step: all that it rests on was measured on "
            f"{p.cluster.name} (its [measured] table), and coefficients stand in for the rest alone; measure it again"
        )
    return Calibration(p, seconds, learned, held)


def _doubts(c: Calibration) -> Iterator[str]:
    seconds, before = format_seconds(c.seconds), format_seconds(c.learned.before_seconds)
    if _at_least_too_large(c):
        yield (
            f"it does not fit: {_needed(c)} are needed, and hardly less by any range. Another layout, batch "
            "or recompute is what ran"
        )
    if (least := c.least_seconds) > c.seconds:
        yield (
            f"no machine of these chips and links takes {seconds}, by what is known of its kernels: "
            f"{format_seconds(least)} is what remains where nothing is slower in a step than alone"
        )
    if abs(c.learned.deviations) > FAR:
        slower = c.seconds > c.learned.before_seconds
        besides = (
            "or data loading, logging, checkpoints or a warm-up are in it" if slower else "or it had fewer sequences"
        )
        yield (
            f"{seconds} is {abs(c.learned.deviations):.1f} standard deviations off the {before} predicted, as machines "
            "differ in published runs. It is used, but more likely the layout, the batch or the engine's settings are "
            f"not what ran, {besides}"
        )


def _needed(c: Calibration) -> str:
    return f"{format_bytes(c.before.worst.device_bytes)} of {format_bytes(c.before.cluster.chip.memory_bytes.value)}"


def _at_least_too_large(c: Calibration) -> bool:
    return c.before.worst.device_bytes_at("low") > c.before.cluster.chip.memory_bytes.value


def _notes(c: Calibration) -> Iterator[str]:
    if not c.before.fits and not _at_least_too_large(c):
        yield f"it is predicted not to fit ({_needed(c)}), if narrowly: that it ran says that less is needed"
    if at_bound := [WHAT[name] for name in c.at_bound]:
        yield (
            f"at {'their bounds' if len(at_bound) > 1 else 'its bound'}: {'; '.join(at_bound)}. Nothing is faster in a "
            "step than alone, nor beyond what any machine could be"
        )
    if c.before.cluster.measured:
        yield "what was measured on the cluster stands; coefficients stand in for the rest alone, and only they move"


__all__ = ["Calibration", "belief", "calibrate", "steps_of", "words"]
