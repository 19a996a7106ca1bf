"""Part of `make calibrate`: how far coefficients differ from machine to machine, into `data/measured/spread.toml`.

Runs of one model on one machine with one software tell it: from what one of them took, how far off is another? The
standard deviations of the coefficients' logarithms, and of a run's own residual, are those by which the others of a
group are most likely, given one (each source alike, each group by the root of its runs; residuals of Student's t, so
that odd runs do not widen all). Residuals and slopes are by coefficients that never saw the source. What is missed
after one step was observed, and after three, are the ranges of a machine that was: such percentiles, each source alike,
as hold four of five runs of a source that had no part in them, in the mean over sources; and no wider than before. How
much lies beyond them is one number for all sources, chosen so: that mean is no test, each source's own share is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from os import cpu_count
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from bench.calibrate import ENOUGH, HOLDS, Missed, _rows, held, quantiles, question
from nanum.account.coefficients import coefficients
from nanum.calibration import Belief, belief, steps_of
from nanum.calibration.update import in_turn, looked
from nanum.cluster.in_a_step import NAMES
from nanum.model import Experts
from nanum.prediction import Prediction
from nanum.validate.questions import Question
from nanum.validate.rows import tells_launches

FILE = Path(__file__).resolve().parents[1] / "src/nanum/data/measured/spread.toml"
FREEDOM = 4
"""Degrees of freedom of Student's t: the usual choice where outliers are expected (Lange, Little and Taylor 1989)."""
USUAL, PENALTY = 0.1, 0.03
"""What a deviation is where nothing tells it, and on the square of its logarithm over that. From 0.002 to 0.03 what is
missed is the same to a tenth of a percent; the largest keeps a link's from 0.57."""
MOST_OF_A_GROUP = 40
SEVERAL = 3
TAILS = np.linspace(0.1, 0.01, 19)
"""What lies below a range, and above it, of the runs that it is made of: the narrowest that holds enough is taken."""
SEED = 0


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one model on one machine, [n] each: the logarithm of measured over predicted, and the slopes [n, k]."""

    source: str
    residual: np.ndarray
    slopes: np.ndarray
    moe: bool
    unlike: bool  # have too few runs its engine, or its chip?


def spread() -> Iterator[str]:
    """Fit, write the file, and say what came out."""
    groups = _groups()
    sources = list(dict.fromkeys(group.source for group in groups))
    whole = _fit(groups, np.log(np.full(len(NAMES) + 1, USUAL)))
    fits = {"": whole} | {name: _fit([g for g in groups if g.source != name], whole) for name in sources}
    tables: dict[str, dict[int, Any]] = {name: {} for name in fits}
    for many in (1, SEVERAL):
        missed = _after(groups, fits, many)
        for name, of in _ranges(missed, groups, sources).items():
            tables[name][many] = of
    FILE.write_text(_text(fits, tables, groups), "utf-8")
    for name, sd in zip((*NAMES, "run"), np.exp(whole), strict=True):
        yield f"{name:16} {sd:.3f}"
    for many, of in tables[""].items():
        yield f"after {many}: " + ", ".join(f"{kind} {low:.3f} to {high:.3f}" for kind, (low, high) in of.items())


Ranges = dict[str, tuple[float, float]]


def _ranges(missed: Missed, groups: list[Group], sources: list[str]) -> dict[str, Ranges]:
    """For all, and for each source that is left out."""
    for tail in TAILS:
        found = {name: _of(missed, groups, [n for n in sources if n != name], tail, name) for name in ("", *sources)}
        here = {name: missed.sources == name for name in sources}
        share = [held(found[name], missed.those(one)) for name, one in here.items() if np.any(one)]
        if np.mean(share) >= HOLDS:
            break
    return found


def _of(missed: Missed, groups: list[Group], names: list[str], tail: float, without: str) -> Ranges:
    """No range is wider than before; of experts it is as before where too few runs tell."""
    ratio, sources, moe, _ = missed
    before = coefficients(without).ranges
    found = {"dense": (before.dense, ~moe), "moe": (before.moe, moe), "unlike": (before.unlike, None)}
    ranges: Ranges = {}
    for kind, (usual, which) in found.items():
        tells = kind == "dense" or sum(len(g.residual) for g in groups if g.moe and g.source in names) >= ENOUGH
        low, high = usual.low, usual.high
        if which is not None and tells:
            least, most = quantiles(ratio[which], sources[which], names, (tail, 1 - tail))
            low, high = max(low, least), min(high, most)
        ranges[kind] = low, high
    return ranges


def alike(asked: Question) -> tuple[Any, ...]:
    """Of one model, machine and software: its runs tell of each other."""
    chip, engine = asked.cluster.chip.name, (asked.engine.name, asked.engine.version)
    model = replace(asked.model, name="", max_position_embeddings=0)
    return asked.row.source, chip, engine, model, asked.job.precision


def _groups() -> list[Group]:
    """Those of two runs or more."""
    rows = [row for row in _rows() if not tells_launches(row)]
    with ProcessPoolExecutor(cpu_count() or 1) as pool:
        found = list(pool.map(slopes_of, [row.id for row in rows], chunksize=8))
    of: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        of.setdefault(alike(question(row.id)), []).append(i)
    groups = []
    for key, members in of.items():
        if len(members) > 1:
            moe = any(isinstance(kind.mlp, Experts) for kind in key[3].kinds)
            residual, slopes = (np.array([found[i][part] for i in members]) for part in (0, 1))
            usual = coefficients().ranges
            unlike = key[1] not in usual.chips or key[2][0] not in usual.engines
            groups.append(Group(key[0], residual, slopes, moe, unlike))
    return groups


def slopes_of(row_id: str) -> tuple[float, np.ndarray]:
    """Logarithm of measured over predicted, and the step's slopes on that side, by coefficients that never saw it."""
    asked = question(row_id)
    known = coefficients(asked.row.unseen)
    target = float(np.log(asked.step_seconds or 1.0))
    log, slopes = looked(steps_of(prediction(asked)), belief(known).mean, target)
    return target - log, slopes


def prediction(asked: Question) -> Prediction:
    """By coefficients that never saw its source."""
    known = coefficients(asked.row.unseen)
    return Prediction(asked.model, asked.job, asked.cluster, asked.layout, asked.engine, known)


def _fit(groups: list[Group], start: np.ndarray) -> np.ndarray:
    """Logarithms of the deviations of the coefficients, and of a run's own."""
    some = [_some(group) for group in groups]

    def loss(x: np.ndarray) -> float:
        by_source: dict[str, list[tuple[float, float]]] = {}
        for group in some:
            one = _unlikely(group, np.exp(x)), len(group.residual) ** 0.5
            by_source.setdefault(group.source, []).append(one)
        each = [np.average([u for u, _ in found], weights=[w for _, w in found]) for found in by_source.values()]
        return float(np.mean(each) + PENALTY * np.sum((x[:-1] - np.log(USUAL)) ** 2))

    found: np.ndarray = minimize(loss, start, method="L-BFGS-B", options={"ftol": 1e-7}).x
    return found


def _some(group: Group) -> Group:
    every = max(1, -(-len(group.residual) // MOST_OF_A_GROUP))
    return replace(group, residual=group.residual[::every], slopes=group.slopes[::every])


def _unlikely(group: Group, deviations: np.ndarray) -> float:
    """Minus the logarithm of the density of another run, given one, in the mean over all pairs; to a constant."""
    variances, own = deviations[:-1] ** 2, deviations[-1] ** 2
    across = (group.slopes * variances) @ group.slopes.T
    prior = across.diagonal()
    noise = np.full(len(prior), own)
    for _ in range(20):  # what a run's residual counts as, where it is of a t
        left = group.residual * noise / (prior + noise)
        noise = np.maximum(own * (FREEDOM + left**2 / own) / (FREEDOM + 1), own * FREEDOM / (FREEDOM + 1))
    gain = across / (prior + noise)[:, None]  # [observed, predicted]
    off = group.residual[None, :] - gain * group.residual[:, None]
    variance = prior[None, :] - gain * across + own
    unlikely = (FREEDOM + 1) / 2 * np.log1p(off**2 / variance / FREEDOM) + np.log(variance) / 2
    return float(unlikely[~np.eye(len(prior), dtype=bool)].mean())


def _held(fit: np.ndarray, source: str) -> tuple[Belief, float]:
    return replace(belief(coefficients(source)), covariance=np.diag(np.exp(2 * fit[:-1]))), float(np.exp(fit[-1]))


def _after(groups: list[Group], fits: Mapping[str, np.ndarray], many: int) -> Missed:
    """What is missed of runs of which `many` others were observed. Steps count as linear."""
    rng = np.random.default_rng(SEED)
    out: list[tuple[np.ndarray, Group]] = []
    for group in groups:
        held, run = _held(fits[group.source], group.source)
        runs = np.arange(len(group.residual))
        if len(runs) <= many:
            continue
        for first in runs:
            others = rng.permutation(np.delete(runs, first))[: many - 1]
            observed = [first, *others]
            left = np.delete(runs, observed)
            *_, after = in_turn(held, [(group.residual[i], group.slopes[i]) for i in observed], run)
            move = after.mean - held.mean
            out.append((np.exp(group.residual[left] - group.slopes[left] @ move), group))
    said = [(group.source, group.moe, group.unlike) for off, group in out for _ in off]
    return Missed(np.concatenate([off for off, _ in out]), *map(np.array, zip(*said, strict=True)))


def _text(fits: Mapping[str, np.ndarray], tables: Mapping[str, Mapping[int, Any]], groups: list[Group]) -> str:
    """The file."""
    runs, names = sum(len(g.residual) for g in groups), {g.source for g in groups}
    said = f"{runs} published runs in {len(groups)} groups of one model on one machine, of {len(names)} sources"
    lines = [
        f"# Fitted by `make calibrate` on {said}, each source alike.",
        "# [spread]: standard deviations of natural logarithms, of each coefficient from machine to machine, and of a",
        "# run's own residual. [after.N]: least and most of measured over predicted, four of five times, after N steps",
        "# of the same model, engine and precision were observed, no wider than before. [without.X] are those that",
        "# never saw the runs of X.",
        f'source = "{said}, by coefficients that never saw their source"',
    ]
    for name, fit in fits.items():
        inside = f'without."{name}".' if name else ""
        lines.append(f"\n[{inside}spread]")
        lines += [f"{n} = {sd:.3g}" for n, sd in zip((*NAMES, "run"), np.exp(fit), strict=True)]
        for many, of in tables[name].items():
            lines.append(f"\n[{inside}after.{many}]")
            lines += [f"{kind} = [{low:.3f}, {high:.3f}]" for kind, (low, high) in of.items()]
    return "\n".join(lines) + "\n"
