"""The lesson's measurements, its ZeRO table, its answers to beliefs, and its two languages."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from conftest import nothing, printed, widest

from nanum import lesson
from nanum.errors import Refused
from nanum.lesson import arithmetic, communication, ledger, memory, misconceptions, scaling
from nanum.lesson.words import TEXTS, tenths_of_gigabytes

SOURCE = Path(lesson.__file__).resolve().parents[2]
ENGLISH, KOREAN = TEXTS["en"], TEXTS["ko"]
ACTIVATION_BYTES = 4 * 2048 * 4096 * 2  # b s h in bf16


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
def test_every_text_is_printed_and_fits_the_page(lang: str, whole: dict[str, Any], said: set[str]) -> None:
    text = "".join(printed(lang, part, document) for part, document in whole.items())
    assert widest(text) <= 80
    assert "28,000,000,000" in text
    assert "57.8 GB" in text
    elsewhere = {"unknown", "no_torch", "B.progress", "C.progress", "A.progress", "refused", "between"}
    by_chance = {"B.quiet", "B.noisy", "B.why_slower", "B.why_faster", "B.why_noisy", "B.doubling", "B.doubling_noisy"}
    by_chance |= {"M.twice_the_gpus", "M.twice_the_gpus_noisy", "C.allocator", "C.workspace", "C.refused"}
    by_chance |= {"C.peak_optimizer", "C.peak_backward", "C.moment.optimizer", "C.moment.backward"}
    by_chance |= {"tag.measured", "tag.derived"}
    by_chance |= {"processor", "processor.one_thread", "processor.threads"}
    others = {key for key in ENGLISH if key[:2] in ("D.", "E.")}  # of parts that have their own test
    assert set(ENGLISH) - said <= elsewhere | by_chance | others


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
