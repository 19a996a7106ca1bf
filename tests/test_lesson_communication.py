"""Part A of the lesson: its figures to the printed digit, and what one rank really sends beside them."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import printed

from nanum.lesson import arithmetic, communication, ledger
from nanum.lesson.arithmetic import Dimensions
from nanum.lesson.words import gigabytes

ACTIVATION_BYTES = 4 * 2048 * 4096 * 2  # b s h in bf16


@pytest.fixture(scope="module")
def part_a() -> dict[str, Any]:
    return communication.part_a()


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
