"""The fitted coefficients: few, global, blind to the source that they are judged on; and the ranges drawn from them."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from nanum.account.coefficients import Fitted, coefficients
from nanum.cluster import load as load_cluster
from nanum.engines import load as load_engine
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import load as load_model
from nanum.prediction import Prediction, consistent
from nanum.validate import read, validate
from nanum.validate.questions import Question, question_of
from nanum.validate.rows import HELD_OUT, tells_launches

FILE = Path(__file__).resolve().parents[1] / "src/nanum/data/measured/fitted.toml"
NAMES = {f.name for f in fields(Fitted)}


@cache
def table() -> dict:
    return tomllib.loads(FILE.read_text("utf-8"))


def test_at_most_twelve_each_with_its_source() -> None:
    fitted = {name: entry for name, entry in table().items() if name not in ("range", "without")}
    assert fitted.keys() == NAMES
    assert len(fitted) <= 12
    assert all(entry["source"].startswith("fitted on") and entry["tag"] == "derived" for entry in fitted.values())


def test_each_source_has_coefficients_that_never_saw_it() -> None:
    """And none is of a row, a model or a paper: all have the same names."""
    without = table()["without"]
    assert all(each.keys() == NAMES | {"range"} for each in without.values())
    of_source = {name: coefficients(name) for name in without}
    for name, known in of_source.items():
        values = {n: getattr(known.fitted, n).value for n in NAMES}
        assert values == {n: without[name][n] for n in NAMES}
        assert known.ranges.dense.low == without[name]["range"]["dense"][0]
    assert len({tuple(vars(known.fitted)[n].value for n in sorted(NAMES)) for known in of_source.values()}) > 1
    assert coefficients("a source that no fit knows").fitted == coefficients().fitted


def test_coefficients_are_physical() -> None:
    """Nothing in a step is faster than alone, but for what stands for a table that is not there."""
    fitted = coefficients().fitted
    for name in NAMES - {"host_seconds", "expert_seconds", "matmul_fp8"}:
        assert 0 < getattr(fitted, name).value <= 1.01, name
    assert 1e-6 < fitted.host_seconds.value < 1e-4
    assert fitted.host_seconds.value < fitted.expert_seconds.value < 1e-3  # a loop over experts is several launches


def test_what_is_held_out_no_fit_has_seen() -> None:
    """Nor has the fit that it is predicted by seen its machine."""
    held = [row for row in read() if row.source in HELD_OUT]
    assert {(row.source, row.unseen) for row in held} == set(HELD_OUT.items())
    assert not HELD_OUT.keys() & table()["without"].keys()
    held = [row for row in held if row.source == "vtrainlarge"]
    assert {row["layout.gpus"] for row in held} == {256, 512}
    (one,) = validate(held[:1])["rows"]
    asked = question_of(held[0])
    assert isinstance(asked, Question)
    known = coefficients("vtrain/multi")
    by_those = Prediction(asked.model, asked.job, asked.cluster, asked.layout, asked.engine, known)
    assert one["predicted"] == float(by_those.parts.step[0])
    assert known.fitted != coefficients().fitted


def test_what_is_held_out_has_no_part_in_the_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FILE.parents[4]))
    from bench import calibrate

    monkeypatch.setattr(calibrate, "TAILS", np.linspace(0.13, 0.01, 7))
    rng, names = np.random.default_rng(1), ["mpt", "zb", "vtrain/multi"]
    sources = np.repeat(names, 40)
    ratio = np.exp(rng.normal(0, 0.05, len(sources)))
    seen = calibrate.Missed(ratio, sources, *np.zeros((2, len(ratio)), bool))
    ratios, of = np.append(ratio, np.full(40, 2.0)), np.append(sources, ["vtrainlarge"] * 40)
    far = calibrate.Missed(ratios, of, *np.zeros((2, 160), bool))
    ranges = [calibrate._ranges(missed, missed.sources != "vtrainlarge", names) for missed in (far, seen)]
    assert ranges[0] == ranges[1]


@pytest.mark.parametrize("source", ["vtrain/single", "mbridge/moe"])
def test_rows_that_tell_launches_are_few_and_have_no_score(source: str) -> None:
    rows = [row for row in read() if row.source == source]
    telling = [row for row in rows if tells_launches(row)]
    assert 0 < len(telling) <= 0.05 * len(rows)
    (skipped,) = validate(telling[:1])["skipped"]
    assert "what a launch costs" in skipped["why"]


def test_of_no_other_source_do_rows_tell_launches() -> None:
    assert {row.source for row in read() if tells_launches(row)} == {"vtrain/single", "mbridge/moe"}


@pytest.mark.parametrize(
    ("engine", "layout"),
    [
        ("torchtitan", Layout(dp_shard=8, structure=Structure(zero=3))),
        ("megatron", Layout(dp_shard=2, tp=2, pp=2, structure=Structure(zero=1, tensor="sequence"))),
        ("megatron", Layout(dp_shard=2, pp=4, structure=Structure(zero=1, schedule="interleaved", virtual_stages=2))),
    ],
    ids=["fsdp", "1f1b", "interleaved"],
)
def test_several_sets_at_once_are_each_alone(engine: str, layout: Layout) -> None:
    model, job = load_model("tiny-llama"), Job(128, 32)
    machine, layout, chosen = load_cluster("1x8xh100-sxm"), consistent(layout), load_engine(engine)
    shipped, rng = coefficients(), np.random.default_rng(0)
    tried = {n: getattr(shipped.fitted, n).value * rng.uniform(0.5, 1.5, 3) for n in NAMES}

    def step(values: dict) -> np.ndarray:
        fitted = Fitted(**{name: replace(getattr(shipped.fitted, name), value=v) for name, v in values.items()})
        return Prediction(model, job, machine, layout, chosen, replace(shipped, fitted=fitted)).parts.step

    together = step(tried)
    for i in range(3):
        assert together[i] == pytest.approx(step({n: v[i] for n, v in tried.items()})[0], rel=1e-12)


def test_ranges_are_wider_for_what_no_run_is_like() -> None:
    ranges = coefficients().ranges
    for each in (ranges.dense, ranges.moe, ranges.unlike):
        assert each.low < 1 < each.high
    assert ranges.of("megatron", "h100-sxm", experts=False) == ranges.dense
    assert ranges.of("megatron", "h100-sxm", experts=True) == ranges.moe
    assert ranges.of("nanotron", "h100-sxm", experts=False) == ranges.of("megatron", "mi300x", experts=False)
    unlike = ranges.of("megatron", "mi300x", experts=False)
    assert unlike.low <= ranges.dense.low
    assert unlike.high >= ranges.dense.high


@pytest.mark.parametrize("every", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_ranges_cover_runs_that_had_no_part_in_them(every: int) -> None:
    """Four of five, as the mean over sources, by a third of the dense runs, and by half of them."""
    sources = ("mpt", "zb", "bs176", "simumax/dense", "titan", "sc21", "vtrain/multi", "jz")
    rows = [row for row in read() if row.source in sources][::every]
    of = {name: each["step_seconds"]["in_range"] for name, each in validate(rows)["by_source"].items()}
    assert 0.65 <= np.mean([of[name] for name in sources]) <= 0.92
