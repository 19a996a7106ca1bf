"""What rows of the ledger expose, and what a step loses to exchanges: one account of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nanum.cli.words import question_and_layout
from nanum.prediction import Prediction, consistent, predict
from nanum.search import plan

LAUNCHED = [
    pytest.param("bert-large-uncased", "1x8xh100-sxm", {"seq_len": "512"}, id="BERT"),
    pytest.param("t5-large", "1x8xh100-sxm", {}, id="T5"),
    pytest.param(
        "bloom-7b1", "4x8xb200", {"engine": "megatron", "micro_batch_size": "2", "cp": "4", "sp": False}, id="BLOOM"
    ),
]
"""Small models on fast chips: the host takes longer to launch kernels than the chip to run them."""
OTHERS = [
    pytest.param("llama-3.1-8b", "1x8xh100-sxm", {}, id="computed"),
    pytest.param("llama-3.1-8b", "1x8xh100-sxm", {"engine": "megatron", "tp": "2"}, id="waited for at once"),
    pytest.param("llama-3.1-8b", "2x8xa100-sxm-80gb", {"engine": "deepspeed", "zero": "2"}, id="buckets"),
    pytest.param("mixtral-8x7b", "2x8xh100-sxm", {"ep": "2"}, id="experts"),
]
PIPELINES = [
    pytest.param("llama-3.1-8b", "2x8xa100-sxm-80gb", {"engine": "megatron", "pp": "2"}, id="one stage a rank"),
    pytest.param("llama-3.1-8b", "1x8xh100-sxm", {"pp": "4", "schedule": "interleaved"}, id="two stages a rank"),
]


def predicted(model: str, cluster: str, flags: dict[str, Any]) -> Prediction:
    asked, layout = question_and_layout(model, cluster, flags)
    return predict(asked.model, asked.job, asked.cluster, layout, asked.engine.name)


def of_stages(p: Prediction) -> list[float]:
    return [sum(row.exposed_seconds for row in p.communication if row.stage == stage) for stage in range(p.layout.pp)]


@pytest.mark.parametrize(("model", "cluster", "flags"), LAUNCHED + OTHERS)
def test_rows_add_up_to_what_the_step_exposes(model: str, cluster: str, flags: dict[str, Any]) -> None:
    p = predicted(model, cluster, flags)
    assert of_stages(p) == [pytest.approx(p.time.exposed_communication_seconds, rel=1e-9)]
    assert all(0 <= row.exposed_seconds <= row.seconds * (1 + 1e-9) for row in p.communication)


@pytest.mark.parametrize(("model", "cluster", "flags"), LAUNCHED[:1])
def test_what_launches_hide_is_not_exposed(model: str, cluster: str, flags: dict[str, Any]) -> None:
    p = predicted(model, cluster, flags)
    assert sum(row.seconds for row in p.communication) > 0.1 * p.time.step_seconds
    assert sum(row.exposed_seconds for row in p.communication) < 0.001 * p.time.step_seconds


@pytest.mark.parametrize(("model", "cluster", "flags"), PIPELINES)
def test_rows_of_the_stage_that_works_longest_do_too(model: str, cluster: str, flags: dict[str, Any]) -> None:
    """But for sends: each shows no more than its own seconds, though a step waits for those of other stages too."""
    p = predicted(model, cluster, flags)
    sends = float(p.parts.sends[0])
    exposed = p.time.exposed_communication_seconds
    assert any(exposed - sends <= seconds * (1 + 1e-9) <= exposed * (1 + 1e-6) for seconds in of_stages(p))


def test_a_device_that_is_its_own_host_holds_tensors_alone() -> None:
    """Nothing of CUDA, of its allocator or of NCCL is on a cluster that was measured on a CPU."""
    asked, layout = question_and_layout("gpt2", "1x2xh100-sxm", {"engine": "torch"})
    cpu = replace(asked.cluster, measured=replace(asked.cluster.measured, streams=False))
    p = predict(asked.model, asked.job, cpu, layout, "torch")
    assert (p.worst.context_bytes, p.worst.communicator_bytes) == (0, 0)
    assert p.worst.device_bytes == p.worst.pooled_bytes
    assert not [one for one in p.assumptions if "CUDA" in one["what"] or "NCCL" in one["what"]]
    _, found = plan(asked.model, asked.job, cpu, "torch", top=1).candidates[0]
    again = predict(asked.model, asked.job, cpu, consistent(found.layout), "torch")
    assert again.worst.device_bytes == found.device_bytes
