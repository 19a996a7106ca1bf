"""Why a prediction is probably off: a hint in one phrase, from what is known of the row, what its source leaves unsaid,
and the prediction's own parts. It is no finding: nobody has run these jobs again.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

from nanum.account.traffic import kernels
from nanum.model import LatentAttention
from nanum.prediction import Prediction
from nanum.units import GIB
from nanum.validate.questions import Question
from nanum.validate.sources import LINK, source_of
from nanum.validate.summary import Compared

SMALL = 0.05
"""Of an error: no cause is looked for below it."""
LAUNCH_SECONDS = 30e-6
"""Of the host, for each kernel of an eager step: 25 to 35 us (`data/measured/cost.toml`, at launch)."""
LAUNCH_BOUND = 2.0
"""Kernels that take fewer launches than this on average wait for the host: it does more than launch, and eager code
launches more than is counted (casts, checks of the loss scale). Chosen with the errors seen: it parts vTrain's
single nodes from all other sources. Nothing is predicted from it.
"""
LEAST_PART = 0.1
"""Of a prediction: smaller parts are not named."""
HEAD_ALIGNMENT = 8
"""Elements: products over heads of other sizes do not use tensor cores fully (NVIDIA, Matrix Multiplication
Background: dimensions of fp16 should be multiples of 8)."""


@dataclass(frozen=True)
class Odd:
    """Runs that their own source contradicts."""

    ids: tuple[str, ...]
    quantity: str
    why: str
    source: str

    def has(self, row: Compared) -> bool:
        return row.quantity == self.quantity and any(fnmatchcase(row.id, pattern) for pattern in self.ids)


@cache
def odd_rows() -> tuple[Odd, ...]:
    """The table of `data/measured/odd_rows.toml`."""
    table = tomllib.loads((files("nanum") / "data/measured/odd_rows.toml").read_text("utf-8"))
    return tuple(Odd(tuple(each["ids"]), each["quantity"], each["why"], each["source"]) for each in table["odd"])


def likely_cause(of: Compared, asked: Question, p: Prediction) -> str | None:
    """The first that may be; None where the error is small, or nothing was measured."""
    error = of.signed_error
    if error is None or abs(error) <= SMALL:
        return None
    causes = _of_step if of.quantity == "step_seconds" else _of_memory
    odd = (f"odd row: {each.why}" for each in odd_rows() if each.has(of))
    return next(odd, None) or next(causes(of, error, asked, p))


def differing_repeats(rows: Sequence[Compared]) -> list[Compared]:
    """The same rows; of runs of one layout that were measured far apart, that is the likely cause."""
    found: dict[object, list[float]] = {}
    for row in rows:
        if row.alike is not None and row.measured is not None:
            found.setdefault((row.alike, row.layout), []).append(row.measured)
    said = []
    apart_of = {key: max(measured) / min(measured) - 1 for key, measured in found.items()}
    for row in rows:
        apart = apart_of.get((row.alike, row.layout), 0.0)
        if row.likely_cause and row.alike is not None and apart > SMALL:
            row = replace(row, likely_cause=f"repeats of this run differ by {apart:.0%}")
        said.append(row)
    return said


def _of_step(of: Compared, error: float, asked: Question, p: Prediction) -> Iterator[str]:
    row, source = asked.row, source_of(asked.row)
    step, kernel = float(p.parts.step[0]), _kernel_seconds(p)
    parts = {
        "exposed exchanges": float(p.parts.exposed_communication[0]) / step,
        "the optimizer": float(p.parts.optimizer[0]) / step,
    }
    attention = asked.model.attention
    head = None if isinstance(attention, LatentAttention) else attention.head_dim
    if head is not None and head % HEAD_ALIGNMENT and error < 0:
        yield f"heads of {head}, which is no multiple of {HEAD_ALIGNMENT}, run slowly"
    if error < 0 and kernel < LAUNCH_BOUND * LAUNCH_SECONDS:
        yield (
            f"probably launch-bound: kernels of {kernel * 1e6:.0f} us on average, "
            f"{'below' if kernel < LAUNCH_SECONDS else 'near'} a launch's {LAUNCH_SECONDS * 1e6:.0f} us"
        )
    if row.source == "mbridge/moe":
        yield "experts: the container's version moves such rows 1.2 to 1.8 times, and is no input"
    if LINK in source.assumed and asked.cluster.nodes > 1 and parts["exposed exchanges"] > max(SMALL, abs(error) / 2):
        yield f"the network is not stated; exposed exchanges are {parts['exposed exchanges']:.0%} of the prediction"
    if row["recompute"] is None and (error < 0) == (source.recompute == "none"):
        yield f"recompute is not stated: {source.recompute} is assumed"
    name, share = max(parts.items(), key=lambda part: part[1])
    if share >= max(LEAST_PART, abs(error) / 2):
        yield f"probably {name}: {share:.0%} of the prediction"
    if asked.job.precision == "fp8":
        yield "fp8: its recipes and casts are taken for one"
    if source.noisy:
        yield "noise: the source warns of 40 %"
    yield f"probably kernels: {float(p.parts.compute[0]) / step:.0%} of the prediction; no other part explains it"


def _kernel_seconds(p: Prediction) -> float:
    """The average kernel of the rank that launches most."""
    most = max(float(kernels(step.counted)) for step in p.steps)
    return float(p.parts.compute[0] + p.parts.optimizer[0]) / most


def _of_memory(of: Compared, error: float, asked: Question, p: Prediction) -> Iterator[str]:
    row, worst = asked.row, p.worst
    source = source_of(row)
    tensors, size = worst.moment.bytes, of.predicted
    beyond = size - tensors
    if beyond >= abs(size - (of.measured or 0)):
        yield f"what lies beyond tensors ({beyond / GIB:.1f} GiB of it) is assumed"
    if row["recompute"] is None and (error < 0) == (source.recompute == "none"):
        yield f"recompute is not stated: {source.recompute} is assumed"
    name, largest = max(worst.moment.by_category.items(), key=lambda part: part[1])
    yield f"probably {name.replace('_', ' ')}: {largest / size:.0%} of the prediction, the largest part"
