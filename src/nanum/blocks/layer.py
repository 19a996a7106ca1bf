"""A pre-norm decoder layer: attention and a feed-forward block, each with its residual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanum.blocks.body import Body, Emitted, Streams, emit, new_tape
from nanum.blocks.experts import expert_dims, mixture
from nanum.blocks.latent import latent_attention, latent_dims
from nanum.conventions import EVERYTHING, NOTHING, Conventions
from nanum.layout import Recompute, Structure
from nanum.model import Attention, Experts, LatentAttention, Layer, Mlp, Model
from nanum.operators.context_parallel import context_attention
from nanum.operators.elementwise import dropout, pointwise, residual, rotary, swiglu
from nanum.operators.matmul import linear
from nanum.operators.norm import norm
from nanum.operators.tape import Tape
from nanum.sharding import Shapes, Tensor


def layer_dims(layer: Layer, dims: Mapping[str, Any]) -> dict[str, Any]:
    """Global sizes of what is inside a layer, beside `dims` of what is around it."""
    a = layer.attention
    inside = {
        "Q": a.num_attention_heads * a.head_dim,
        "K": a.num_key_value_heads * a.head_dim,
        "A": a.num_attention_heads,
        "head": a.head_dim,
    }
    if isinstance(a, LatentAttention):
        inside |= latent_dims(a)
    if isinstance(layer.mlp, Mlp):
        return {**inside, "F": layer.mlp.intermediate_size}
    return {**inside, **expert_dims(layer.mlp, dims["B"] * dims["S"])}


def emit_layer(model: Model, kind: Layer, shapes: Shapes, conventions: Conventions, structure: Structure) -> Emitted:
    """One layer, forward and backward."""
    tape, splits = new_tape(shapes, conventions, structure), Streams.of(structure)
    x = Tensor("x", ("B", "S", "D"), splits.stream, tape.dtype)

    def layer() -> Tensor:
        y = feed_forward(tape, attend(tape, x, model, kind.attention, splits), model, kind.mlp, splits)
        tape.frame(x)
        return y

    return emit(tape, layer, x=x)


def layer_body(layer: Emitted, recompute: Recompute) -> Body:
    """The layer under a recompute mode: full keeps its input alone, selective what the engine keeps."""
    kept = {"none": EVERYTHING, "full": NOTHING, "selective": layer.tape.conventions.selective}
    return layer.body(kept[recompute])


def attend(t: Tape, x: Tensor, model: Model, a: Attention | LatentAttention, splits: Streams) -> Tensor:
    """`x + W_o attention(W_q h, W_k h, W_v h)`, h the normed x. Column-parallel, then row-parallel over the heads."""
    tp = t.tp
    h = norm(t, x, "norm1", model.norm)
    if isinstance(a, LatentAttention):
        return residual(t, x, dropout(t, latent_attention(t, h, a, splits), model.hidden_dropout))

    def column(name: str, dim: str) -> Tensor:
        split = {dim: tp} if tp else {}
        return linear(t, h, name, (dim, "D"), split, ("B", "S", dim), {**splits.whole, **split}, bias=a.qkv_bias)

    q, k, v = column("wq", "Q"), column("wk", "K"), column("wv", "K")
    rotated = (rotary(t, q), rotary(t, k)) if model.position == "rotary" else (q, k)
    core = context_attention(t, *rotated, v, a.dropout)
    row = {"Q": tp} if tp else {}
    out = linear(t, core, "wo", ("D", "Q"), row, ("B", "S", "D"), splits.stream, bias=a.output_bias)
    t.frame(h, t.move(h, splits.whole), q, k, v, core)
    return residual(t, x, dropout(t, out, model.hidden_dropout))


def feed_forward(t: Tape, x: Tensor, model: Model, mlp: Mlp | Experts, splits: Streams) -> Tensor:
    """`x + W_down act(W_up h)`, or with a gate `x + W_down (act(W_gate h) * W_up h)`."""
    tp = t.tp
    split = {"F": tp} if tp else {}
    h = norm(t, x, "norm2", model.norm)
    if isinstance(mlp, Experts):
        return residual(t, x, mixture(t, h, mlp, splits))

    def column(name: str) -> Tensor:
        return linear(t, h, name, ("F", "D"), split, ("B", "S", "F"), {**splits.whole, **split}, bias=mlp.bias)

    inner = swiglu(t, column) if mlp.gated else pointwise(t, mlp.activation, (column("up"),))
    out = linear(t, inner, "down", ("D", "F"), split, ("B", "S", "D"), splits.stream, bias=mlp.bias)
    t.frame(h, t.move(h, splits.whole), inner)
    return residual(t, x, dropout(t, out, model.hidden_dropout))
