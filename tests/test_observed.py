"""A step that a user observed: what it makes of its machine, in files, in predictions and in plans."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run

from nanum.account.coefficients import Fitted, coefficients
from nanum.calibration import Calibration, belief, calibrate, steps_of
from nanum.calibration.implied import implied
from nanum.cli.commands import app
from nanum.cluster import Cluster, Quantity
from nanum.cluster import load as load_cluster
from nanum.cluster.in_a_step import LIMITS, NAMES, InAStep
from nanum.cluster.parse import from_table
from nanum.errors import Refused
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.measure.write import has_comments, text
from nanum.model import load as load_model
from nanum.prediction import Prediction, predict
from nanum.search import plan
from nanum.validate import read

MODEL = "llama-3.1-8b"
QUESTION = (
    MODEL,
    "1x8xh100-sxm",
    "--seq-len",
    "4096",
    "--global-batch-size",
    "64",
    "--tp",
    "4",
    "--engine",
    "megatron",
)


def asked(cluster: Cluster | None = None, **sizes: int) -> Prediction:
    layout = Layout(**(sizes or {"dp_shard": 2, "tp": 4}), structure=Structure(zero=1, tensor="sequence"))
    return predict(load_model(MODEL), Job(4096, 64), cluster or load_cluster("1x8xh100-sxm"), layout, "megatron")


def seconds_of(p: Prediction) -> float:
    return float(p.parts.step[0])


@cache
def slower() -> Calibration:
    p = asked()
    return calibrate(p, 1.25 * seconds_of(p))


# --- the machine ------------------------------------------------------------------------------------------------------


def test_a_cluster_names_the_coefficients_that_there_are() -> None:
    """Each within its limits, with a spread, and as little as alone what cannot be more."""
    assert set(NAMES) == {f.name for f in fields(Fitted)} == set(coefficients().spread.of)
    for name, (least, most) in LIMITS.items():
        assert least <= getattr(coefficients().fitted, name).value <= most, name
        assert 0.01 < coefficients().spread.of[name] < 1
    assert 0.01 < coefficients().spread.run < 0.2


def test_each_source_has_a_spread_that_never_saw_it() -> None:
    without = {source: coefficients(source) for source in {row.source for row in read()}}
    differing = {name for name, known in without.items() if known.spread != coefficients().spread}
    assert {"mbridge/moe", "zb", "bs176", "mpt"} <= differing


def test_ranges_are_no_wider_where_a_step_was_observed() -> None:
    known = coefficients()
    for kind in ("dense", "moe", "unlike"):
        before, one, three = (getattr(known.ranges_after(n), kind) for n in (0, 1, 3))
        assert before.low <= one.low < 1 < one.high <= before.high
        assert before.low <= three.low < 1 < three.high <= before.high
    assert known.ranges_after(0) is known.ranges
    assert known.ranges_after(2) is known.ranges_after(1)
    assert known.ranges_after(99) is known.ranges_after(3)


def test_what_was_predicted_moves_nothing() -> None:
    p = asked()
    found = calibrate(p, seconds_of(p))
    assert not found.moved
    assert not found.notes
    assert seconds_of(found.after) == pytest.approx(seconds_of(p), rel=1e-9)


@pytest.mark.parametrize("times", [0.8, 1.1, 1.6])
def test_the_new_prediction_lies_between(times: float) -> None:
    p = asked()
    before = seconds_of(p)
    found = calibrate(p, times * before)
    low, high = sorted([before, times * before])
    assert low < seconds_of(found.after) < high
    assert found.learned.after_seconds == pytest.approx(seconds_of(found.after), rel=1e-9)
    again = calibrate(found.after, times * before)
    assert abs(seconds_of(again.after) - times * before) < abs(seconds_of(found.after) - times * before)


def test_a_range_is_narrower_for_the_model_that_was_observed() -> None:
    found, other = slower(), load_model("llama-2-7b")
    assert found.after.range == coefficients().ranges_after(1).dense
    elsewhere = predict(other, Job(4096, 64), found.cluster, Layout(dp_shard=8), "megatron")
    assert elsewhere.range == coefficients().ranges.dense


def test_what_it_rests_on_is_listed() -> None:
    listed = {one["what"]: one for one in slower().after.assumptions}
    assert listed["matmul in a step over alone"]["source"].startswith("observed: 1 step")
    assert listed["matmul in a step over alone"]["value"] == slower().values["matmul"]
    (step,) = (one for what, one in listed.items() if what.startswith("step of llama-3.1-8b"))
    assert (step["tag"], step["value"]) == ("measured", slower().seconds)


def test_what_has_no_part_in_the_step_stays() -> None:
    assert "matmul_fp8" not in slower().moved
    assert "inter_node" not in slower().moved  # one node
    assert slower().values["matmul_fp8"] == pytest.approx(coefficients().fitted.matmul_fp8.value, rel=1e-12)


def test_bounds_hold_and_it_is_said() -> None:
    p = asked()
    found = calibrate(p, 0.3 * seconds_of(p))
    for name, value in found.values.items():
        assert LIMITS[name][0] - 1e-9 <= value <= LIMITS[name][1] + 1e-9
    assert found.values["intra_node"] == pytest.approx(1.0)
    assert found.least_seconds > 0.3 * seconds_of(p)
    notes = " ".join(found.notes)
    assert "is what remains" in notes
    assert "standard deviations off" in notes


def test_no_range_goes_below_what_remains_where_nothing_is_slower_than_alone() -> None:
    """Steps that no machine gives, until all are at their bounds: the least of the range is then what remains."""
    p = asked()
    for _ in range(8):
        found = calibrate(p, 0.3 * seconds_of(asked()))
        p = found.after
        assert found.least_seconds == pytest.approx(p.least_seconds, rel=1e-12)
        assert p.least_seconds <= p.time.step_seconds_low <= p.time.step_seconds
    assert p.range.low * seconds_of(p) < p.least_seconds == p.time.step_seconds_low


def test_a_doubt_goes_into_the_file_and_is_said_of_whatever_rests_on_it(nanum: Run, tmp_path: Path) -> None:
    found = calibrate(asked(), 0.3 * seconds_of(asked()))
    assert len(found.doubts) == 2
    assert not slower().doubts
    assert not slower().cluster.doubts
    again = reread(found.cluster)
    assert again == found.cluster
    assert [each.split(": ", 1)[1] for each in again.doubts] == found.doubts
    file = tmp_path / "lab.toml"
    file.write_text(text(found.cluster), "utf-8")
    done = nanum("predict", MODEL, str(file), *QUESTION[2:], "--json")
    assert done.stderr.count("nanum: warning: ") == len(found.doubts)
    assert "no machine of these chips and links takes" in done.stderr
    assert json.loads(done.stdout)["cluster"]["doubts"] == list(again.doubts)


def test_a_layout_that_does_not_fit_was_hardly_observed() -> None:
    large = predict(load_model("llama-3.1-70b"), Job(4096, 64), load_cluster("1x8xh100-sxm"), Layout(dp_shard=8))
    (doubt,) = calibrate(large, seconds_of(large)).doubts
    assert doubt.startswith("it does not fit: ")


def test_another_unit_is_refused() -> None:
    p = asked()
    for seconds in (seconds_of(p) * 1000, seconds_of(p) / 1000):
        with pytest.raises(Refused, match="another unit"):
            calibrate(p, seconds)


def test_nothing_moves_where_all_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a step that no coefficient has a part in."""
    p = asked()
    monkeypatch.setattr("nanum.calibration.steps_of", lambda p: lambda tried: np.full(len(tried), 2.0))
    with pytest.raises(Refused, match="all that it rests on was measured"):
        calibrate(p, 2.5)


# --- everything else reads it -----------------------------------------------------------------------------------------


def test_a_plan_ranks_by_the_machine_as_it_was_observed() -> None:
    """Exact times are a prediction's."""
    cluster = slower().cluster
    found = plan(load_model(MODEL), Job(4096, 64), cluster, "megatron", top=3)
    for engine, candidate in found.candidates[:3]:
        p = Prediction(load_model(MODEL), Job(4096, 64), cluster, candidate.layout, engine)
        assert candidate.step_seconds == pytest.approx(seconds_of(p), rel=1e-9)


def test_layouts_lose_what_they_rest_on() -> None:
    """Where exchanges in a node are slower than was thought, a layout with more of them loses more."""
    cluster = own(intra_node=known(0.4))
    layouts = ({"dp_shard": 8}, {"dp_shard": 2, "tp": 4}, {"tp": 8})
    alone, four, eight = (seconds_of(asked(cluster, **sizes)) / seconds_of(asked(**sizes)) for sizes in layouts)
    assert 1 < alone < four < eight

    def places(machine: Cluster) -> list[int]:
        found = plan(load_model(MODEL), Job(4096, 64), machine, "megatron", top=20).candidates
        return [int(candidate.layout.tp) for _, candidate in found[:20]]

    assert sum(places(cluster)) < sum(places(load_cluster("1x8xh100-sxm")))


def test_what_it_implies_is_the_plans_of_both_machines() -> None:
    found = slower()
    told: list[float] = []
    best = implied(found, lambda done, total: told.append(done / total))
    assert told == sorted(told)  # one bar for both
    assert 0.5 < told[-1] <= 1.0
    after = plan(load_model(MODEL), Job(4096, 64), found.cluster, "megatron", top=5)
    assert [place.after for place in best.places if place.after] == [1, 2, 3, 4, 5]
    assert sorted(place.before for place in best.places if place.before) == [1, 2, 3, 4, 5]
    assert best.places[0].after_seconds == pytest.approx(after.candidates[0][1].step_seconds)
    assert all(place.after_seconds > place.before_seconds for place in best.places)
    assert [place.after_seconds for place in best.places] == sorted(place.after_seconds for place in best.places)


def test_sets_that_are_chosen_stand_above_a_clusters_own() -> None:
    """As those that a published run is predicted by."""
    p = replace(asked(), cluster=slower().cluster, coefficients=coefficients("mpt"))
    assert p.coefficients is coefficients("mpt")
    assert asked(slower().cluster).coefficients.fitted.matmul.value == slower().values["matmul"]
    assert asked(slower().cluster).coefficients is asked(slower().cluster).coefficients


def test_several_sets_at_once_are_each_alone() -> None:
    steps, mean = steps_of(asked()), belief(coefficients()).mean
    tried = np.exp(mean + np.random.default_rng(0).normal(size=(4, len(NAMES))) * 0.1)
    assert steps(tried) == pytest.approx([steps(one[None])[0] for one in tried], rel=1e-12)


# --- the file ---------------------------------------------------------------------------------------------------------


def reread(cluster: Cluster) -> Cluster:
    return from_table(tomllib.loads(text(cluster)), "lab", where="lab.toml")


def test_a_file_keeps_all_that_was_learned() -> None:
    cluster = slower().cluster
    again = reread(cluster)
    assert again == cluster
    assert belief(coefficients(), again.in_a_step).covariance == pytest.approx(slower().learned.belief.covariance)
    twice = calibrate(asked(again), slower().seconds)
    assert len(reread(twice.cluster).in_a_step.observations) == 2  # type: ignore[union-attr]


def test_a_host_of_ones_own_is_kept() -> None:
    table = {"nodes": 1, "gpus_per_node": 8, "chip": "h100-sxm", "host": {"bandwidth": "20 GB/s"}}
    cluster = from_table(table, "lab", where="lab.toml")
    assert reread(cluster).host == cluster.host
    assert "[host]" not in text(load_cluster("1x8xh100-sxm"))


def known(value: float, **more: Any) -> dict[str, Any]:
    return {"value": value, "tag": "derived", "source": "a test"} | more


def known_step(**more: Any) -> dict[str, Any]:
    said = dict.fromkeys(("model", "engine", "precision", "layout"), "m")
    return said | {"seconds": 1, "predicted_seconds": 1} | more


def own(**table: Any) -> Cluster:
    return from_table({"nodes": 1, "gpus_per_node": 8, "chip": "h100-sxm", "in_a_step": table}, "l", where="l.toml")


def test_a_file_by_hand_may_say_some() -> None:
    """The rest is as shipped, and as unsure as of any machine."""
    cluster = own(matmul=known(0.8), covariance={"matmul": [0.01]})
    assert cluster.in_a_step == InAStep((("matmul", Quantity(0.8, "derived", "a test")),), ("matmul",), ((0.01,),))
    p = asked(cluster)
    assert p.coefficients.fitted == replace(coefficients().fitted, matmul=Quantity(0.8, "derived", "a test"))
    held = belief(p.coefficients, cluster.in_a_step)
    assert held.covariance[0, 0] == 0.01
    assert held.covariance[1, 1] == coefficients().spread.of["matmul_untabled"] ** 2
    assert p.range == coefficients().ranges.dense


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"matmul": known(1.2)}, "nothing is faster in a step than alone"),
        ({"matmul": 7}, "in_a_step.matmul: 7 is not from 0.01 to 1: nothing is faster in a step than alone"),
        ({"matmull": known(0.9)}, "did you mean matmul"),
        ({"host_seconds": known(0, unit="s")}, "is not from 1e-08 to 0.01"),
        ({"memory": {"value": 0.9}}, "no tag; no source"),
        ({"covariance": {"clock": [1]}}, "no coefficient 'clock'"),
        ({"covariance": {"matmul": [1, 2]}}, "covariance.matmul = [1, 2] is not a list of one number, one for each"),
        ({"covariance": {"matmul": [1, 0.5], "memory": [0.4, 1]}}, "not symmetric"),
        ({"covariance": {"matmul": [1, 2], "memory": [2, 1]}}, "a variance below 0"),
        ({"covariance": {"matmul": [-1]}}, "is not above 0"),
        ({"covariance": {"matmul": [float("nan")]}}, "= [nan] is not a list of one number"),
        ({"covariance": [1]}, "covariance = [1] is not a table of rows"),
        ({"observation": [known_step(doubts="slow")]}, "doubts: 'slow' is not a list of printable texts"),
        ({"observation": [{"model": "m"}]}, "observation.0.engine is missing"),
    ],
)
def test_a_wrong_table_is_refused(table: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused) as refused:
        own(**table)
    assert why in str(refused.value)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_answers_and_writes(nanum: Run, tmp_path: Path) -> None:
    """Text, a file, and from that a second step as JSON."""
    file = tmp_path / "lab.toml"
    done = nanum("predict", *QUESTION, "--observed", "12 s", "-o", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    for said in ("What the observed step says", "predicted before", "the best layouts", "Their order"):
        assert said in done.stdout
    assert "lab.toml is this machine" in " ".join(done.stdout.split())
    table = tomllib.loads(file.read_text("utf-8"))
    assert table["in_a_step"]["matmul"]["source"].startswith("observed: 1 step")
    before = file.read_text("utf-8")

    words = (MODEL, str(file), *QUESTION[2:])
    refused = nanum("predict", *words, "--observed", "12 s", "-o", str(file))
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    assert file.read_text("utf-8") == before

    file.write_text(f"# the lab's own\n{before}", "utf-8")
    done = nanum("predict", *words, "--observed", "11.9s", "--observed", "12.1s", "-o", str(file), "--force", "--json")
    assert done.returncode == 0
    assert f"{file}: the comments of the file that it replaced are not kept" in done.stderr
    document = json.loads(done.stdout)
    seen = document["observed"]
    assert seen["runs_seconds"] == [11.9, 12.1]
    assert seen["step_seconds"] == pytest.approx(12.0)
    assert seen["steps_seen"] == 2
    assert seen["after"]["step_seconds"] == document["time"]["step_seconds"]
    assert {one["name"] for one in seen["coefficients"]} == set(NAMES)
    assert len(tomllib.loads(file.read_text("utf-8"))["in_a_step"]["observation"]) == 2

    assert not has_comments(file.read_text("utf-8"))

    plain = json.loads(nanum("predict", *words, "--json").stdout)
    assert plain["time"]["step_seconds"] == pytest.approx(document["time"]["step_seconds"], rel=1e-9)
    assert "observed" not in plain


@pytest.mark.parametrize(
    ("toml", "there"),
    [
        ("# 1", True),
        ("a = 1 # 1", True),
        ("a = 'it' # 1", True),
        ("a = 'x\\' # 1", True),  # of which the backslash is a letter
        ('a = "run #1"', False),
        ('a = "\\"#"', False),
        ('a = """\n# \\" #"""', False),
        ("a = '''\n# 1\n'''", False),
    ],
)
def test_comments_are_told_from_strings(toml: str, there: bool) -> None:
    if "=" in toml:
        assert tomllib.loads(toml).keys() == {"a"}
    assert has_comments(toml) == there


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--observed", "3.2"), "'3.2' has no unit (write 3.2 s or 850 ms)"),
        (("--observed", "0s"), "no step takes that"),
        (("--observed=-3s",), "is negative"),
        (("--observed", "nan s"), "is not a number"),
        (("--observed", "inf s"), "is infinite"),
        (("--observed", "3 parsecs"), "has the unit 'parsecs'"),
        (("--observed", "soon"), "is not a quantity"),
        (("--observed", "1e9 s"), "no step takes that"),
        (("--observed", "900000 s"), "another unit"),
        (("-o", "lab.toml"), "is for --observed"),
        (("--force",), "which is not said"),
        (("--observed", "3s", "-o", "lab.json"), "must be a name that ends in .toml"),
    ],
)
def test_what_cannot_be_observed_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: tuple[str, ...],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        app(["predict", *QUESTION, *words])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert why in said.err
    assert not list(tmp_path.iterdir())


def test_a_model_may_have_any_name(nanum: Run, tmp_path: Path) -> None:
    """Its folder's: no terminal's cursor moves, and the file that repeats it is read."""
    folder, lab = tmp_path / "my\t\x1b[31mmodel", tmp_path / "lab.toml"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, '
        '"intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 2048}'
    )
    done = nanum("predict", str(folder), "1x8xh100-sxm", "--observed", "5s", "-o", str(lab))
    assert (done.returncode, "\x1b" in done.stdout) == (0, False)
    assert load_cluster(str(lab)).in_a_step.observations[0].model == r"my\t\x1b[31mmodel"


def test_all_reasons_at_once(nanum: Run) -> None:
    done = nanum("predict", MODEL, "1x8xh200", "--tp", "zero", "--observed", "3.2", "--observed", "x")
    assert done.returncode == 2
    for why in ("h200", "zero", "has no unit", "'x' is not a quantity"):
        assert why in done.stderr
