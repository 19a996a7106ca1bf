"""The lesson: its figures to the printed digit, its measurements, its two languages, and how it ends without torch."""

from __future__ import annotations

import io
import json
import os
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nanum import lesson
from nanum.errors import Refused
from nanum.lesson import arithmetic, communication, ledger, measured, memory, misconceptions, scaling
from nanum.lesson.arithmetic import Dimensions
from nanum.lesson.page import Page
from nanum.lesson.text_en import TEXT as ENGLISH
from nanum.lesson.text_ko import TEXT as KOREAN
from nanum.lesson.words import Words, gigabytes, tenths_of_gigabytes

SOURCE = Path(lesson.__file__).resolve().parents[2]
ACTIVATION_BYTES = 4 * 2048 * 4096 * 2  # b s h in bf16


def nothing(done: int, total: int) -> None:
    """Progress that nobody watches."""


@pytest.fixture(scope="module")
def part_a() -> dict[str, Any]:
    return communication.part_a()


@pytest.fixture(scope="module")
def part_b() -> dict[str, Any]:
    pytest.importorskip("torch")
    return scaling.part_b(nothing, device="cpu", quick=True)


@pytest.fixture(scope="module")
def part_c() -> dict[str, Any]:
    pytest.importorskip("torch")
    return memory.part_c(nothing, device="cpu")


@pytest.fixture(scope="module")
def whole(part_a: dict[str, Any], part_b: dict[str, Any], part_c: dict[str, Any]) -> dict[str, Any]:
    parts = {"A": part_a, "B": part_b, "C": part_c}
    return {**parts, "misconceptions": misconceptions.part_m(parts)}


def printed(lang: str, part: str, document: dict[str, Any], width: int = 80) -> str:
    page = io.StringIO()
    lesson.PRINTERS[part](document, Page(Words(lang), Console(file=page, width=width, highlight=False)))
    return page.getvalue()


# Part A


def test_the_arithmetic_by_the_lessons_convention(part_a: dict[str, Any]) -> None:
    figures = {way: part_a[way]["bytes"] for way in communication.WAYS}
    assert figures == {"data_parallel": 28 * 10**9, "tensor_parallel": 4_294_967_296, "pipeline": 67_108_864}
    assert all(type(count) is int for count in figures.values())
    assert [gigabytes(count) for count in figures.values()] == ["28.0", "4.29", "0.067"]
    assert [part_a[way]["messages"] for way in figures] == [1, 64, 1]


def test_the_real_model_beside_the_nominal_one(part_a: dict[str, Any]) -> None:
    assert part_a["parameters"] == {"nominal": 7 * 10**9, "model": "llama-2-7b", "real": 6_738_415_616}
    assert part_a["real_data_parallel_bytes"] == 4 * 6_738_415_616


def test_what_each_way_is_proportional_to(part_a: dict[str, Any]) -> None:
    kinds = {
        way: {dimension: grown["kind"] for dimension, grown in part_a[way]["growth"].items()}
        for way in communication.WAYS
    }
    named = ("hidden_size", "micro_batch_size", "num_hidden_layers")
    assert kinds == {
        "data_parallel": dict(zip(named, ("square", "independent", "proportional"), strict=True)),
        "tensor_parallel": dict(zip(named, ("proportional", "proportional", "proportional"), strict=True)),
        "pipeline": dict(zip(named, ("proportional", "proportional", "independent"), strict=True)),
    }
    # V h embeddings twice, 4 h^2 + 3 h f + 2 h a layer, and a last norm of h, with h and f twice as large
    larger = 2 * 32_000 * 8192 + 32 * (4 * 8192**2 + 3 * 8192 * 22_016 + 2 * 8192) + 8192
    assert part_a["data_parallel"]["growth"]["hidden_size"]["ratio"] == larger / 6_738_415_616


@pytest.mark.parametrize(
    ("ratio", "kind"), [(1.0, "independent"), (1.5, "between"), (2.0, "proportional"), (4.0, "square")]
)
def test_growth_is_named_by_its_exponent(ratio: float, kind: str) -> None:
    assert arithmetic.Growth("layers", ratio).kind == kind


def test_what_one_rank_really_sends(part_a: dict[str, Any]) -> None:
    """Against closed forms: an all-reduce passes on 2 (n - 1) / n of its payload, and a layer has 2 each way."""
    sent = {way: part_a[way]["sent"][0] for way in communication.WAYS}
    assert {row["group_size"] for row in sent.values()} == {8}
    grads_bytes = 4 * 6_738_415_616  # Megatron reduces fp32 gradients
    data = sent["data_parallel"]
    assert data["wire_bytes"] == pytest.approx(2 * 7 / 8 * grads_bytes, rel=1e-3)
    assert data["wire_bytes_by_phase"].get("forward", 0) == pytest.approx(0, abs=1e6)
    layers_bytes = 2 * 32 * (2 * 7 / 8 * ACTIVATION_BYTES)
    tensor = sent["tensor_parallel"]["wire_bytes_by_phase"]
    assert layers_bytes <= tensor["forward"] < 1.05 * layers_bytes  # and the embedding's and the loss's own
    assert layers_bytes <= tensor["backward"] < 1.05 * layers_bytes
    assert sent["tensor_parallel"]["calls"] >= 4 * 32
    assert sent["pipeline"]["wire_bytes_by_phase"] == {"forward": ACTIVATION_BYTES, "backward": ACTIVATION_BYTES}
    assert sent["pipeline"]["calls"] == 2


def test_the_loose_counting_is_led_to_what_is_sent(part_a: dict[str, Any]) -> None:
    found = part_a["reconciled"]
    data = part_a["data_parallel"]["sent"][0]
    assert found["grad_bytes_per_parameter"] == 4  # fp32
    assert found["ring_factor"] == pytest.approx(2 * 7 / 8, rel=1e-6)
    assert data["wire_bytes"] == pytest.approx(2 * 7 / 8 * 4 * 6_738_415_616, rel=1e-6)
    layers_bytes = 2 * 7 / 8 * 4_294_967_296
    assert found["tensor_layers_bytes"] == pytest.approx(layers_bytes, rel=1e-6)
    # the embedding's output by the same ring, and three numbers a token (of fp32) at most for the loss
    ends_bytes = 2 * 7 / 8 * ACTIVATION_BYTES
    assert ends_bytes < found["tensor_ends_bytes"] <= ends_bytes + 2 * 7 / 8 * 3 * 4 * 4 * 2048
    assert "28.0 and 4.29 GB" in (text := " ".join(printed("en", "A", part_a).split()))
    assert "= 1.75 times that: 47.2 GB" in text
    assert "as much again: 15.3 GB" in text


def test_a_borrowed_efficiency_is_not_called_measured(part_a: dict[str, Any]) -> None:
    assert part_a["links"]["in_node"]["efficiency"]["tag"] == "assumed"
    text = " ".join(printed("en", "A", part_a).split())
    assert "80% of it among 8 GPUs, assumed, borrowed from h200-sxm" in text
    measured_link = part_a["links"]["in_node"] | {"efficiency": {"value": 0.8, "tag": "measured", "source": "nccl"}}
    text = printed("en", "A", part_a | {"links": part_a["links"] | {"in_node": measured_link}}, width=1000)
    assert "80% of it among 8 GPUs, measured)" in text
    assert "네트워크(한 방향 50.0 GB/s, 가정한 값" in printed("ko", "A", part_a, width=1000)


def test_messages_cost_more_between_nodes(part_a: dict[str, Any]) -> None:
    for way in communication.WAYS:
        in_node, between = part_a[way]["sent"]
        assert in_node["wire_bytes"] == between["wire_bytes"]
        assert in_node["link"] != between["link"]
        assert between["seconds"] > in_node["seconds"] > 0


def test_one_step_of_the_same_sequences(part_a: dict[str, Any]) -> None:
    same = part_a["same_step"]
    assert same["sequences"] == 32
    for way, micro_batches in (("data_parallel", 1), ("tensor_parallel", 8), ("pipeline", 8)):
        once = part_a[way]["sent"][0]["wire_bytes"]
        assert same["ways"][way]["in_node"]["wire_bytes"] == pytest.approx(micro_batches * once, rel=0.01)
    steps = {way: places["between_nodes"]["step_seconds"] for way, places in same["ways"].items()}
    assert steps[same["fastest"]["between_nodes"]] == min(steps.values())


def test_the_bubble_is_that_of_equal_stages(part_a: dict[str, Any]) -> None:
    fractions = {row["num_microbatches"]: row["fraction"] for row in part_a["bubble"]}
    assert fractions == pytest.approx({m: (8 - 1) / (m + 8 - 1) for m in fractions})
    assert min(fractions) == 1
    assert max(fractions) == 64


def test_the_dear_exchange_on_the_dear_link_is_slower(part_a: dict[str, Any]) -> None:
    placed = {place["placement"]: place for place in part_a["overlaid"]["placements"]}
    steps = {name: place["time"]["step_seconds"] for name, place in placed.items()}
    assert steps["tp_in_node"] < min(steps["tp_over_two_nodes"], steps["tp_over_four_nodes"])
    wire = {name: [sent["wire_bytes"] for sent in place["sent"].values()] for name, place in placed.items()}
    assert wire["tp_in_node"] == wire["tp_over_two_nodes"] == wire["tp_over_four_nodes"]


def test_a_hidden_size_that_the_model_cannot_be_resized_to() -> None:
    with pytest.raises(ValueError, match="hidden_size 5000 is not a multiple"):
        ledger.resized(Dimensions(hidden_size=5000))


# Part B


def steady(efficiency: dict[int, float], base_seconds: float = 1.0) -> dict[str, Any]:
    """What the measurement would say of shares that run at these efficiencies, every time."""
    device = {"kind": "cpu", "name": "a core", "threads": 1, "torch": "2"}
    shares = [
        {"n": n, "rows": 4096 // n, "seconds": [base_seconds / (n * each)] * 5}
        for n, each in {1: 1.0, **efficiency}.items()
    ]
    return {"device": device, "job": {}, "repeats": 5, "shares": shares}


def test_the_serial_part_is_added_whole() -> None:
    part = scaling.from_samples(steady({2: 1.0, 4: 0.9, 8: 0.8, 16: 0.7, 32: 0.5}, base_seconds=0.25))
    assert part["base_seconds"] == 0.25
    rows = {row["serial_fraction"]: row for row in part["rows"]}
    assert list(rows) == [0.0, 0.02, 0.05, 0.10, 0.20]
    # 5 % of 250 ms stays; 95 % takes 95 % of the measured 32nd, which took twice its due: 12.5 + 0.95 x 15.625 ms
    assert rows[0.05]["speedup"]["32"] == pytest.approx(250 / (12.5 + 0.95 * 15.625))
    assert rows[0.0]["speedup"]["32"] == pytest.approx(16)
    assert [row["limit"] for row in rows.values()] == [None, 50, 20, 10, pytest.approx(5)]
    assert part["device"] == "cpu (a core, 1 thread)"


def test_the_ideal_table_is_amdahls() -> None:
    part = scaling.from_samples(steady(dict.fromkeys((2, 4, 8, 16, 32), 1.0)))
    assert part["rows"] == part["ideal"]
    speedup = {row["serial_fraction"]: row["speedup"] for row in part["ideal"]}
    assert f"{speedup[0.05]['32']:.2f}" == "12.55"
    assert f"{speedup[0.2]['32']:.2f}" == "4.44"
    assert part["doubling"]["ideal"] == pytest.approx(0.109375 / 0.0796875)
    assert f"{part['doubling']['lesson']:.2f}" == "1.38"


@pytest.mark.parametrize(("jitter", "noisy"), [(0.01, False), (0.5, True)])
def test_a_noisy_machine_is_said_to_be_one(jitter: float, noisy: bool) -> None:
    samples = steady(dict.fromkeys((2, 4, 8, 16, 32), 1.0))
    samples["job"] = {"layers": 4, "hidden": 512, "rows": 4096, "dtype": "float32"}
    samples["shares"][3]["seconds"] = [1 / 8, (1 + jitter) / 8, (1 - jitter) / 8, (1 + jitter) / 8, (1 - jitter) / 8]
    part = scaling.from_samples(samples)
    assert part["noise"]["at"] == 8
    assert part["noise"]["noisy"] is noisy
    assert ("too noisy" in printed("en", "B", part)) is noisy
    assert ("잡음이 너무 컸다" in printed("ko", "B", part, width=400)) is noisy


def test_noise_is_no_conclusion() -> None:
    """The doubling that noisy samples make of an ideal machine is told with its spread, after the law's."""
    samples = steady(dict.fromkeys((2, 4, 8, 16, 32), 1.0))
    samples["job"] = {"layers": 4, "hidden": 512, "rows": 4096, "dtype": "float32"}
    samples["shares"][-1]["seconds"] = [each / 32 for each in (0.5, 0.8, 0.8, 1.2, 1.5)]  # median 0.8, quartiles to 1.2
    part = scaling.from_samples(samples)
    doubling = part["doubling"]
    assert doubling["measured"] == pytest.approx((0.05 + 0.95 / 16) / (0.05 + 0.95 * 0.8 / 32))
    slowest = (0.05 + 0.95 / 16) / (0.05 + 0.95 * 1.2 / 32)
    assert doubling["measured_range"] == pytest.approx([slowest, doubling["measured"]])
    text = printed("en", "B", part, width=1000)
    assert "buys 1.37 times by the law" in text
    assert "The 1.48 times measured here are not to be relied on" in text
    assert "spread over up to 50%, leave room from 1.28 to 1.48" in text
    assert f"with 16 GPUs, buys {(0.05 + 0.95 / 16) / (0.02 + 0.98 / 16):.2f} times by the law" in text
    answer = misconceptions._twice_the_gpus(part)
    assert answer["noise"]["noisy"]
    assert answer["ideal_speedup"] == part["ideal"][2]["speedup"]["32"]


@pytest.mark.parametrize("noisy", [False, True])
def test_the_first_belief_is_answered_by_the_law_where_samples_are_noisy(whole: dict[str, Any], noisy: bool) -> None:
    answers = whole["misconceptions"]
    twice = answers["twice_the_gpus"] | {
        "speedup": 9.87,
        "ideal_speedup": 12.55,
        "noise": {"worst_spread": 0.3, "noisy": noisy},
    }
    text = " ".join(printed("en", "misconceptions", answers | {"twice_the_gpus": twice}).split())
    assert ("32 GPUs run 12.55 times" if noisy else "32 GPUs run 9.87 times") in text
    assert ("too noisy to rely on" in text) is noisy
    assert "30%" in text


def test_the_shares_are_really_measured(part_b: dict[str, Any]) -> None:
    assert part_b["device"].startswith("cpu (")
    assert [share["n"] for share in part_b["shares"]] == [1, 2, 4, 8, 16, 32]
    assert [share["rows"] * share["n"] for share in part_b["shares"]] == [part_b["job"]["rows"]] * 6
    for share in part_b["shares"]:
        low, high = share["quartile_seconds"]
        assert 0 < share["range_seconds"][0] <= low <= share["median_seconds"] <= high <= share["range_seconds"][1]
    for row in part_b["rows"]:
        assert set(row["speedup"]) == {"2", "4", "8", "16", "32"}
        assert row["limit"] is None or max(row["speedup"].values()) < row["limit"]


# Part C


def test_training_keeps_four_times_the_parameters(part_c: dict[str, Any]) -> None:
    measured_part = part_c["measured"]
    assert measured_part["model"]["parameters"] == 12 * (2048 * 2048 + 2048)
    assert measured_part["params_bytes"] == measured_part["grads_bytes"] == 201_424_896
    assert measured_part["optimizer_states_bytes"] == 402_849_792
    assert measured_part["total_bytes"] == 805_699_584
    ratio = {name: f"{value:.3f}" for name, value in measured_part["ratio"].items()}
    assert ratio == {"params": "1.000", "grads": "1.000", "optimizer_states": "2.000", "total": "4.000"}
    assert measured_part["step_counters_bytes"] == 4 * 24  # one fp32 scalar for each weight and each bias
    assert "201.4 MB" in printed("en", "C", part_c)


def test_activations_come_on_top_and_inference_has_none(part_c: dict[str, Any]) -> None:
    measured_part = part_c["measured"]
    rows_bytes = measured_part["model"]["rows"] * 2048 * 4
    # Each GELU saves its input, each next layer its output, and the loss the last one; the batch itself is not counted.
    assert measured_part["activations_bytes"] == 24 * rows_bytes
    assert measured_part["inference_peak_bytes"] == measured_part["params_bytes"] + 2 * rows_bytes
    assert measured_part["training_peak_bytes"] > measured_part["total_bytes"]


@pytest.mark.parametrize("moment", ["optimizer", "backward"])
def test_each_ratio_says_what_it_is_over(part_c: dict[str, Any], moment: str) -> None:
    peaks = {"training_peak_bytes": 839_262_300, "inference_peak_bytes": 205_619_200, "training_peak_moment": moment}
    text = " ".join(printed("en", "C", part_c | {"measured": part_c["measured"] | peaks}).split())
    assert "839.3 MB, 4.17 times the parameters, or 4.08 times the peak without training" in text
    assert "add up to 856.0 MB, 4.25 times the parameters" in text
    assert ("33.6 MB over the total, as much as 2.0 of the 12 weight matrices" in text) is (moment == "optimizer")
    assert ("The peak was measured in the backward pass" in text) is (moment == "backward")


def test_the_zero_table() -> None:
    gpus = (1, 4, 8, 32)
    table = {kept: [arithmetic.zero_bytes_per_gpu(kept, n) for n in gpus] for kept in arithmetic.SHARDED}
    assert table == {
        "none": [112_000_000_000, 112_000_000_000, 112_000_000_000, 112_000_000_000],
        "optimizer": [112_000_000_000, 70_000_000_000, 63_000_000_000, 57_750_000_000],
        "optimizer+grads": [112_000_000_000, 49_000_000_000, 38_500_000_000, 30_625_000_000],
        "optimizer+grads+params": [112_000_000_000, 28_000_000_000, 14_000_000_000, 3_500_000_000],
    }
    assert [[tenths_of_gigabytes(count) for count in row] for row in table.values()] == [
        ["112.0", "112.0", "112.0", "112.0"],
        ["112.0", "70.0", "63.0", "57.8"],
        ["112.0", "49.0", "38.5", "30.6"],
        ["112.0", "28.0", "14.0", "3.5"],
    ]
    assert arithmetic.zero_bytes_per_gpu("optimizer+grads+params", 3) == pytest.approx(112e9 / 3)


def test_the_trade_of_memory_for_traffic() -> None:
    """ZeRO section 7: stages 0 to 2 send 2 (n - 1) / n of the gradients, stage 3 half as much again."""
    for row in memory.zero_table():
        assert row["sent"]["1"] is None
        for gpus in (4, 8, 32):
            ring_bytes = (gpus - 1) / gpus * 4 * 6_738_415_616
            sent = row["sent"][str(gpus)]
            assert sent["wire_bytes"] == pytest.approx((3 if row["stage"] == 3 else 2) * ring_bytes, rel=0.01)
            assert sent["group_size"] == gpus


def test_messages_by_buckets_and_by_parts() -> None:
    """Megatron: buckets of whole tensors to stage 1; from stage 2 a unit for each of 32 layers and the two ends."""
    none, optimizer, grads, params = (row["sent"]["8"]["calls_by_kind"] for row in memory.zero_table())
    assert list(none) == ["all_reduce"]
    assert optimizer == {"all_gather": none["all_reduce"], "reduce_scatter": none["all_reduce"]}
    assert 34 < none["all_reduce"] <= 6_738_415_616 // 40_000_000  # a bucket is 40 million elements at least
    assert grads == {"all_gather": 34, "reduce_scatter": 34}
    assert params == {"all_gather": 68, "reduce_scatter": 34}


def test_an_engine_that_refuses_a_stage_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise Refused(["not here"])

    monkeypatch.setattr(ledger, "step", refuse)
    assert memory.zero_table()[2]["sent"]["8"] == {"refused": ["not here"]}


# The beliefs


def test_each_belief_is_answered_by_the_parts(whole: dict[str, Any]) -> None:
    answers = whole["misconceptions"]
    five = next(row for row in whole["B"]["rows"] if row["serial_fraction"] == 0.05)
    assert answers["twice_the_gpus"]["speedup"] == five["speedup"]["32"]
    assert answers["memory_is_parameters"]["kept_over_params"] == 4
    assert answers["zero_is_free"]["wire_bytes"]["all"] > answers["zero_is_free"]["wire_bytes"]["none"]
    assert answers["least_volume"]["bytes"]["pipeline"] == ACTIVATION_BYTES


def test_a_real_cluster_is_worse_than_the_arithmetic() -> None:
    real = misconceptions.a_real_cluster()
    assert real["arithmetic_seconds"] * 32 == pytest.approx(real["one_gpu_seconds"])
    assert real["times_worse"] > 1
    assert real["speedup"] * real["times_worse"] == pytest.approx(32)
    for what in ("exposed_communication_seconds", "latency_seconds", "bubble_seconds"):
        assert 0 < real[what] < real["predicted_seconds"]
    assert 0 <= real["imbalance_seconds"] < real["bubble_seconds"]
    assert (real["sequences"], real["tokens"]) == (4 * 2 * 16, 4 * 2 * 16 * 2048)  # micro-batch, dp, micro-batches


# Languages and pages


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_both_languages_say_the_same_things() -> None:
    assert list(ENGLISH) == list(KOREAN)
    assert {key: fields(text) for key, text in ENGLISH.items()} == {key: fields(text) for key, text in KOREAN.items()}
    untranslated = [key for key, text in KOREAN.items() if text.isascii()]
    assert untranslated == []


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_every_text_is_printed_and_fits_the_page(
    lang: str, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[str] = set()
    say = Words.__call__

    def noted(words: Words, key: str, **values: object) -> str:
        used.add(key)
        return say(words, key, **values)

    monkeypatch.setattr(Words, "__call__", noted)
    text = "".join(printed(lang, part, document) for part, document in whole.items())
    console = Console(width=200)
    assert max(console.measure(line).maximum for line in text.splitlines()) <= 80
    assert "28,000,000,000" in text
    assert "57.8 GB" in text
    elsewhere = {"later", "unknown", "no_torch", "B.progress", "C.progress", "A.progress", "refused", "between"}
    by_chance = {"B.quiet", "B.noisy", "B.why_slower", "B.why_faster", "B.why_noisy", "B.doubling", "B.doubling_noisy"}
    by_chance |= {"M.twice_the_gpus", "M.twice_the_gpus_noisy", "C.allocator", "C.workspace", "C.refused"}
    by_chance |= {"C.peak_optimizer", "C.peak_backward", "C.moment.optimizer", "C.moment.backward"}
    by_chance |= {"tag.measured", "tag.derived"}
    by_chance |= {"processor", "processor.one_thread", "processor.threads"}
    assert set(ENGLISH) - used <= elsewhere | by_chance


def test_the_allocators_workspace_is_told_apart(part_c: dict[str, Any]) -> None:
    """As on CUDA, where the lesson's 210.5 MB of gradients are 201.4 and a workspace."""
    allocator = {
        "params_bytes": 201_424_896,
        "grads_bytes": 210_500_000,
        "optimizer_states_bytes": 402_849_792,
        "total_bytes": 814_774_688,
        "matmul_workspace_bytes": 9_075_104,
    }
    document = {**part_c, "measured": {**part_c["measured"], "allocator": allocator}}
    text = printed("en", "C", document)
    assert "210.5 MB" in text
    assert "9.1 MB of matrix-multiply workspace" in " ".join(text.split())
    assert "814.8 MB" in text


# How it is asked, and how it ends


def test_json_is_one_document_and_finite(whole: dict[str, Any]) -> None:
    document = json.loads(json.dumps(whole, allow_nan=False))
    assert list(document) == ["A", "B", "C", "misconceptions"]
    assert {"base_seconds", "device", "rows"} <= set(document["B"])
    assert {"params_bytes", "grads_bytes", "optimizer_states_bytes", "total_bytes", "ratio"} <= set(
        document["C"]["measured"]
    )
    assert [row["sharded"] for row in document["C"]["zero"]] == list(arithmetic.SHARDED)
    assert set(document["C"]["zero"][0]["bytes_per_gpu"]) == {"1", "4", "8", "32"}


@pytest.mark.parametrize("part", ["D", "E"])
def test_later_parts_are_refused(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Refused, match=f"part {part} of the lesson belongs to a later release"):
        lesson.run(("A", part))
    assert capsys.readouterr().out == ""
    with pytest.raises(Refused, match="A, B, C"):
        lesson.document((part,))


def test_every_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused) as refused:
        lesson.run(("X", "D", "Y"), lang="fr")
    asked = ("lang=fr is not", "X is not", "part D", "Y is not")
    assert len(refused.value.reasons) == len(asked)
    assert all(reason.startswith(start) for reason, start in zip(refused.value.reasons, asked, strict=True))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Refused) as refused:
        lesson.document(("D", "B"))
    assert ["torch" in reason for reason in refused.value.reasons] == [False, True]


def test_what_is_refused_is_said_as_by_every_command() -> None:
    command = [sys.executable, "-m", "nanum", "lesson", "D", "x\n", "--lang", "fr"]
    done = subprocess.run(command, capture_output=True, text=True, env=measured._environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 3
    assert all(line.startswith("nanum: ") for line in done.stderr.splitlines())


def test_parts_in_any_order_and_case_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert lesson.run(("a", "A")) == 0
    assert capsys.readouterr().out.count("A. What is exchanged") == 1


def test_without_torch_the_arithmetic_is_printed_and_the_rest_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Refused) as refused:
        lesson.run(())
    assert "28.0 GB" in capsys.readouterr().out
    assert ["pip install 'nanum[torch]'" in reason for reason in refused.value.reasons] == [True, True]
    with pytest.raises(Refused, match="설치되어 있지 않다"):
        lesson.run(("B",), "ko", json=True)
    assert capsys.readouterr().out == ""


def test_a_torch_that_does_not_import_is_told_by_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is broken')", encoding="utf-8")
    monkeypatch.setattr(measured, "torch_is_missing", lambda: False)
    monkeypatch.setattr(
        measured, "_environment", lambda: {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}"}
    )
    with pytest.raises(Refused, match=r"nanum\[torch\].*libtorch is broken"):
        measured.bench(["memory"], nothing)


def test_a_device_that_is_not_there_is_refused() -> None:
    torch = pytest.importorskip("torch")
    absent = "mps" if torch.cuda.is_available() else "cuda"
    with pytest.raises(Refused, match=f"device={absent} is not available"):
        measured.bench(["memory", "--device", absent], nothing)


def test_a_measurement_that_fails_is_no_refusal() -> None:
    pytest.importorskip("torch")
    with pytest.raises(RuntimeError, match="--seconds"):
        measured.bench(["amdahl", "--seconds", "soon"], nothing)


def test_the_measurement_speaks_json_and_reports_progress() -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "nanum.live.bench", "amdahl", "--quick", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=measured._environment())
    assert json.loads(done.stdout)["repeats"] == 3
    assert done.stderr.splitlines()[-1] == "progress 3 3"
