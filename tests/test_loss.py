"""Losses that have not all logits at once: beside what PyTorch holds, and beside the full loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanum
from nanum import cluster, engines
from nanum.account.memory import held_after, moment, peak
from nanum.account.traffic import flops, traffic
from nanum.build import build
from nanum.division.parts import emit_parts
from nanum.engines.engine import Engine
from nanum.errors import Refused
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Mlp, Model, load
from nanum.operators.chunked_loss import fused_chunk
from nanum.parallel.pipeline import Step

TORCHTITAN, TORCH, ACCELERATE = (engines.load(name) for name in ("torchtitan", "torch", "accelerate"))
B, S, H, V, L = 2, 64, 32, 512, 2
MODEL = Model(
    "wide", H, V, L, 1024, Attention(4, 2, 8), Mlp(64, True, "silu"), "rms_norm", "rotary", False, final_norm=False
)


def layout(**given: Any) -> Layout:
    sizes = {k: given.pop(k) for k in ("dp_replicate", "dp_shard", "cp", "tp", "pp") if k in given}
    tensor = "sequence" if sizes.get("tp", 1) > 1 else "none"
    pipelined, cp_kind = sizes.get("pp", 1) > 1, "allgather" if sizes.get("cp", 1) > 1 else "none"
    structure = Structure(**{"zero": 0, "tensor": tensor, "pipelined": pipelined, "cp_kind": cp_kind} | given)
    return Layout(**sizes, micro_batch_size=B, structure=structure)


def step(engine: Engine, model: Model = MODEL, m: int = 2, stage: int = 0, precision: Any = "bf16", **at: Any) -> Step:
    where = layout(**at)
    return build(model, Job(S, B * where.data_ranks * m, precision), where, engine, stage)


def looped(chunks: int, dtype: str) -> tuple[int, int]:
    """What PyTorch holds at most in the loop of torchtitan's ChunkedLossWrapper over a head and loss, and after it."""
    torch = pytest.importorskip("torch")
    from nanum.live.allocations import allocations

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    with allocations() as found:
        w = torch.nn.Parameter(torch.randn(V, H, dtype=kind))
        hidden = torch.randn(B * S, H, dtype=kind, requires_grad=True) * 1.0
        labels = torch.randint(V, (B * S,))
        found.mark("begin")
        total = hidden.new_zeros((), dtype=torch.float32)
        rows, at = torch.zeros_like(hidden, dtype=torch.float32), 0
        parts = [part.detach().requires_grad_() for part in torch.split(hidden, B * S // chunks)]
        for part, wanted in zip(parts, torch.split(labels, B * S // chunks), strict=True):
            logits = torch.nn.functional.linear(part, w)
            loss = torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="sum")
            total = total + loss.detach()
            loss.backward()
            rows[at : at + len(part)] = part.grad.to(torch.float32)
            at, part.grad = at + len(part), None
        del logits, loss
        found.mark("looped")
    return found.peak_before["looped"] - found.at["begin"], found.at["looped"] - found.at["begin"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("chunks", [2, 4, 16])
def test_a_chunked_loss_holds_what_pytorch_holds(chunks: int, dtype: Any) -> None:
    """To the byte, but for the scalars: of a chunk its logits, and the loss's tensors; of all rows their gradients, and
    of the head's weights theirs."""
    at = layout(loss="chunked", loss_chunks=chunks)
    body = emit_parts(MODEL, Job(S, B, dtype), at, TORCH).bodies.head
    most, after = looped(chunks, dtype)
    scalars = 16
    assert abs(int(peak(body.loss).peak) - most) <= scalars
    grads = V * H * (4 if dtype == "fp32" else 2)
    assert after == pytest.approx(grads + 4 * B * S * H, abs=scalars)
    assert held_after(body.loss)["grads"] == grads


@pytest.mark.parametrize(
    ("rows", "vocabulary", "width", "chunk"), [(16384, 32000, 4096, 2048), (8192, 128256, 4096, 256)]
)
def test_the_chunk_of_liger(rows: int, vocabulary: int, width: int, chunk: int) -> None:
    """The example in its source, and a Llama 3's: cdiv(V, H), and the next power of two of cdiv(BT, that)."""
    assert fused_chunk(rows, vocabulary, width) == chunk


def logits_bytes(engine: Engine, model: Model, **at: Any) -> int:
    """What a head and its loss hold beyond gradients of weights, at most."""
    body = emit_parts(model, Job(S, B), layout(**at), engine).bodies.head
    return moment([*body.forward, *body.loss, *body.loss_backward]).by_category.get("activations", 0)


def test_logits_by_the_chunk() -> None:
    """Full: at least 10 bytes a token and entry of the vocabulary (bf16 logits, fp32 softmax and its gradient); of
    chunks 14 bytes of one, whose logits a variable of the loop holds on to."""
    wide = replace(MODEL, vocab_size=64 * V)
    logits = B * S * 64 * V
    assert logits_bytes(TORCHTITAN, wide, zero=3) >= 10 * logits
    for chunks in (2, 4, 8):
        found = logits_bytes(TORCHTITAN, wide, zero=3, loss="chunked", loss_chunks=chunks)
        assert found == pytest.approx(14 * logits / chunks, rel=0.02)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(TORCHTITAN, "chunked"), (TORCH, "chunked"), (TORCH, "fused"), (ACCELERATE, "fused")]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([{}, {"dp_shard": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}]),
    st.booleans(),
    st.booleans(),
)
def test_beside_the_full_loss(
    how: tuple[Engine, Any], chunks: int, sizes: dict[str, int], norm: bool, tied: bool
) -> None:
    """The same FLOPs; the same exchanges but for how often a vocabulary-parallel loss's small sums are sent; the same
    bytes at rest; and, where logits are what is large, no more of them."""
    engine, loss = how
    zero = 3 if engine is not TORCH else 0
    if (loss == "fused" and "tp" in sizes) or (engine is ACCELERATE and "pp" in sizes) or (tied and "pp" in sizes):
        return
    if engine is TORCH and ("dp_shard" in sizes or "cp" in sizes):
        return
    model = replace(MODEL, vocab_size=16 * V, final_norm=norm, tie_word_embeddings=tied)
    stage = sizes.get("pp", 1) - 1
    full, other = (
        step(engine, model, stage=stage, zero=zero, loss=kind, loss_chunks=chunks, **sizes) for kind in ("full", loss)
    )
    assert flops(other.program) == pytest.approx(flops(full.program), rel=1e-12)
    assert _exchanged(other) == _exchanged(full)
    assert _left(other.program) == _left(full.program) == _left(full.at_rest)
    if chunks > 1:
        assert moment(other.program).bytes <= moment(full.program).bytes + 8 * 16 * V * H


def _left(nodes: Any) -> dict[str, int]:
    return {category: size for category, size in held_after(nodes).items() if size}


def _exchanged(found: Step) -> dict[Any, int]:
    """Payload by what, kind, axis and dtype, whatever the phase and the calls."""
    rows: dict[Any, int] = {}
    for key, total in traffic(found.program).items():
        same = key.axes, key.kind, key.what, key.dtype
        rows[same] = rows.get(same, 0) + int(total.payload_bytes)
    return rows


@pytest.mark.parametrize(
    ("engine", "given", "why"),
    [
        ("megatron", {"loss": "chunked"}, "--loss chunked is not in megatron"),
        ("deepspeed", {"loss": "fused"}, "--loss fused is not in deepspeed"),
        ("torchtitan", {"loss": "fused"}, "--loss fused is not in torchtitan"),
        ("torchtitan", {"loss": "chunked", "loss_chunks": 3}, "loss_chunks=3 does not divide the 1024 tokens"),
        ("torch", {"loss": "chunked", "zero": 3}, "the head is of the root unit"),
        ("torch", {"loss": "fused", "tp": 2}, "Liger's kernel takes the head's whole matrix"),
    ],
)
def test_refused(engine: str, given: dict[str, Any], why: str) -> None:
    zero = {"megatron": 1, "torch": 3}.get(engine, 3)
    tp = given.get("tp", 1)
    at = layout(**{"zero": zero, "dp_shard": 8 // tp} | given)
    with pytest.raises(Refused) as refused:
        nanum.predict(load("gpt2"), Job(1024, 64), cluster.load("1x8xh100-sxm"), at, engine=engine)
    assert any(why in reason for reason in refused.value.reasons), refused.value.reasons


def test_no_product_is_onednn_s_while_bytes_are_counted() -> None:
    """With AMX it packs operands into memory of PyTorch's, which no GPU has."""
    torch = pytest.importorskip("torch")
    from nanum.live.allocations import allocations, own_products

    before = torch._C._get_mkldnn_enabled()
    with own_products():
        assert not torch._C._get_mkldnn_enabled()
    with allocations():
        assert not torch._C._get_mkldnn_enabled()
    assert torch._C._get_mkldnn_enabled() == before
