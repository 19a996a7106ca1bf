"""Attention by heads of queries and of keys: column-parallel projections, the core, and a row-parallel one."""

from __future__ import annotations

from typing import Any

from nanum.blocks.body import Streams
from nanum.model import Attention, LatentAttention, LinearAttention
from nanum.operators.attention import Window, sloped
from nanum.operators.context_parallel import context_attention
from nanum.operators.elementwise import known_by_result, repeated, rotary, scaled
from nanum.operators.matmul import linear
from nanum.operators.norm import norm
from nanum.operators.relative import biased_attention
from nanum.operators.tape import Tape
from nanum.sharding import Tensor


def attention_dims(a: Attention | LatentAttention | LinearAttention) -> dict[str, Any]:
    """Global sizes: of queries, of keys, of the heads of each, and of one head."""
    return {
        "Q": a.num_attention_heads * a.head_dim,
        "K": a.num_key_value_heads * a.head_dim,
        "A": a.num_attention_heads,
        "key_heads": a.num_key_value_heads,
        "head": a.head_dim,
        "buckets": getattr(a, "relative_buckets", 0),
    }


def self_attention(
    t: Tape, h: Tensor, a: Attention, splits: Streams, *, positions: str, bias: Tensor | None = None
) -> Tensor:
    """`W_o attention(W_q h, W_k h, W_v h)` for h [B, S, D], in the residual stream's split; `positions` are the
    model's, `bias` is of scores.
    """

    def column(name: str, dim: str, *, bias: bool = a.qkv_bias) -> Tensor:
        split = {dim: t.tp} if t.tp else {}
        return linear(t, h, name, (dim, "D"), split, ("B", "S", dim), {**splits.whole, **split}, bias=bias)

    q, k, v = column("wq", "Q"), column("wk", "K"), column("wv", "K")
    if a.qkv_bias and "qkv_bias" in t.conventions.more_passes:
        t.pass_over("qkv_bias", q, k, v)
    gate = column("wq_gate", "Q") if a.gated else None
    if a.qk_norm != "none":
        q, k = _normed(t, q, "q_norm", a), _normed(t, k, "k_norm", a)
    turns = positions == "rotary" and a.rotary_dim
    turned, keys = (rotary(t, q, a.rotary_dim), rotary(t, k, a.rotary_dim)) if turns else (q, k)
    values = v
    if t.conventions.repeats_keys and a.num_key_value_heads < a.num_attention_heads:
        keys, values = repeated(t, keys, q), repeated(t, values, q)
    if bias is not None:
        core = biased_attention(t, q, k, v, bias, a.dropout)
    else:
        if positions == "alibi":
            sloped(t, q)
        core = context_attention(t, turned, keys, values, a.dropout, Window(a.window, a.chunked, a.causal))
    if a.sinks:
        core = _drained(t, core)
    if gate is not None:
        core = scaled(t, core, known_by_result(t, "sigmoid", gate), "gated")
    row = {"Q": t.tp} if t.tp else {}
    out = linear(t, core, "wo", ("D", "Q"), row, ("B", "S", "D"), splits.stream, bias=a.output_bias)
    t.frame(h, t.gathered(h, splits.whole), q, k, v, core)
    return out


def cross_attention(t: Tape, memory: Tensor, a: Attention, splits: Streams, h: Tensor) -> Tensor:
    """`W_o attention(W_q h, W_k m, W_v m)` for h [B, S, D] and what an encoder made, m, of as many rows."""

    def column(x: Tensor, name: str, dim: str) -> Tensor:
        split = {dim: t.tp} if t.tp else {}
        return linear(
            t, x, name, (dim, "D"), split, ("B", "S", dim), {**splits.whole, **split}, bias=a.qkv_bias
        )  # fmt: skip

    q, k, v = column(h, "cross_wq", "Q"), column(memory, "cross_wk", "K"), column(memory, "cross_wv", "K")
    core = context_attention(t, q, k, v, a.dropout, Window(causal=False))
    row = {"Q": t.tp} if t.tp else {}
    out = linear(t, core, "cross_wo", ("D", "Q"), row, ("B", "S", "D"), splits.stream, bias=a.output_bias)
    t.frame(h, t.gathered(h, splits.whole), q, k, v, core)
    return out


def _normed(t: Tape, x: Tensor, name: str, a: Attention) -> Tensor:
    kind = {"head": "rms_norm", "bare_head": "rms_norm_bare", "width": "rms_norm"}[a.qk_norm]
    return norm(t, x, name, kind, heads=a.qk_norm != "width")


def _drained(t: Tape, core: Tensor) -> Tensor:
    """The output less what a learned score of each head draws to it: scaled by `sigmoid(log_sum_exp - sink)`, which is
    kept (gpt-oss; so does torchtitan).
    """
    heads = core.split.get("Q", ())
    sinks = t.weight("sinks", ("A",), {"A": heads} if heads else {})
    if t.conventions.attention_library == "cudnn":  # its kernels have them (Transformer Engine's `softmax_type`)
        return _in_kernel(t, core, sinks)
    share = Tensor("sink_share", ("B", "S", "A"), {**_rows(core), **({"A": heads} if heads else {})}, core.dtype)
    t.emit("sigmoid", (sinks,), (share,))
    t.emit("mul", (core, share), (y := core.like(name="drained"),))

    def transpose() -> None:
        d = t.grad(y)
        dcore, dshare = core.like(name="d_core"), share.like(name="d_share")
        if t.requires_grad(sinks):
            t.emit("d_mul", (d, core, share), (dcore, dshare))
            t.emit("d_sigmoid", (dshare, share), (ds := t.grad_of_weight(sinks, core),))
            t.set_weight_grad(sinks, ds)
        else:
            t.emit("d_mul", (d, share), (dcore,))
        t.add_grad(core, dcore)

    return t.then(y, transpose)


def _in_kernel(t: Tape, core: Tensor, sinks: Tensor) -> Tensor:
    """What the kernel made has seen them; their gradient is of no size."""
    if not t.requires_grad(sinks):
        return core

    def transpose() -> None:
        t.emit("d_sinks", (sinks,), (ds := t.grad_of_weight(sinks, core),))
        t.set_weight_grad(sinks, ds)

    return t.then(core, transpose)


def _rows(x: Tensor) -> dict[str, tuple[str, ...]]:
    return {d: axes for d, axes in x.split.items() if d != x.dims[-1]}
