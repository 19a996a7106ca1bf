"""`make calibrate`: fit the few coefficients of `data/measured/fitted.toml` on the published runs that are shipped.

Each source has the same weight: the mean of its absolute logarithmic errors, which few odd runs do not carry away, and
which has one best fit. Sources that are held out (`validate.rows`) have no part in any. A fit walks down a model that
is linear in the logarithms of the coefficients around the last one; the slopes are differences of predictions, worked
out for all coefficients at once. Then each source is left out in turn, and what it is predicted to take is by the
coefficients that never saw it: of these are the errors that `nanum validate` prints, and the ranges.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from fnmatch import fnmatch
from functools import cache
from itertools import product
from math import ceil, floor
from os import cpu_count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from nanum.account.coefficients import Coefficients, Fitted, coefficients
from nanum.model import Experts
from nanum.prediction import Prediction
from nanum.validate import read
from nanum.validate.causes import odd_rows
from nanum.validate.questions import Question, question_of
from nanum.validate.rows import HELD_OUT, Row, tells_launches
from nanum.validate.sources import SOURCES

FILE = Path(__file__).resolve().parents[1] / "src/nanum/data/measured/fitted.toml"
NAMES = tuple(f.name for f in fields(Fitted))
LAUNCHES = "launches of "
"""A source's rows that tell what a launch costs: in each fit, and in no score."""
AT_MOST = 120
"""Runs of a source that a fit sees, evenly among them."""
ROUNDS = 2
APART = 1.05  # how far a coefficient is moved to see what it does
ROUNDED = 0.01  # an absolute error is smooth within so much of 0
PRECISELY = {"maxiter": 5000, "ftol": 1e-13, "gtol": 1e-9}
PENALTY = 0.2  # on the square of the logarithm of a coefficient over what is known of it before
BEFORE = dict.fromkeys(NAMES, 1.0) | {
    "matmul_untabled": 0.79,  # between the two tables that there are
    "matmul_fp8": 1.073,  # H200: 1.90 times bf16's (Transformer Engine, docs/examples/gemm_profiling), the bests 1.77
    "memory": 0.9,  # recalled: what copies reach of a GPU's bandwidth
    "host_seconds": 1e-5,  # recalled: the order of PyTorch's own overhead of an eager operation
    "expert_seconds": 1e-4,  # a few such, and what Python does for each expert
    "beside": 0.189,  # arXiv 2507.03114: overlap slows compute by 18.9 % in the mean
}
"""What is known without a published run: in a step as alone, and from elsewhere what that says nothing of."""
UNSURE = {"host_seconds": 0.1, "expert_seconds": 0.1}
"""Of what is known by its order of magnitude alone, the penalty is less: this much of it."""
TOLD = {"host_seconds": "vTrain on one node", "expert_seconds": "Megatron-Bridge, whatever the experts of a rank,"}
"""By which runs, all of one kind, those of a coefficient are told that no other runs see: with any source left out."""
SLOWER = ("matmul", "matmul_untabled", "attention", "memory", "intra_node", "inter_node", "beside")
"""Nothing is faster in a step than alone."""
HOLDS, FEWEST, MOST = 0.8, 0.6, 0.95
"""Of runs that had no part in a range: in the mean over sources, and of a source."""
TAILS = np.linspace(0.16, 0.01, 76)
"""What lies below a range, or above it, of the runs that it is made of."""
ENOUGH = 15  # runs of an engine or on a chip, for others to be like them


def calibrate() -> Iterator[str]:
    """Fit, write the file, and say what came out."""
    rows = list(_rows())
    sources = np.array([_source(row) for row in rows])
    names = list(dict.fromkeys(sources.tolist()))
    measured = np.array([question(row.id).step_seconds for row in rows])
    start = np.array([getattr(coefficients().fitted, name).value for name in NAMES])
    for number in range(ROUNDS):
        around = np.vstack(
            [start, *(np.where(np.arange(len(NAMES)) == i, APART, 1) * start for i in range(len(NAMES)))]
        )
        seconds = _steps(rows, around)
        error = np.log(seconds[:, 0] / measured)
        slopes = np.log(seconds[:, 1:] / seconds[:, :1]) / np.log(APART)
        yield f"round {number + 1}: {np.mean(_by_source(np.exp(error) - 1, sources, names)):.1%} before"
        start = start * np.exp(_fit(error, slopes, start, sources, names))
    left = {name: [n for n in names if n != name] for name in names if not name.startswith(LAUNCHES)}
    without = {name: around[0] * np.exp(_fit(error, slopes, around[0], sources, use)) for name, use in left.items()}
    scored = [row for row in _measured() if not tells_launches(row)]
    seen = {row.id for row in rows}
    fitted = [row for row in scored if row.id in seen]
    missed = _missed(scored, {"": start, **without}, fitted)
    ranges = _ranges(missed, np.array([row.id in seen for row in scored]), list(left))
    FILE.write_text(_text(start, without, ranges, fitted), "utf-8")
    coefficients.cache_clear()  # what is asked for from here on is the new file's
    for name in (*left, *HELD_OUT):
        of = 1 / missed.ratio[missed.sources == name] - 1
        yield f"{name:15} {len(of):4} runs: {np.abs(of).mean():6.1%} left out, bias {of.mean():+6.1%}"
    yield f"mean of {len(left)} sources: {np.mean(_by_source(1 / missed.ratio - 1, missed.sources, list(left))):.1%}"


class Missed(NamedTuple):
    """Of runs, [n] each: what is measured over what is predicted by coefficients that never saw the run's source, that
    source, whether there are experts, and whether too few runs have its engine or its chip.
    """

    ratio: np.ndarray
    sources: np.ndarray
    moe: np.ndarray
    unlike: np.ndarray

    def those(self, which: np.ndarray) -> Missed:
        return Missed(*(each[which] for each in self))


def _missed(rows: list[Row], without: Mapping[str, np.ndarray], fitted: list[Row]) -> Missed:
    seconds, column = _steps(rows, np.vstack(list(without.values()))), {name: i for i, name in enumerate(without)}
    ratio = [question(row.id).step_seconds / seconds[i, column[row.unseen]] for i, row in enumerate(rows)]
    moe = [any(isinstance(kind.mlp, Experts) for kind in question(row.id).model.kinds) for row in rows]
    engines, chips = usual(fitted)
    unlike = [_engine(row) not in engines or _chip(row) not in chips for row in rows]
    return Missed(np.array(ratio), np.array([row.source for row in rows]), np.array(moe), np.array(unlike))


def usual(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Engines and chips that enough of these runs have."""
    return _often(map(_engine, rows)), _often(map(_chip, rows))


def _often(words: Iterable[str]) -> list[str]:
    found = list(words)
    return sorted(word for word in set(found) if found.count(word) >= ENOUGH)


def _engine(row: Row) -> str:
    return question(row.id).engine.name


def _chip(row: Row) -> str:
    return question(row.id).cluster.chip.name


def _measured() -> Iterator[Row]:
    """Runs whose step was measured, and is predicted."""
    for row in _shipped().values():
        asked = question_of(row)
        if isinstance(asked, Question) and asked.step_seconds is not None:
            yield row


def _rows() -> Iterator[Row]:
    """Those that no source holds out, and that are not known to be odd; evenly at most so many of a source."""
    of: dict[str, list[Row]] = {}
    for row in _measured():
        if row.source not in HELD_OUT and not any(
            fnmatch(row.id, i) for each in odd_rows() if each.quantity == "step_seconds" for i in each.ids
        ):
            of.setdefault(_source(row), []).append(row)
    for rows in of.values():
        step = max(1, -(-len(rows) // AT_MOST))
        yield from rows[::step]


def _source(row: Row) -> str:
    return LAUNCHES + row.source if tells_launches(row) else row.source


@cache
def _shipped() -> Mapping[str, Row]:
    return {row.id: row for row in read()}


@cache
def question(row_id: str) -> Question:
    asked = question_of(_shipped()[row_id])
    assert isinstance(asked, Question)
    return asked


def _steps(rows: list[Row], tried: np.ndarray) -> np.ndarray:
    """[rows, sets] predicted seconds by each of `tried` [sets, coefficients]."""
    jobs = cpu_count() or 1
    parts = [[row.id for row in rows[i::jobs]] for i in range(jobs)]
    seconds = np.empty((len(rows), len(tried)))
    with ProcessPoolExecutor(jobs) as pool:
        for i, found in enumerate(pool.map(_of_some, parts, [tried] * jobs)):
            seconds[i::jobs] = found
    return seconds


def _of_some(ids: list[str], tried: np.ndarray) -> np.ndarray:
    shipped = coefficients()
    fitted = {n: replace(getattr(shipped.fitted, n), value=tried[:, i]) for i, n in enumerate(NAMES)}
    known = replace(shipped, fitted=Fitted(**fitted))
    return np.array([np.broadcast_to(_step(question(i), known), len(tried)) for i in ids])


def _step(asked: Question, known: Coefficients) -> np.ndarray:
    """The exact step by all sets of coefficients at once."""
    return Prediction(asked.model, asked.job, asked.cluster, asked.layout, asked.engine, known).parts.step


def _by_source(errors: np.ndarray, sources: np.ndarray, names: Iterable[str]) -> list[float]:
    """The mean absolute error of each source."""
    return [float(np.abs(errors[sources == name]).mean()) for name in names]


def _fit(error: np.ndarray, slopes: np.ndarray, start: np.ndarray, sources: np.ndarray, names: list[str]) -> np.ndarray:
    """The logarithms of what `start` is to be multiplied by, on the runs of these sources. The loss is convex, so
    there is one best.
    """
    share = sum(np.where(sources == name, 1 / np.sum(sources == name) / len(names), 0.0) for name in names)
    known = np.log(np.array([BEFORE[name] for name in NAMES]) / start)
    most = np.log(np.array([1.0 if name in SLOWER else np.inf for name in NAMES]) / start)
    weights = np.array([UNSURE.get(name, 1.0) for name in NAMES])

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        """And its slopes."""
        off = error + slopes @ x
        size = np.hypot(off, ROUNDED)
        apart = weights * (x - known)
        value = share @ size + PENALTY * (apart @ (x - known)) / len(NAMES)
        return float(value), (share * off / size) @ slopes + 2 * PENALTY * apart / len(NAMES)

    bounds = [(None, at if np.isfinite(at) else None) for at in most]
    fit = minimize(loss, np.minimum(0.0, most), jac=True, method="L-BFGS-B", bounds=bounds, options=PRECISELY)
    found: np.ndarray = fit.x
    return found


def quantiles(
    ratio: np.ndarray, sources: np.ndarray, names: list[str], at: tuple[float, ...] = (0.1, 0.9)
) -> list[float]:
    """Of what is measured over predicted, each source alike."""
    here = [ratio[sources == name] for name in names if np.any(sources == name)]
    values, weights = np.concatenate(here), np.concatenate([np.full(len(r), 1 / len(r)) for r in here])
    order = np.argsort(values)
    share = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return [float(np.interp(q, share, values[order])) for q in at]


def _ranges(missed: Missed, fitted: np.ndarray, names: list[str]) -> dict[str, dict[str, Any]]:
    """For all, and for each source that is left out: the narrowest of the runs that are `fitted` on, that hold four of
    five of all runs of a source that had no part in them, in the mean over sources, and neither too few nor too many of
    one with enough runs to tell. What is held out has no part in the choice.
    """
    tells = missed.those(fitted)
    own = {name: missed.those(missed.sources == name) for name in names}
    told = [name for name in names if len(own[name].ratio) >= ENOUGH]
    found = []
    for below, above in product(TAILS, TAILS):
        of = {e: _of(tells, [n for n in names if n != e], (below, 1 - above)) for e in ("", *names)}
        share = {name: held(of[name], own[name]) for name in names}
        amiss = sum(not FEWEST <= share[name] <= MOST for name in told)
        low, high = of[""]["dense"]
        if np.mean(list(share.values())) >= HOLDS:
            found.append((amiss, high / low, of))
    return min(found, key=lambda one: one[:2])[2]


def _of(missed: Missed, names: list[str], at: tuple[float, float]) -> dict[str, list[float]]:
    """Of these sources, each alike: these percentiles; of what is unlike, the farthest that the 10th and the 90th are
    in one source, but for those that warn of their own noise.
    """
    ratio, sources, moe, _ = missed

    def of(which: np.ndarray) -> list[float]:
        return _outward(*quantiles(ratio[which], sources[which], names, at))

    tells = [name for name in names if (sources == name).sum() >= ENOUGH and not SOURCES[name].noisy]
    each = [np.quantile(ratio[sources == name], (0.1, 0.9)) for name in tells]
    unlike = _outward(min(low for low, _ in each), max(high for _, high in each))
    told = np.sum(moe & np.isin(sources, names)) >= ENOUGH
    return {"dense": of(~moe), "moe": of(moe) if told else unlike, "unlike": unlike}


def _outward(low: float, high: float) -> list[float]:
    """As the file has them, to three places: what was held still is."""
    return [floor(low * 1000) / 1000, ceil(high * 1000) / 1000]


def held(of: Mapping[str, Sequence[float]], runs: Missed) -> float:
    """The share of runs in their range (`account.coefficients.Ranges.of`)."""
    kinds = np.select([runs.unlike, runs.moe], ["unlike", "moe"], "dense")
    low, high = (np.array([of[kind][i] for kind in kinds]) for i in (0, 1))
    return float(np.mean((low <= runs.ratio) & (runs.ratio <= high)))


def _text(start: np.ndarray, without: Mapping[str, np.ndarray], ranges: Mapping[str, Any], rows: list[Row]) -> str:
    """The file."""
    sources = len(without)
    lines = [
        f"# Fitted by `make calibrate` on {len(rows)} published runs of {sources} sources, each source alike.",
        "# [without.X] are those that never saw the runs of X, which X is validated with.",
        "# [range]: what holds four of five runs, measured over predicted, of sources that had no part in it.",
    ]
    for i, name in enumerate(NAMES):
        low, high = (f([c[i] for c in without.values()]) for f in (min, max))
        unit = " s" if name.endswith("_seconds") else ""
        between = f"{low:.4g} to {high:.4g}{unit}"
        source = f"fitted on {len(rows)} published steps of {sources} sources; {between} with one left out"
        source += f"; told by runs of {TOLD[name]} that have no score" if name in TOLD else ""
        lines += [f"\n[{name}]", f"value = {start[i]:.5g}", 'tag = "derived"', f'source = "{source}"']
    engines, chips = usual(rows)
    lines += ["\n[range]", *_pairs(ranges[""]), f"engines = {_listed(engines)}", f"chips = {_listed(chips)}"]
    lines.append(f'source = "of {len(rows)} published steps by coefficients that never saw their source"')
    for name, values in without.items():
        lines.append(f'\n[without."{name}"]')
        lines += [f"{n} = {v:.5g}" for n, v in zip(NAMES, values, strict=True)]
        lines.append(f"range = {{ {', '.join(_pairs(ranges[name]))} }}")
    return "\n".join(lines) + "\n"


def _pairs(ranges: Mapping[str, list[float]]) -> list[str]:
    return [f"{name} = [{low:.3f}, {high:.3f}]" for name, (low, high) in ranges.items()]


def _listed(words: list[str]) -> str:
    return re.sub("'", '"', str(words))
