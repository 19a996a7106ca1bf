"""The core of attention: one flash kernel, or eager scores, softmax and values.

FLOPs are of the causal half for the flash kernel, which skips the rest, and whole for the eager one, which does not.
Backward counts twice the forward's (the kernel's own recomputation of the scores is its affair, and in its efficiency).
"""

from __future__ import annotations

from nanum.conventions import ATTENTION_CORE
from nanum.operators.elementwise import dropout
from nanum.operators.tape import Tape
from nanum.sharding import Tensor


def attention(t: Tape, q: Tensor, k: Tensor, v: Tensor, probability: float) -> Tensor:
    """`softmax(q k^T) v` for q [B, S, Q], k and v [B, S, K]; heads are split as Q is."""
    with t.region(ATTENTION_CORE):
        return _flash(t, q, k, v) if t.flash else _eager(t, q, k, v, probability)


def _heads(q: Tensor, name: str, dims: tuple[str, ...], dtype: str) -> Tensor:
    return Tensor(name, dims, {"B": q.split.get("B", ()), "A": q.split.get("Q", ())}, dtype)


def _flash(t: Tape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Saves q, k, v, the output, and fp32 log-sum-exp of each row."""
    out = q.like(name="attention")
    lse = _heads(q, "lse", ("B", "S", "A"), "fp32")
    flops = 2.0 * t.shapes.elements(q.dims, q.split) * t.shapes.dims["S"]
    t.emit("attention", (q, k, v), (out, lse), flops, attention=True)

    def transpose() -> None:
        new = [x.like(name="d_" + x.name) for x in (q, k, v)]
        t.emit("attention_backward", (t.grad(out), q, k, v, out, lse), new, 2 * flops, attention=True)
        for x, dx in zip((q, k, v), new, strict=True):
            t.add_grad(x, dx)

    return t.then(out, transpose)


def _eager(t: Tape, q: Tensor, k: Tensor, v: Tensor, probability: float) -> Tensor:
    """Saves q, k, v, and of each head's S x S scores: the softmax, and under dropout its mask and its result."""
    scores = _heads(q, "core_scores", ("B", "A", "S", "S"), t.dtype)
    s = t.shapes.part("S", ())
    flops = 2.0 * t.shapes.elements(q.dims, q.split) * s
    shape = (t.shapes.elements(("B", "A", "S"), scores.split), s, t.shapes.dims["head"])
    t.emit("core_scores", (q, k), (scores,), flops, shape)
    probs = t.kernel("core_softmax", (scores,), scores)

    def softmax_transpose() -> None:
        d = t.grad(probs)
        t.emit("d_core_softmax", (d, probs), (ds := scores.like(),))
        new = [x.like(name="d_" + x.name) for x in (q, k)]
        t.emit("dq", (ds, k), (new[0],), flops, shape)
        t.emit("dk", (ds, q), (new[1],), flops, shape)
        t.add_grad(q, new[0])
        t.add_grad(k, new[1])

    t.then(probs, softmax_transpose)
    kept = dropout(t, probs, probability, "core_dropout")
    out = q.like(name="core_values")
    t.emit("core_values", (kept, v), (out,), flops, shape)

    def values_transpose() -> None:
        d = t.grad(out)
        t.emit("d_values", (d, kept), (dv := v.like(),), flops, shape)
        t.emit("d_kept", (d, v), (dkept := kept.like(),), flops, shape)
        t.add_grad(v, dv)
        t.add_grad(kept, dkept)

    return t.then(out, values_transpose)
