"""Memory as published runs report it. Most here are of Megatron-LM on eight B200, in SimuMax's runs: PyTorch's peak
allocated, on every rank.

Their settings are in docs/b200/b200_real_repro_guide.md of github.com/MooreThreads/SimuMax (Megatron-LM 23e00ed,
Transformer Engine 2.11).
"""

from __future__ import annotations

import json
import statistics
from functools import cache
from typing import Any

import pytest

from nanum.account.device import WORKSPACES
from nanum.prediction import Prediction
from nanum.units import GIB
from nanum.validate import validate
from nanum.validate.questions import Question, question_of
from nanum.validate.rows import SHIPPED, Row, read


@cache
def by_rank() -> dict[str, dict[str, float]]:
    """Measured GiB of each rank, by run: one of each layout, whose other runs quote its memory."""
    lines = map(json.loads, SHIPPED.read_text(encoding="utf-8").splitlines())
    found = {row["id"]: row["memory_by_rank"] for row in lines if "memory_by_rank" in row}
    return {name: ranks for name, ranks in found.items() if name.endswith("mbc4")}


@cache
def rows() -> dict[str, Row]:
    return {row.id: row for row in read()}


@cache
def predicted(name: str) -> Prediction:
    q = question_of(rows()[name])
    assert isinstance(q, Question), q
    return Prediction(q.model, q.job, q.cluster, q.layout, q.engine)


def errors(name: str) -> list[float]:
    """Of each stage against the most of its ranks, the first ranks being the first stage's."""
    p, ranks = predicted(name), by_rank()[name]
    each = len(ranks) // p.layout.pp
    measured = (max(ranks[str(r)] for r in range(i * each, (i + 1) * each)) for i in range(p.layout.pp))
    return [
        (stage.moment.bytes + WORKSPACES.value) / GIB / most - 1 for stage, most in zip(p.memory, measured, strict=True)
    ]


@pytest.mark.parametrize("name", by_rank())
def test_every_stage_is_within_a_percent(name: str) -> None:
    assert all(abs(error) < 0.01 for error in errors(name)), errors(name)


def test_half_are_within_a_fifth_of_a_percent() -> None:
    every = [abs(error) for name in by_rank() for error in errors(name)]
    assert len(every) == 11
    assert statistics.median(every) < 0.002


def test_experts_are_within_an_eighth_of_a_percent() -> None:
    mine = [abs(error) for name in by_rank() if "deepseek" in name for error in errors(name)]
    assert len(mine) == 3
    assert max(mine) < 0.00125


def held(p: Prediction, name: str) -> set[Any]:
    return {
        node.bytes
        for step in p.steps
        for node in step.at_rest
        for node in getattr(node, "body", ())
        if getattr(node, "name", "") == name
    }


def test_one_stand_in_for_each_shape_of_a_weight() -> None:
    """Llama-3-405B on two ranks of tp: qkv, output, fc1 and fc2 of a layer, and the head; four layers share theirs."""
    h, ffn, vocabulary, kv = 16384, 53248, 128256, 16 * 128
    qkv, out, fc1, fc2, head = (h + 2 * kv) * h, h * h, 2 * ffn * h, h * ffn, vocabulary * h
    want = 2 * (qkv + out + fc1 + fc2 + head) // 2
    p = predicted("simumax-b200-llama3_405b_l4_tp2_pp1_dp4_mbc4")
    assert held(p, "stand-ins for weights' gradients") == {want}


def test_experts_and_the_shared_one_share_where_they_are_alike() -> None:
    """DeepSeek-V3's last stage: two layers of latent attention and experts, and the head."""
    h, ffn, vocabulary, heads = 7168, 2048, 129280, 128
    latent = [(1536, h), (heads * 192, 1536), (512 + 64, h), (heads * 256, 512), (h, heads * 128)]
    want = 2 * sum(rows * columns for rows, columns in {*latent, (2 * ffn, h), (h, ffn), (vocabulary, h)})
    p = predicted("simumax-b200-deepseekv3_l4_tp1_ep4_pp2_dp4_mbc4")
    assert want in held(p, "stand-ins for weights' gradients")


# --- what others call memory ------------------------------------------------------------------------------------------
@cache
def documents(source: str) -> dict[str, Any]:
    return validate([row for row in rows().values() if row.source == source and row["measured.memory_def"]])


@pytest.mark.parametrize(("source", "most", "half"), [("bs176", 0.10, 0.10), ("jz", 0.17, 0.10), ("titan", 0.06, 0.07)])
def test_means_and_medians_of_others(source: str, most: float, half: float) -> None:
    """Of the device and of what is reserved: little is modelled of what the caching allocator does."""
    found = documents(source)["summary"]["memory_bytes"]
    assert found["mape"] < most
    assert found["median"] < half


def test_gradients_of_fsdp_are_in_a_pool_of_their_own() -> None:
    """Llama-3-8B under torch.compile on 8 and on 128 GPUs: 77.0 and 62.0 GiB reserved."""
    found = {row["id"]: row["signed_error"] for row in documents("titan")["rows"] if row["quantity"] == "memory_bytes"}
    assert max(abs(found[f"titan-8b-{gpus}-fsdp-compile"]) for gpus in (8, 128)) < 0.015


def test_runs_that_did_not_fit_are_predicted_not_to() -> None:
    assert documents("bs176")["summary"]["memory_bytes"]["oom"] == {"n": 2, "right": 2}
