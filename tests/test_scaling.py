"""Ever more GPUs: the points, what is serial in a step and what would cut it, and the command."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from conftest import Run
from rich.console import Console

import nanum as nanum_package
from nanum.cluster import Cluster
from nanum.cluster import load as load_cluster
from nanum.cluster.measured import Exchange, Grid, Measured
from nanum.errors import Refused
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import load as load_model
from nanum.report.scaling import _trend, print_scaling
from nanum.scaling import Cut, Scaling, Uncut, scale
from nanum.scaling.cuts import faster
from nanum.scaling.laws import amdahl_speedup, fit_amdahl
from nanum.units import format_seconds, format_seconds_between

# --- a machine --------------------------------------------------------------------------------------------------------

NODE, EIGHT = load_cluster("1x8xh100-sxm"), load_cluster("8x8xh100-sxm")
GPT2 = load_model("gpt2")
PIPELINE = Structure(zero=1, tensor="sequence", pipelined=True)


def _scaled(engine: str, layout: Layout, cluster: Cluster = EIGHT, batch: int = 8192, **more: Any) -> Scaling:
    return scale(GPT2, Job(1024, batch), cluster, layout, engine, **more)


@pytest.fixture(scope="module")
def plain() -> Scaling:
    return _scaled(
        "torch", Layout(dp_replicate=64, micro_batch_size=32, structure=Structure(zero=0)), gpus=(1, 2, 8, 64, 256)
    )


@pytest.fixture(scope="module")
def pipeline() -> Scaling:
    return _scaled("megatron", Layout(dp_shard=16, tp=2, pp=2, micro_batch_size=32, structure=PIPELINE))


@pytest.fixture(params=["plain", "pipeline"])
def scaled(request: pytest.FixtureRequest) -> Scaling:
    found: Scaling = request.getfixturevalue(request.param)
    return found


def test_points_are_predictions(scaled: Scaling) -> None:
    document = scaled.to_dict()
    for curve, points in ((scaled.strong, document["points"]), (scaled.weak, document["weak"]["points"])):
        assert [point["gpus"] for point in points] == sorted({p.cluster.gpus for p in curve.predictions})
        for p, point in zip(curve.predictions, points, strict=True):
            asked = nanum_package.predict(p.model, p.job, p.cluster, p.layout, p.engine.name)
            assert point["step_seconds"] == asked.time.step_seconds
            assert point["layout"]["num_microbatches"] == asked.num_microbatches
            assert point["speedup"] == pytest.approx(asked.one_gpu_seconds / asked.time.step_seconds)
            assert point["efficiency"] == pytest.approx(point["speedup"] / point["gpus"])
            rates = (asked.rates(asked.time.step_seconds), points[0])
            assert point["speedup_over_first"] == pytest.approx(
                rates[0]["tokens_per_second"] / rates[1]["tokens_per_second"]
            )
    for p, point in zip(scaled.strong.predictions, document["points"], strict=True):
        assert point["serial_fraction"] == pytest.approx(p.time.serial_fraction)


def test_the_forms_meet_at_the_whole_cluster(scaled: Scaling) -> None:
    strong, weak = (
        next(p for p in curve.predictions if p.cluster.gpus == EIGHT.gpus) for curve in (scaled.strong, scaled.weak)
    )
    assert strong is weak


def test_the_amdahl_of_the_document(scaled: Scaling) -> None:
    document = scaled.to_dict()
    law, points = document["amdahl"], document["points"]
    s = law["serial_fraction"]
    assert s > 0
    assert law["limit"] == pytest.approx(1 / s)
    assert law["gpus_at_half_efficiency"] == pytest.approx(1 + 1 / s)
    assert law["limit"] > max(point["speedup"] for point in points)
    errors = [abs(point["speedup_by_the_law"] / point["speedup"] - 1) for point in points]
    assert law["worst_error"] == pytest.approx(max(errors))
    assert [one["gpus"] for one in law["continued"]] == [points[-1]["gpus"] * 2**i for i in (1, 2, 3)]


def page_of(found: Scaling) -> str:
    console = Console(file=io.StringIO(), width=1000)
    print_scaling(found.to_dict(), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_step_that_no_gpu_can_do_alone_is_measured_from_the_first_count() -> None:
    """Its law is Amdahl's with each group of so many GPUs as one."""
    large = load_model("llama-3.1-70b")
    found = scale(large, Job(4096, 512), load_cluster("16x8xh100-sxm"), Layout(tp=8), gpus=(64, 128, 256))
    document = found.to_dict()
    assert document["one_gpu_fits"] is False
    assert document["one_gpu_bytes"] > 16 * 70e9
    points, law = document["points"], document["amdahl"]["over_first"]
    assert law["gpus"] == points[0]["gpus"] == 64
    assert law["serial_fraction"] == fit_amdahl([(p["gpus"] / 64, p["speedup_over_first"]) for p in points])
    assert [one["gpus"] for one in law["curve"]] == [64, 128, 256, 512, 1024, 2048]
    errors = [abs(one["speedup"] / p["speedup_over_first"] - 1) for one, p in zip(law["curve"], points, strict=False)]
    assert law["worst_error"] == pytest.approx(max(errors))
    half = law["gpus_at_half_efficiency"]
    assert amdahl_speedup(law["serial_fraction"], half / 64) / (half / 64) == pytest.approx(0.5)
    page = page_of(found)
    assert "Efficiency over the first 64 GPUs" in page
    assert "which is too small for this step" in page


def test_where_one_gpu_can_do_the_step_the_law_is_of_it(scaled: Scaling) -> None:
    assert scaled.one_gpu_fits
    assert "too small" not in page_of(scaled)
    assert "memory large enough" not in page_of(scaled)


def test_one_count_makes_no_law() -> None:
    found = scale(GPT2, Job(1024, 64), NODE, Layout(dp_shard=8), gpus=(8,))
    document, page = found.to_dict(), page_of(found)
    assert document["amdahl"]["over_first"] is None
    assert document["amdahl"]["serial_fraction"] is not None  # Karp and Flatt's of that count
    assert page.count("One count of GPUs makes no law") == 2
    assert "Amdahl's law" not in page
    assert "Gustafson's law" not in page


def test_the_parts_add_up_to_the_serial_fraction(scaled: Scaling) -> None:
    serial = scaled.serial
    assert serial is not None
    time = serial.prediction.time
    parts = {part.name: part for part in serial.parts()}
    assert sum(part.serial_fraction for part in parts.values()) == pytest.approx(time.serial_fraction)
    even = serial.one_gpu_seconds / serial.gpus
    assert sum(part.seconds for part in parts.values()) == pytest.approx(time.step_seconds - even)
    assert parts["exposed_communication"].seconds == time.exposed_communication_seconds
    assert parts["bubble"].seconds == time.bubble_seconds
    exposed = sum(row.exposed_seconds for row, _ in serial.exchanges())
    assert exposed == pytest.approx(time.exposed_communication_seconds, rel=0.02)


def test_an_optimizer_that_is_not_sharded_is_serial(plain: Scaling, pipeline: Scaling) -> None:
    """DDP's ranks each update all: but for the share that one GPU's would be, that is serial. ZeRO's update a share."""
    assert plain.serial is not None
    assert pipeline.serial is not None
    update = plain.serial.prediction.time.optimizer_seconds
    found = {part.name: part.seconds for part in plain.serial.parts()}
    assert found["optimizer"] == pytest.approx(update * (1 - 1 / plain.serial.gpus))
    sharded = {part.name: part.seconds for part in pipeline.serial.parts()}
    assert sharded["optimizer"] < 0.2 * float(pipeline.serial.prediction.alone.optimizer_seconds)


def _cuts(scaled: Scaling) -> dict[str, Cut]:
    return {cut.name: cut for cut in scaled.cuts if isinstance(cut, Cut)}


def test_cuts_are_no_slower_than_what_they_bound(scaled: Scaling) -> None:
    serial, cuts = scaled.serial, _cuts(scaled)
    assert serial is not None
    step = serial.prediction.time.step_seconds
    for name in ("hide", "bucket", "links"):
        assert cuts[name].step_seconds < step
        assert cuts[name].serial_fraction < serial.fraction(step)
    assert cuts["hide"].step_seconds < min(cuts["bucket"].step_seconds, cuts["links"].step_seconds)
    for cut in cuts.values():
        assert cut.times_faster == pytest.approx(step / cut.step_seconds)


def test_what_rounding_leaves_of_a_part_is_nothing(nanum: Run) -> None:
    """The optimizer of ZeRO-3 is shared evenly: what stays of it is a sum's rounding."""
    words = ("scale", "llama-3.1-8b", "1x8xh100-sxm", "--gpus", "8")
    parts = json.loads(nanum(*words, "--json").stdout)["serial"]["parts"]
    assert {part["part"]: part["seconds"] for part in parts}["optimizer"] == 0
    assert "0.00 ns" not in nanum(*words).stdout


def test_links_that_are_free_leave_nothing_exposed(scaled: Scaling) -> None:
    serial = scaled.serial
    assert serial is not None
    free = replace(serial.prediction, cluster=faster(serial.prediction.cluster, 1e15, latency=0.0))
    assert free.time.exposed_communication_seconds == 0
    assert _cuts(scaled)["hide"].step_seconds == pytest.approx(free.time.step_seconds)
    assert free.time.compute_seconds == pytest.approx(serial.prediction.time.compute_seconds)


def test_a_pipelines_cuts(pipeline: Scaling) -> None:
    serial, cuts = pipeline.serial, _cuts(pipeline)
    assert serial is not None
    p = serial.prediction
    assert cuts["bubble"].step_seconds == pytest.approx(p.time.step_seconds - p.time.bubble_seconds)
    smaller = nanum_package.predict(p.model, p.job, p.cluster, replace(p.layout, micro_batch_size=1), "megatron")
    assert cuts["micro_batches"].step_seconds == smaller.time.step_seconds
    interleaved = replace(p.layout.structure, schedule="interleaved", virtual_stages=2)
    other = nanum_package.predict(p.model, p.job, p.cluster, replace(p.layout, structure=interleaved), "megatron")
    assert cuts["schedule"].step_seconds <= other.time.step_seconds
    fp8 = nanum_package.predict(p.model, replace(p.job, precision="fp8"), p.cluster, p.layout, "megatron")
    assert cuts["fp8"].step_seconds == fp8.time.step_seconds
    assert cuts["fp8"].serial_fraction == pytest.approx(fp8.time.serial_fraction)  # beside one GPU in fp8
    assert {cut.name: cut.why for cut in pipeline.cuts if isinstance(cut, Uncut)}["optimizer"] == "ZeRO-1 shards it"


@pytest.mark.parametrize(
    ("engine", "said"), [("megatron", "and less to exchange"), ("torchtitan", "as much to exchange")]
)
def test_what_fp8_exchanges(engine: str, said: str) -> None:
    """Beside split sequences Megatron gathers activations in a byte, torchtitan in two."""
    layout = Layout(tp=8, structure=Structure(tensor="sequence"))
    asked = load_model("llama-3.1-8b"), Job(8192, 64), NODE, layout
    scaled = scale(*asked, engine, gpus=[8])
    assert _cuts(scaled)["fp8"].what.endswith(said)


@pytest.mark.parametrize(
    ("fractions", "said"),
    [
        ([0.004, 0.003, 0.001], "It falls from 0.0040 to 0.0010"),
        ([None, 0.001, 0.002, 0.004], "It grows from 0.0010 to 0.0040"),
        ([-0.0006, 0.0009, 0.0005, 0.0003], ""),  # grows, and then falls: neither is said
    ],
)
def test_a_trend_is_told_where_there_is_one(fractions: list[float | None], said: str) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    _trend([{"serial_fraction": fraction} for fraction in fractions], console)
    told = console.export_text()
    assert told.startswith(said) if said else told == ""


def test_gradients_in_half_their_bytes(pipeline: Scaling) -> None:
    """Megatron reduces fp32: half the bytes are what links of twice the speed take as long for, but of gradients."""
    cuts = _cuts(pipeline)
    assert pipeline.serial is not None
    step = pipeline.serial.prediction.time.step_seconds
    assert cuts["links"].step_seconds < cuts["half_gradients"].step_seconds < step


def test_an_optimizer_that_can_be_sharded(plain: Scaling) -> None:
    assert plain.serial is not None
    p = plain.serial.prediction
    layout = replace(p.layout, dp_replicate=1, dp_shard=p.layout.dp_replicate, structure=Structure(zero=1))
    sharded = nanum_package.predict(p.model, p.job, p.cluster, layout, "torch")
    assert _cuts(plain)["optimizer"].step_seconds == sharded.time.step_seconds


def test_links_whose_exchanges_were_measured_are_faster_as_a_whole() -> None:
    grid = Grid(("bytes",), ((1e3, 1e9),), (1e-4, 1e-1), (1e-4, 1e-1), (1e-4, 1e-1), 5, "measured", "here")
    measured = replace(NODE, measured=Measured(exchanges=(Exchange("all_reduce", 8, 1, grid),)))
    found = _scaled(
        "torch", Layout(dp_replicate=8, micro_batch_size=32, structure=Structure(zero=0)), measured, gpus=(8,)
    )
    cuts = _cuts(found)
    assert found.serial is not None
    time = found.serial.prediction.time
    assert "bucket" not in cuts
    saved = time.step_seconds - cuts["links"].step_seconds
    assert 0.4 * time.exposed_communication_seconds < saved <= time.exposed_communication_seconds


def test_the_best_layout_for_each_count() -> None:
    job = Job(1024, 64)
    found = scale(GPT2, job, NODE, gpus=(4, 8))
    p = found.strong.predictions[0]
    best = nanum_package.plan(GPT2, job, p.cluster, top=1).best[0]
    assert p.layout == best.layout
    assert p.time.step_seconds == best.time.step_seconds
    alone = {point.one_gpu_seconds for point in found.strong.points}
    assert alone == {min(p.one_gpu_seconds for p in found.strong.predictions)}


def test_counts_that_are_no_points_say_why() -> None:
    """Of one node as a cluster, whose batch of 256 the weak form grows beyond it."""
    found = _scaled("torch", Layout(structure=Structure(zero=0)), NODE, 256, gpus=(8, 12, 24, 512))
    why = {(each.gpus, each.form): each.why for each in found.strong.rejected + found.weak.rejected}
    assert set(why) == {(12, "strong"), (12, "weak"), (24, "strong"), (512, "strong")}
    assert why[12, "weak"] == ("the GPUs are not whole nodes of 8",)
    assert why[24, "strong"] == (
        "micro_batch_size·dp_replicate·dp_shard = 1·24·1 = 24 does not divide global_batch_size=256",
    )
    assert found.fits


def test_a_question_without_any_possible_count() -> None:
    with pytest.raises(Refused) as refused:
        _scaled("torchtitan", Layout(tp=5), gpus=(8, 12))
    assert refused.value.reasons == (
        "tp 5 ranks do not divide the GPUs",
        "on 12 GPUs: the GPUs are not whole nodes of 8",
        "tp=5 does not divide num_attention_heads=12",
        "tp=5 does not divide intermediate_size=3072",
    )
    with pytest.raises(Refused, match="0 GPUs: must be from 1"):
        _scaled("torchtitan", Layout(), gpus=(0, 8))
    with pytest.raises(Refused, match="no count"):
        _scaled("torchtitan", Layout(), gpus=())


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_page_fits_80_columns(scaled: Scaling) -> None:
    document = scaled.to_dict()
    console = Console(file=io.StringIO(), width=80)
    print_scaling(document, console)
    assert isinstance(console.file, io.StringIO)
    page = console.file.getvalue()
    assert max(map(len, page.splitlines())) <= 80
    said = re.search(r"Amdahl's law through the points: s = ([-+.\de]+)", page)
    assert said is not None
    assert float(said[1].rstrip(",.")) == pytest.approx(document["amdahl"]["serial_fraction"], rel=5e-3, abs=5e-5)
    for point in document["points"]:
        assert f"{point['efficiency']:.1%}" in page
        assert format_seconds_between(point["step_seconds_low"], point["step_seconds_high"]) in page
    for cut in document["cuts"]:
        assert cut["what"].split()[0] in page
        assert format_seconds(cut["step_seconds"]) in page


def test_the_narrowest_terminal_gets_whole_words(scaled: Scaling) -> None:
    """Of the headings of each point, and of what each cut is."""
    document = scaled.to_dict()
    console = Console(file=io.StringIO(), width=40)
    print_scaling(document, console)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= 40
    page = " ".join(" ".join(lines).split())
    for cut in document["cuts"]:
        assert cut["what"] in page
    for point in document["points"]:
        assert f"efficiency {point['efficiency']:.1%}; over the first" in page


@pytest.mark.parametrize(
    ("argv", "code", "gpus"),
    [
        (["--gpus", "16,8"], 0, [8, 16]),
        (["--zero", "0", "--engine", "torch"], 0, [1, 2, 4, 8]),
        (["--dp-shard", "2"], 0, [2, 4, 8]),
        (["--dp-replicate", "4", "--dp-shard", "2"], 0, [2, 4, 8]),
        (["--dp-replicate", "1", "--dp-shard", "8"], 0, [1, 2, 4, 8]),
    ],
)
def test_the_command(nanum: Run, argv: list[str], code: int, gpus: list[int]) -> None:
    done = nanum("scale", "gpt2", "1x8xh100-sxm", "--seq-len", "256", "--global-batch-size", "64", *argv, "--json")
    assert done.returncode == code, done.stderr
    assert [point["gpus"] for point in json.loads(done.stdout)["points"]] == gpus


def test_no_count_that_fits_is_bad_news(nanum_process: Run) -> None:
    done = nanum_process("scale", "llama-3.1-70b", "1x8xh100-sxm", "--gpus", "4,8")
    assert done.returncode == 1
    assert "It fits on none of these counts of GPUs" in done.stdout
    assert "4, 8 GPUs: more memory than the device has" in done.stdout


@pytest.mark.parametrize(
    ("argv", "reasons"),
    [
        (
            ["--gpus", "0,x", "--tp", "5"],
            ["--gpus '0' must be at least 1", "--gpus 'x' is not a whole number", "tp=5 does not divide"],
        ),
        (["--best", "--tp", "2", "--no-sp"], ["--best seeks a layout for each count of GPUs: leave out --tp, --no-sp"]),
        (["--engine", "any"], ["--engine any is for plan, which compares engines: name one"]),
        (["--dp-replicate", "4", "--dp-shard", "4"], ["dp_replicate·dp_shard = 16, but the cluster has 8 GPUs"]),
        (["--gpus", "12,20"], ["on 12, 20 GPUs: the GPUs are not whole nodes of 8"]),
        (["--tp", "16"], ["tp 16 ranks do not divide the GPUs", "tp=16 does not divide num_attention_heads=12"]),
    ],
)
def test_what_cannot_be_asked(nanum: Run, argv: list[str], reasons: list[str]) -> None:
    done = nanum("scale", "gpt2", "1x8xh100-sxm", *argv)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for reason in reasons:
        assert reason in done.stderr


def flags_in(help: str) -> set[str]:
    return set(re.findall(r"--[a-z0-9-]+", help.split("Options:")[1]))


def test_all_flags_of_a_layout_are_held_but_one(nanum: Run) -> None:
    predict, scale = (flags_in(nanum(command, "--help").stdout) for command in ("predict", "scale"))
    assert scale - predict == {"--gpus", "--best"}
    assert predict - scale == {"--observed", "--output", "--force"}  # which make a machine of a step
    assert {"--mtp-layers", "--first-stage-layers", "--dispatcher", "--hpz", "--recompute-every"} <= scale


@pytest.mark.parametrize(
    "words",
    [
        "llama-3.1-8b 1x8xh100-sxm --engine megatron --pp 4 --first-stage-layers 7 --last-stage-layers 7",
        "mixtral-8x7b 4x8xh100-sxm --engine megatron --ep 8 --dispatcher flex --recompute full",
    ],
    ids=["uneven ends", "tokens by nodes"],
)
def test_the_largest_point_is_what_predict_says_of_the_same_flags(nanum: Run, words: str) -> None:
    last = json.loads(nanum("scale", *words.split(), "--json").stdout)["points"][-1]
    predicted = json.loads(nanum("predict", *words.split(), "--json").stdout)
    assert last["layout"] == predicted["layout"]
    assert last["step_seconds"] == predicted["time"]["step_seconds"]


def test_best_leaves_no_room_for_any_flag_of_a_layout(nanum: Run) -> None:
    done = nanum("scale", "llama-3.1-8b", "1x8xh100-sxm", "--best", "--offload", "params", "--hpz")
    assert done.returncode == 2
    assert "leave out --hpz, --offload" in done.stderr
