"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come out of one vector.

What is down-projected lies as the residual stream does: under sequence parallelism it is the normed latent vectors that
are gathered, not the block's input.
"""

from __future__ import annotations

from typing import Any

from nanum.blocks.body import Streams
from nanum.conventions import LATENT_UP
from nanum.model import LatentAttention
from nanum.operators.context_parallel import context_attention
from nanum.operators.elementwise import rotary
from nanum.operators.matmul import linear
from nanum.operators.norm import norm
from nanum.operators.tape import Tape
from nanum.sharding import Tensor


def latent_dims(a: LatentAttention) -> dict[str, Any]:
    """Global sizes: of the vectors, of the rotary key that all heads share, and of what the heads make of them."""
    heads = a.num_attention_heads
    return {
        "latent_q": a.q_lora_rank or 0,
        "latent_kv": a.kv_lora_rank,
        "rope": a.qk_rope_head_dim,
        "down_kv": a.kv_lora_rank + a.qk_rope_head_dim,
        "nope": heads * a.qk_nope_head_dim,
        "up_kv": heads * (a.qk_nope_head_dim + a.v_head_dim),
        "values": heads * a.v_head_dim,
    }


def latent_attention(t: Tape, h: Tensor, a: LatentAttention, splits: Streams) -> Tensor:
    """`W_o attention(q, k, v)` for h [B, S, D], in the residual stream's split. Saves q, k, v whole, as the kernel
    reads them, and the latent vectors.
    """
    tp = t.tp

    def down(name: str, dim: str) -> Tensor:
        return linear(t, h, name, (dim, "D"), {}, ("B", "S", dim), splits.stream, bias=a.bias)

    def up(x: Tensor, name: str, dim: str) -> Tensor:
        split = {dim: tp} if tp else {}
        return linear(t, x, name, (dim, x.dims[-1]), split, ("B", "S", dim), {**splits.whole, **split})

    low = down("wq_down", "latent_q") if a.q_lora_rank else h
    with t.region(LATENT_UP):
        q = up(norm(t, low, "q_norm", "rms_norm"), "wq_up", "Q") if a.q_lora_rank else up(h, "wq", "Q")
    latent, rope = _parts(t, down("wkv_down", "down_kv"), "latent_kv", "rope")
    rope = t.resharded(rope, splits.whole)
    # Exchanges between ranks of a context make their own copies.
    views = t.conventions.values_are_views and t.context == "none"
    with t.region(LATENT_UP):
        rope = rotary(t, rope)
        both = up(norm(t, latent, "kv_norm", "rms_norm"), "wkv_up", "up_kv")
        nope, v = _parts(t, both, "nope", "values", views=views)
        k = _keys(t, nope, rope)
        turned = rotary(t, q, a.qk_rope_head_dim)
    core = context_attention(t, turned, k, v, a.dropout)
    row = {"values": tp} if tp else {}
    out = linear(t, core, "wo", ("D", "values"), row, ("B", "S", "D"), splits.stream, bias=a.bias)
    t.frame(h, q, k, v, core)
    return out


def _parts(t: Tape, x: Tensor, first: str, second: str, *, views: bool = False) -> tuple[Tensor, Tensor]:
    """Two tensors out of one, cut along its last dim; they lie as it does. `views` have no bytes of their own, and the
    one that they look into is there as long as they are.
    """
    cut = x.split.get(x.dims[-1], ())
    pieces = tuple(
        Tensor(
            dim, (*x.dims[:-1], dim), {**_rows(x), **({dim: cut} if cut else {})}, x.dtype, size=0 if views else None
        )
        for dim in (first, second)
    )
    t.emit("split", (x,), pieces)

    def transpose() -> None:
        dx, held = x.like(name="d_" + x.name), (x,) if views else ()
        t.emit("cat", tuple(t.grad(p) for p in pieces), (dx,), holds=held)
        t.add_grad(x, dx)

    t.then(pieces[1], transpose)
    return pieces[0], pieces[1]


def _rows(x: Tensor) -> dict[str, tuple[str, ...]]:
    return {d: axes for d, axes in x.split.items() if d != x.dims[-1]}


def _keys(t: Tape, nope: Tensor, rope: Tensor) -> Tensor:
    """Each head's own part of its key beside the part that all share."""
    cut = nope.split.get("nope", ())
    k = Tensor("k", ("B", "S", "K"), {**_rows(nope), **({"K": cut} if cut else {})}, nope.dtype)
    t.emit("cat", (nope, rope), (k,))

    def transpose() -> None:
        dk = t.grad(k)
        shared = rope.like(name="d_rope", partial=cut)  # each rank's heads have a part of its gradient
        t.emit("split", (dk,), (dn := nope.like(name="d_nope", size=None), shared))
        t.add_grad(nope, dn)
        t.add_grad(rope, shared)

    return t.then(k, transpose)
