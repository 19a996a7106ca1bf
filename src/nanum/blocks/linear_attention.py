"""Linear attention: column-parallel projections, the core over a rank's own heads, and a row-parallel projection."""

from __future__ import annotations

from typing import Any

from nanum.blocks.body import Streams
from nanum.model import LinearAttention
from nanum.operators.linear_attention import CHUNK, Sizes, convolution, gated_norm, linear_core
from nanum.operators.matmul import linear
from nanum.operators.tape import Tape
from nanum.sharding import Tensor


def linear_attention_dims(a: LinearAttention) -> dict[str, Any]:
    """Global sizes: of queries, keys and values side by side, of values, of the heads of values, of one such head, and
    of what the rule takes at once.
    """
    keys, values = a.num_key_heads * a.key_head_dim, a.num_value_heads * a.value_head_dim
    return {
        "mixed": 2 * keys + values,
        "values": values,
        "value_heads": a.num_value_heads,
        "value_head": a.value_head_dim,
        "rates": 2 * a.num_value_heads,
        "taps": a.convolved,
        "chunk": CHUNK[a.rule],
    }


def linear_attention(t: Tape, h: Tensor, a: LinearAttention, splits: Streams) -> Tensor:
    """`W_o (norm(core(q, k, v)) * gate)` for h [B, S, D], in the residual stream's split."""

    def column(name: str, dim: str) -> Tensor:
        split = {dim: t.tp} if t.tp else {}
        return linear(t, h, name, (dim, "D"), split, ("B", "S", dim), {**splits.whole, **split})

    mixed, gate = column("wqkv", "mixed"), column("wgate", "values")
    extra: tuple[Tensor, ...] = ()
    weights: tuple[Tensor, ...] = ()
    if a.rule == "delta":
        extra = (column("wrates", "rates"),)
        mixed = convolution(t, mixed, "convolution", a.convolved)
        of_heads = {"value_heads": t.tp} if t.tp else {}
        weights = tuple(t.weight(name, ("value_heads",), of_heads) for name in ("decay", "decay_bias"))
    out = gate.like(name="answers")
    core = linear_core(t, mixed, extra, weights, out, Sizes(a.rule, a.key_head_dim, a.value_head_dim))
    if a.rule == "delta":
        core = gated_norm(t, core, gate, "out_norm", "value_head", ("B", "S", "value_heads"))
    else:
        core = gated_norm(t, core, gate, "out_norm", "values", ("B", "S"))
    row = {"values": t.tp} if t.tp else {}
    out = linear(t, core, "wo", ("D", "values"), row, ("B", "S", "D"), splits.stream)
    t.frame(h, t.gathered(h, splits.whole), mixed, gate, core)
    return out
