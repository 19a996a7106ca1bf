"""Part D of the lesson: its document's arithmetic, what is said of it, and a real run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from conftest import nothing, printed
from test_documents import covers, documented, leaves

from nanum import processes
from nanum.lesson import data_parallel
from nanum.lesson.data_parallel import EXCHANGES, QUICK, Divided

DEVICE = {"kind": "cpu", "name": "a core", "threads": 1, "torch": "2"}
PARAMETERS = 2 * 2000 * 512 + 2 * (4 * 512**2 + 3 * 512 * 1408 + 2 * 512) + 512


# Part D from samples that are made up

Parts = tuple[float, float, float]  # forward, backward, optimizer


def step(parts: Parts) -> dict[str, float]:
    found = dict(zip(("forward_seconds", "backward_seconds", "optimizer_seconds"), parts, strict=True))
    return found | {"forward_cpu_seconds": parts[0]}


def sampled(
    steps: dict[str, Parts], all_reduce: float, *, ranks: Sequence[int] = (1, 2), jitter: Sequence[float] = (1.0,) * 9
) -> dict[str, Any]:
    """What `nanum.live.rounds` would say: rounds as long as their jitter; the first rank is the slowest."""
    of = {"one": 1, "share": 1, **{f"{n} ranks": n for n in ranks[1:-1]}, **dict.fromkeys(EXCHANGES, ranks[-1])}

    def rounds(name: str) -> list[list[dict[str, float]]]:
        slowest, other = step(steps[name]), step((0.9 * steps[name][0], *steps[name][1:]))
        each = [slowest, *[other] * (of[name] - 1)]
        return [[{part: length * factor for part, length in one.items()} for one in each] for factor in jitter]

    return {
        "device": DEVICE,
        "backend": "gloo",
        "rounds": len(jitter),
        "steps": {name: rounds(name) for name in of},
        "all_reduce_seconds": [[all_reduce * factor] * ranks[-1] for factor in jitter],
    }


STEPS: dict[str, Parts] = {
    "one": (0.10, 0.20, 0.04),
    "share": (0.06, 0.11, 0.04),
    "each_tensor": (0.06, 0.19, 0.05),
    "at_once": (0.06, 0.17, 0.05),
    "buckets": (0.06, 0.14, 0.05),
    "bf16": (0.06, 0.12, 0.05),
}


def part_d(measured: dict[str, Any], cores: int = 2, ranks: Sequence[int] = (1, 2)) -> dict[str, Any]:
    return data_parallel.from_rounds(Divided(), cores, ranks, measured)


def test_the_serial_fraction_is_the_sum_of_its_parts() -> None:
    part = part_d(sampled(STEPS, 0.06))
    last = part["scaling"][-1]
    assert part["base_seconds"] == pytest.approx(0.34)
    assert last["speedup"] == pytest.approx(0.34 / 0.25)
    assert last["serial_fraction"] == pytest.approx(2 * 0.25 / 0.34 - 1)  # (1/S - 1/2) / (1/2)
    assert last["serial_fraction_range"] == pytest.approx([last["serial_fraction"]] * 2)
    half = 0.34 / 2  # t(1) (1 - 1/N)
    assert part["parts"] == pytest.approx(
        {"optimizer": 0.02 / half, "small_pieces": 0.02 / half, "exchange_and_contention": 0.04 / half}
    )
    assert sum(part["parts"].values()) == pytest.approx(last["serial_fraction"])
    assert part["amdahl"]["curve"][0]["speedup"] == pytest.approx(last["speedup"])  # the law goes through what was run
    assert [point["gpus"] for point in part["amdahl"]["curve"]] == [2**i for i in range(1, 11)]
    assert part["amdahl"]["noisy"] is False


def test_the_formula_is_of_what_was_timed_apart() -> None:
    part = part_d(sampled(STEPS, 0.15))
    share, backward, reduce = 0.21, 0.11, 0.15
    exchanges = {each["exchange"]: each for each in part["exchanges"]}
    whole = [share + reduce - backward, share + reduce]
    assert exchanges["buckets"]["predicted_seconds"] == pytest.approx(whole)
    assert exchanges["at_once"]["predicted_seconds"] == pytest.approx([whole[1]] * 2)
    assert exchanges["bf16"]["predicted_seconds"] == pytest.approx([share, share + reduce / 2])
    assert part["predicted"]["seconds"] == exchanges["buckets"]["predicted_seconds"]
    assert part["predicted"]["serial_fraction"] == pytest.approx([2 * each / 0.34 - 1 for each in whole])
    assert exchanges["at_once"]["difference"] == pytest.approx(0.28 / 0.36 - 1)
    assert exchanges["buckets"]["difference"] == 0 or exchanges["buckets"]["difference"] == pytest.approx(
        0.25 / 0.25 - 1
    )


def test_more_ranks_are_each_beside_one() -> None:
    ranks = (1, 2, 4)
    steps = {**STEPS, "2 ranks": (0.06, 0.12, 0.05)}
    part = part_d(sampled(steps, 0.06, ranks=ranks), 6, ranks)
    assert [scaled["ranks"] for scaled in part["scaling"]] == [1, 2, 4]
    assert [scaled["sequences_per_rank"] for scaled in part["scaling"]] == [8, 4, 2]
    assert part["scaling"][1]["serial_fraction"] == pytest.approx(2 * 0.23 / 0.34 - 1)
    assert part["amdahl"]["serial_fraction"] == pytest.approx((0.25 / 0.34 - 1 / 4) / (3 / 4))
    assert {each["wire_bytes"] for each in part["exchanges"]} == {6 * PARAMETERS, 3 * PARAMETERS}  # 2 · 3/4 · 4P, of 2P
    assert "Of 6 cores, 4 are used" in flat(printed("en", "D", part))


@pytest.mark.parametrize(
    ("cores", "ranks"), [(1, (1, 2)), (2, (1, 2)), (3, (1, 2)), (4, (1, 2, 4)), (12, (1, 2, 4, 8)), (64, (1, 2, 4, 8))]
)
def test_as_many_ranks_as_cores_and_at_most_eight(cores: int, ranks: tuple[int, ...]) -> None:
    assert data_parallel.ranks_measured(cores) == ranks
    assert all(Divided().sequences % n == 0 for n in ranks)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_what_is_exchanged_is_read_off_the_ledger(n: int) -> None:
    """Against the closed form 2 (N - 1) / N · 4 P; in bf16 half of it, in the messages that fp32 fills."""
    sent = {name: data_parallel.exchanged(Divided(), n, exchange) for name, exchange in EXCHANGES.items()}
    assert {each["payload_bytes"] for name, each in sent.items() if name != "bf16"} == {4 * PARAMETERS}
    assert all(each["wire_bytes"] == each["payload_bytes"] * 2 * (n - 1) // n for each in sent.values())
    assert sent["bf16"] == {"calls": sent["buckets"]["calls"], "payload_bytes": 2 * PARAMETERS} | {
        "wire_bytes": sent["buckets"]["wire_bytes"] // 2
    }
    tensors = 2 * 9 + 3  # in a layer four of attention, three of the feed-forward and two norms; and the ends
    assert sent["each_tensor"]["calls"] == tensors
    assert sent["at_once"]["calls"] == 1
    assert 1 < sent["buckets"]["calls"] < tensors


# What part D says of it


def flat(text: str) -> str:
    return " ".join(text.split())


def noisy(name: str, factors: Sequence[float]) -> dict[str, Any]:
    """The steady samples, with one variant's steps as long as `factors` say."""
    measured = sampled(STEPS, 0.06)
    measured["steps"][name] = [
        [{part: length * factor for part, length in one.items()} for one in of_round]
        for of_round, factor in zip(measured["steps"][name], factors, strict=True)
    ]
    return measured


def test_differences_that_hold_are_told() -> None:
    part = part_d(sampled(STEPS, 0.06))
    assert {each["effect"]: each["verdict"] for each in part["effects"]} == dict.fromkeys(
        ("bucketing", "overlap", "bf16"), "faster"
    )
    text = flat(printed("en", "D", part))
    assert "Bucketing (from 21 messages to 2): the step is 17% shorter, in 9 of 9 rounds" in text
    assert "s falls from 76.5% to 47.1%" in text
    assert "The difference: none. 250 ms is within the formula's 210 – 270 ms" in text
    korean = flat(printed("ko", "D", part))
    assert "버킷팅(메시지 21개에서 2개로): 스텝이 17% 짧아졌고" in korean
    assert "s는 76.5%에서 47.1%로 줄었다" in korean


def test_overlap_that_costs_is_told_as_well() -> None:
    part = part_d(sampled({**STEPS, "at_once": (0.06, 0.12, 0.05)}, 0.06))
    text = flat(printed("en", "D", part))
    assert "Overlap (from one message at the end to buckets on the way): the step is 9% longer" in text
    assert "s rises from 35.3% to 47.1%" in text
    assert "9% 길어졌고" in flat(printed("ko", "D", part))


def test_noise_is_not_told_as_a_difference() -> None:
    part = part_d(noisy("at_once", [0.8, 1.3, 0.7, 1.2, 0.75, 1.1, 0.8, 1.05, 1.4]))
    overlap = next(each for each in part["effects"] if each["effect"] == "overlap")
    assert (overlap["rounds_faster"], overlap["verdict"]) == (5, "noise")
    text = flat(printed("en", "D", part))
    assert "buckets on the way): no difference that can be told from noise" in text
    assert "the second was faster in 5 of 9 rounds" in text
    assert "buckets on the way): the step is" not in text
    assert "보내기로): 잡음과 가릴 만한 차이가 없다" in flat(printed("ko", "D", part))


@pytest.mark.parametrize(("share", "cores", "crowded"), [(0.95, 2, False), (0.5, 2, True), (0.5, 1, False)])
def test_cores_that_others_have_are_told(share: float, cores: int, crowded: bool) -> None:
    measured = sampled(STEPS, 0.06)
    for of_round in measured["steps"]["buckets"]:
        for each in of_round:
            each["forward_cpu_seconds"] *= share
    part = part_d(measured, cores=cores)
    assert [scaled["running"] for scaled in part["scaling"]] == pytest.approx([1.0, share])
    assert part["crowded"] is crowded
    text = flat(printed("en", "D", part))
    assert ("a process among 2 was running 50% of the time (by itself 100%)" in text) is crowded
    assert ("시간의 50%만 실제로 돌았다" in flat(printed("ko", "D", part))) is crowded


def test_too_few_rounds_tell_nothing() -> None:
    part = part_d(sampled(STEPS, 0.06, jitter=(1.0, 1.0, 1.0)))
    assert {each["verdict"] for each in part["effects"]} == {"noise"}
    assert "There was time for 3 rounds only" in flat(printed("en", "D", part))
    assert "3바퀴밖에 돌지 못해" in flat(printed("ko", "D", part))


def test_a_serial_fraction_that_the_rounds_leave_open_is_said_to_be() -> None:
    part = part_d(noisy("buckets", [0.8, 1.3, 0.9, 1.2, 1.0, 1.0, 0.9, 1.1, 1.05]))
    low, high = part["amdahl"]["serial_fraction_range"]
    assert low < part["amdahl"]["serial_fraction"] < high
    assert part["amdahl"]["noisy"]
    assert "which is wide" in flat(printed("en", "D", part))
    assert "어디든 될 수 있어" in flat(printed("ko", "D", part))


@pytest.mark.parametrize(
    ("buckets", "said", "korean"),
    [
        ((0.1, 0.3, 0.05), "2 processes were no faster than one", "하나보다 빠르지 않았다"),
        ((0.04, 0.08, 0.04), "Amdahl's law has no ceiling", "암달의 법칙에 한계가 없다"),
    ],
)
def test_where_the_law_has_nothing_to_continue(buckets: Parts, said: str, korean: str) -> None:
    part = part_d(sampled({**STEPS, "buckets": buckets}, 0.06))
    text = flat(printed("en", "D", part))
    assert said in text
    assert "Amdahl's law, continued" not in text
    assert korean in flat(printed("ko", "D", part))


def test_the_difference_from_the_formula() -> None:
    slower = part_d(sampled({**STEPS, "buckets": (0.1, 0.2, 0.05)}, 0.06))["predicted"]
    assert (slower["verdict"], slower["rounds_outside"]) == ("slower", 9)
    assert slower["difference"] == pytest.approx(0.35 / 0.27 - 1)
    faster = part_d(sampled({**STEPS, "buckets": (0.05, 0.1, 0.03)}, 0.06))["predicted"]
    assert faster["verdict"] == "faster"
    assert faster["difference"] == pytest.approx(0.18 / 0.21 - 1)
    unsure = part_d(noisy("buckets", [1.2, 1.2, 1.2, 1.2, 1.2, 0.9, 0.9, 0.9, 0.9]))["predicted"]
    assert (unsure["verdict"], unsure["rounds_outside"]) == ("noise", 5)


# A real run of both


def unlisted(part: str, document: dict[str, Any]) -> list[str]:
    """Keys of a part that docs/json.md does not list, and rows of it that the part has no key for."""
    found = set(leaves(json.loads(json.dumps({part: document}, allow_nan=False))))
    rows = {row for row in documented("lesson") if row.startswith(f"{part}.")}
    without_row = [leaf for leaf in found if not any(covers(row, leaf) for row in rows)]
    return without_row + [row for row in rows if not any(covers(row, leaf) for leaf in found)]


def test_data_parallelism_is_really_run() -> None:
    pytest.importorskip("torch")
    part = data_parallel.part_d(nothing, divided=QUICK)
    assert part["rounds"] >= 3
    assert [scaled["ranks"] for scaled in part["scaling"]] == list(data_parallel.ranks_measured(part["cores"]))
    for timed in (*part["scaling"], *part["exchanges"]):
        low, high = timed["quartile_seconds"]
        assert 0 < low <= timed["median_seconds"] <= high
    assert sum(part["parts"].values()) == pytest.approx(part["amdahl"]["serial_fraction"])
    assert part["job"]["parameters"] == 2 * 100 * 64 + 4 * 64**2 + 3 * 64 * 96 + 2 * 64 + 64
    curve = part["amdahl"]["curve"] or [{"gpus": 2, "speedup": 1.0}]  # so short a run may leave nothing to continue
    assert unlisted("D", part | {"amdahl": part["amdahl"] | {"curve": curve}}) == []
    assert "D. Data parallelism" in printed("en", "D", part)


@pytest.mark.slow
def test_an_exchange_in_bf16_sends_what_is_predicted() -> None:
    """The hook, which the ledger of fp32 buckets is converted for: counted in a real run."""
    pytest.importorskip("torch")
    case = QUICK.case(2, EXCHANGES["bf16"])
    question = data_parallel._question(case, "bf16") | {"bf16_exchange": True}
    found = processes.run("nanum.live.worker", [], nothing, question={"questions": [question]})
    rows = [row for row in found["answers"][0]["ranks"][0]["exchanges"] if row[1] == "all_reduce"]
    predicted = data_parallel.exchanged(QUICK, 2, EXCHANGES["bf16"])
    assert [row[3:] for row in rows] == [["bf16", 2, predicted["calls"], predicted["payload_bytes"]]]


def test_a_table_of_a_large_machine_fits_the_page() -> None:
    ranks = (1, 2, 4, 8)
    steps = {**STEPS, "2 ranks": (0.06, 0.12, 0.05), "4 ranks": (0.06, 0.12, 0.05)}
    measured = sampled({name: (a * 100, b * 100, c * 100) for name, (a, b, c) in steps.items()}, 6.0, ranks=ranks)
    text = printed("en", "D", data_parallel.from_rounds(replace(Divided(), hidden_size=1024), 8, ranks, measured))
    assert max(map(len, text.splitlines())) <= 80
    table = text.split("s between")[1].split("The difference")[0]
    assert [line.split()[0] for line in table.splitlines()[2:] if line.strip()] == ["1", "2", "4", "8"]
