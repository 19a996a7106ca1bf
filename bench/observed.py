"""`python -m bench observed`: does it help to observe a step? On the published runs, by source.

One run is taken as the step that a user observed, and others are predicted by what that says of the machine, from
coefficients that never saw the source: other layouts and batches of the same model, machine and software, and runs of
its other models. Beside it stands what one would do by hand: scale all by observed over predicted. Each run is taken
once alone, and once with two others after it. What is learned is of steps that are linear in the logarithms of the
coefficients, as in the first of the command's rounds; what that predicts is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from os import cpu_count
from typing import Any

import numpy as np

from bench.calibrate import AT_MOST, question
from bench.spread import SEED, SEVERAL, alike, prediction, slopes_of
from nanum.calibration import belief, steps_of
from nanum.calibration.update import in_turn
from nanum.model import Experts
from nanum.validate import read
from nanum.validate.questions import Question, question_of
from nanum.validate.rows import tells_launches

HEAD = (
    "source", "runs", "mean error", "1 seen", "3 seen", "bias", "1 seen", "3 seen", "it helped", "in range", "1 seen",
    "3 seen", "warned", "others", "1 seen", "scaled",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Run:
    """One published run; `model` and `machine` tell those that are alike."""

    id: str
    source: str
    model: Any
    machine: Any
    seconds: float


@dataclass(frozen=True, eq=False)
class Said:
    """What a run says of its machine: what is held after it, and after it and two others; how far off it was."""

    one: np.ndarray
    several: np.ndarray | None
    with_it: tuple[int, ...]
    deviations: float


@dataclass(frozen=True, eq=False)
class Told:
    """A run predicted before, and by what each run of its machine says; and the ranges over these."""

    before: float
    after: np.ndarray
    after_several: np.ndarray
    ranges: tuple[tuple[float, float], ...]


def observed() -> Iterator[str]:
    """The table, a line at a time."""
    runs = list(_runs())
    machine: dict[Any, list[int]] = {}
    for i, run in enumerate(runs):
        machine.setdefault(run.machine, []).append(i)
    rng = np.random.default_rng(SEED)
    beside = [_beside(i, runs, machine[run.machine], rng) for i, run in enumerate(runs)]
    ids = [run.id for run in runs]
    with ProcessPoolExecutor(cpu_count() or 1) as pool:
        found = list(pool.map(slopes_of, ids, chunksize=8))
        said = [_said(runs, found, [i, *js]) for i, js in enumerate(beside)]
        told = list(pool.map(_told, ids, [[said[j] for j in machine[run.machine]] for run in runs], chunksize=8))
    yield " | ".join(HEAD)
    rows = [_row(name, runs, machine, said, told) for name in dict.fromkeys(run.source for run in runs)]
    for row in rows:
        yield _line(row)
    for which, chosen in (("all sources", rows), ("those that have three", [row for row in rows if row[4] == row[4]])):
        numbers = np.array([row[1:] for row in chosen], dtype=float)
        yield _line((f"mean of {which}", numbers[:, 0].sum(), *np.nanmean(numbers[:, 1:], axis=0)))


def _runs() -> Iterator[Run]:
    """Of each source at most so many, evenly; those that the prior has seen are left out."""
    of: dict[str, list[Question]] = {}
    for row in read():
        asked = question_of(row)
        if isinstance(asked, Question) and asked.step_seconds is not None and not tells_launches(row):
            of.setdefault(row.source, []).append(asked)
    for several in of.values():
        for asked in several[:: max(1, -(-len(several) // AT_MOST))]:
            kind = alike(asked)
            assert asked.step_seconds is not None
            yield Run(asked.row.id, asked.row.source, kind, kind[:3], asked.step_seconds)


def _beside(i: int, runs: list[Run], machine: list[int], rng: np.random.Generator) -> list[int]:
    """Two other runs of the same model; none where it has too few for a fourth to be left."""
    others = [j for j in machine if runs[j].model == runs[i].model and j != i]
    return [int(j) for j in rng.permutation(others)[: SEVERAL - 1]] if len(others) >= SEVERAL else []


def _said(runs: list[Run], found: list[tuple[float, np.ndarray]], js: list[int]) -> Said:
    """What runs say of their machine, one after the other: of a step that is linear in its coefficients."""
    known = prediction(question(runs[js[0]].id)).coefficients
    before, run = belief(known), known.spread.run
    means = [held.mean for held in in_turn(before, [found[j] for j in js], run)]
    residual, slopes = found[js[0]]
    return Said(means[0], means[-1] if len(js) > 1 else None, tuple(js), residual / before.deviation(slopes, run))


def _told(row_id: str, by: list[Said]) -> Told:
    """By each of them, exactly."""
    p = prediction(question(row_id))
    several = [each.several if each.several is not None else each.one for each in by]
    seconds = steps_of(p)(np.exp(np.vstack([belief(p.coefficients).mean, *(each.one for each in by), *several])))
    engine, chip = p.engine.name, p.cluster.chip.name
    experts = any(isinstance(kind.mlp, Experts) for kind in p.model.kinds)
    ranges = [p.coefficients.ranges_after(n).of(engine, chip, experts=experts) for n in (0, 1, SEVERAL)]
    n = len(by)
    return Told(seconds[0], seconds[1 : n + 1], seconds[n + 1 :], tuple((each.low, each.high) for each in ranges))


def _row(
    name: str, runs: list[Run], machine: dict[Any, list[int]], said: list[Said], told: list[Told]
) -> tuple[Any, ...]:
    """Means over a source's runs of what is missed: before, and of all that the others of its model say."""
    before: list[float] = []
    covered: list[bool] = []
    one: dict[int, list[tuple[float, float, bool]]] = {}
    several: dict[int, list[tuple[float, bool]]] = {}
    elsewhere: dict[int, list[tuple[float, float]]] = {}
    scaled: dict[int, list[tuple[float]]] = {}
    for j, run in enumerate(runs):
        if run.source != name:
            continue
        t, among = told[j], machine[run.machine]
        same = [i for i in among if runs[i].model == run.model and i != j]
        error = t.before / run.seconds - 1
        if same:
            before.append(error)
            covered.append(_in(run.seconds / t.before, t.ranges[0]))
        for place, i in enumerate(among):
            ratio = t.after[place] / run.seconds
            if i in same:
                by_hand = t.before * runs[i].seconds / told[i].before
                scaled.setdefault(i, []).append((by_hand / run.seconds - 1,))
                one.setdefault(i, []).append((ratio - 1, error, _in(1 / ratio, t.ranges[1])))
                if said[i].several is not None and j not in said[i].with_it:
                    ratio = t.after_several[place] / run.seconds
                    several.setdefault(i, []).append((ratio - 1, _in(1 / ratio, t.ranges[2])))
            elif i != j:
                elsewhere.setdefault(i, []).append((ratio - 1, error))
    helped = [np.mean([abs(e) for e, *_ in each]) < np.mean([abs(e) for _, e, _ in each]) for each in one.values()]
    far = [abs(said[i].deviations) > 3 for i in one]
    return (
        name, len(before),
        np.mean(np.abs(before)), _median(one), _median(several),
        np.mean(before), _median(one, signed=True), _median(several, signed=True),
        np.mean(helped), np.mean(covered), _mean_last(one), _mean_last(several), np.mean(far),
        _median({i: [(e,) for _, e in each] for i, each in elsewhere.items()}), _median(elsewhere), _median(scaled),
    )  # fmt: skip


def _in(ratio: float, between: tuple[float, float]) -> bool:
    return between[0] <= ratio <= between[1]


def _median(found: dict[int, list[Any]], *, signed: bool = False) -> float:
    """Of the mean errors, over which run was observed."""
    means = [np.mean([each[0] if signed else abs(each[0]) for each in several]) for several in found.values()]
    return float(np.median(means)) if means else float("nan")


def _mean_last(found: dict[int, list[Any]]) -> float:
    shares = [np.mean([each[-1] for each in several]) for several in found.values()]
    return float(np.mean(shares)) if shares else float("nan")


def _line(row: tuple[Any, ...]) -> str:
    name, count, *shares = row
    signed = (3, 4, 5)
    words = ("–" if np.isnan(x) else f"{x:+.1%}" if i in signed else f"{x:.1%}" for i, x in enumerate(shares))
    return " | ".join([name, f"{count:.0f}", *words])
