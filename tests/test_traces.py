"""Peak memory beside real PyTorch steps: bytes before one, its peak and the kernel at it, of 36 cases to the byte.

The recorded numbers are in `data/traced_peaks.json`: a decoder of eager kernels on one process, under FSDP2, under
tensor and sequence parallelism, under both, with and without activation checkpointing; the small ones on gloo, the
large ones on a fake process group.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nanum import engines
from nanum.account.memory import held_after, moment
from nanum.account.traffic import traffic
from nanum.build import build
from nanum.conventions import Conventions, Numerics
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Mlp, Model
from nanum.parallel.pipeline import Step
from nanum.states import States

RECORDED = json.loads((Path(__file__).parent / "data" / "traced_peaks.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = [dict(zip(RECORDED["columns"], row, strict=True)) for row in RECORDED["rows"]]

KERNEL = {"foreach_sqrt": "optimizer"}
"""Kernels by our names where they differ: AdamW's roots of its second moments are part of the one node of its step."""


def name(case: dict[str, Any]) -> str:
    words = [
        f"d{case['hidden_size']}",
        f"L{case['num_hidden_layers']}",
        f"V{case['vocab_size']}",
        f"s{case['seq_len']}",
    ]
    words += [f"b{case['micro_batch_size']}", case["precision"], f"fsdp{case['dp_shard']}", f"tp{case['tp']}"]
    words += (
        ["keep"] * (not case["reshard"])
        + ["keep_root"] * (not case["reshard_root"])
        + ["full"] * (case["recompute"] == "full")
    )
    return "-".join(words)


def step(case: dict[str, Any]) -> Step:
    heads, width = case["num_attention_heads"], case["hidden_size"]
    model = Model(
        "traced",
        width,
        case["vocab_size"],
        case["num_hidden_layers"],
        case["seq_len"],
        Attention(heads, heads, width // heads),
        Mlp(case["intermediate_size"], gated=True, activation="silu"),
        "rms_norm",
        "rotary",
        tie_word_embeddings=False,
    )
    alone = case["dp_shard"] == 1
    structure = Structure(
        zero=0 if alone else 3,
        reshard=case["reshard"],
        tensor="sequence" if case["tp"] > 1 else "none",
        recompute=case["recompute"],
    )
    layout = Layout(
        dp_shard=case["dp_shard"], tp=case["tp"], micro_batch_size=case["micro_batch_size"], structure=structure
    )
    job = Job(case["seq_len"], case["micro_batch_size"] * case["dp_shard"], case["precision"])
    torch = engines.load("torch")

    def conventions(model: Model, job: Job, structure: Structure) -> Conventions:
        stated = torch.conventions(model, job, structure)
        numerics = stated.numerics
        if alone:  # a plain module: AdamW's two states in the parameters' dtype, and a 4-byte count a tensor
            dtype = job.precision
            numerics = Numerics(dtype, dtype, dtype, States("adamw", dtype, counters=True))
        # gloo reduces a copy of its input; the fake group reduces nothing
        gloo = not alone and case["backend"] == "gloo"
        return replace(
            stated, numerics=numerics, root_reshards=case["reshard_root"], reduce_copies=gloo, rope_in_forward=True
        )

    return build(model, job, layout, replace(torch, conventions=conventions), 0)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_traced_step(case: dict[str, Any]) -> None:
    program = step(case).program
    found = moment(program)
    assert sum(held_after(program).values()) == case["before_bytes"]  # what a step leaves is what the next begins with
    assert found.bytes == case["peak_bytes"]
    assert sum(found.by_category.values()) == case["peak_bytes"]
    assert found.name.split(": ")[1] == KERNEL.get(case["kernel"], case["kernel"])


def test_every_trace_is_there() -> None:
    assert len({name(case) for case in CASES}) == len(CASES) == 36
    kernels = {"mul", "head", "log_softmax_backward", "reduce_scatter", "foreach_sqrt"}
    assert {case["kernel"] for case in CASES} == kernels


@cache
def seven_billion() -> Step:
    """A 7B Llama at FSDP 128 x TP 8, sequences of 4096: traced on 1,024 fake ranks."""
    sizes = ("dp_shard", "tp", "num_hidden_layers", "recompute", "reshard_root")
    (case,) = (c for c in CASES if tuple(c[k] for k in sizes) == (128, 8, 32, "none", True))
    return step(case)


@pytest.mark.parametrize(
    ("axis", "kind", "dtype", "calls", "payload_bytes"),
    [
        ("dp_shard", "all_gather", "bf16", 66, 3_406_839_808),
        ("dp_shard", "reduce_scatter", "fp32", 33, 3_406_839_808),
        ("tp", "all_gather", "bf16", 131, 4_624_220_160),
        ("tp", "reduce_scatter", "bf16", 130, 4_362_076_160),
        ("tp", "all_reduce", "bf16", 65, 532_480),
    ],
)
def test_collectives_of_a_7b_on_1024_ranks(axis: str, kind: str, dtype: str, calls: int, payload_bytes: int) -> None:
    rows = {k: t for k, t in traffic(seven_billion().program).items() if axis in k.axes and k.kind == kind}
    assert {k.dtype for k in rows} == {dtype}
    assert sum(t.calls for t in rows.values()) == calls
    assert sum(t.payload_bytes for t in rows.values()) == payload_bytes


def test_nothing_else_is_exchanged_by_a_7b_on_1024_ranks() -> None:
    assert sum(t.calls for t in traffic(seven_billion().program).values()) == 66 + 33 + 131 + 130 + 65


def test_peak_of_a_7b_on_1024_ranks() -> None:
    found = moment(seven_billion().program)
    assert (found.bytes, found.name) == (7_170_485_780, "backward: log_softmax_backward")
