"""Attention whose scores have a learned bias of the distance between rows (T5: Raffel et al. 2019, arXiv 1910.10683).

It runs in eager kernels, as in `transformers` (models/t5/modeling_t5.py: `T5Attention`): no flash kernel of PyTorch's
gives the bias its gradient. Heads are copied into one piece for the products, and a softmax is of fp32.
"""

from __future__ import annotations

from nanum.conventions import ATTENTION_CORE
from nanum.operators.elementwise import dropout
from nanum.operators.tape import Tape
from nanum.sharding import BATCH_AXES, Tensor

TOKEN_AXES = (*BATCH_AXES, "cp")


def bias_of_scores(t: Tape) -> Tensor:
    """[S, T, A]: one for all sequences, and each rank of tp has that of its own heads."""
    return Tensor("bias", ("S", "T", "A"), {"A": t.tp} if t.tp else {}, t.dtype)


def bias_gradient(bias: Tensor) -> Tensor:
    """Of a rank's own sequences: a pending sum, carried out when it has become that of the table."""
    return bias.like(name="d_bias", partial=TOKEN_AXES)


def relative_bias(t: Tape, *, causal: bool) -> Tensor:
    """The bias, looked up in a table [buckets, A] by the bucket of each distance, of which backward reads the int64
    numbers. What a causal mask hides is -inf in it.
    """
    bias = bias_of_scores(t)
    w = t.weight("relative", ("buckets", "A"), bias.split)
    buckets = Tensor("buckets", ("S", "T"), {}, "int64")
    t.emit("buckets", (), (buckets,))
    values = bias if not causal else bias.like(name="unmasked")
    t.emit("relative", (buckets, w), (values,))
    if causal:
        t.emit("mask", (values,), (bias,))

    def transpose() -> None:
        d = t.pending(bias)
        whole = t.kernel("copy", (d,), d)
        t.emit(
            "embedding_backward",
            (whole, buckets),
            (dw := Tensor("d_relative", w.dims, w.split, t.dtype, d.partial, "grads"),),
        )
        t.set_weight_grad(w, dw)

    return t.then(bias, transpose)


def biased_attention(t: Tape, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, probability: float) -> Tensor:
    """`softmax(q k^T + bias) v` for q [B, S, Q], k and v [B, S, K]. Saves copies of q, k and v, and of each head's
    scores the fp32 softmax and, in half precision, the same as the product reads it.
    """
    with t.region(ATTENTION_CORE):
        heads, keys, values = (_in_one_piece(t, x) for x in (q, k, v))
        probs = _softmax(t, _scores(t, heads, keys, bias))
        kept = dropout(t, probs, probability, "core_dropout")
        return _in_one_piece(t, _values(t, kept, heads, values))


def _in_one_piece(t: Tape, x: Tensor) -> Tensor:
    y = t.kernel("copy", (x,), x)
    return t.then(y, lambda: t.add_grad(x, t.kernel("copy", (t.grad(y),), x)))


def _product(t: Tape, q: Tensor) -> tuple[float, tuple[object, ...]]:
    """FLOPs and shape of a product of a rank's queries with all keys."""
    rows = t.shapes.dims["T"]
    heads = {"B": q.split.get("B", ()), "S": q.split.get("S", ()), "A": q.split.get("Q", ())}
    shape = (t.shapes.elements(("B", "A", "S"), heads), rows, t.shapes.dims["head"])
    return 2.0 * t.shapes.elements(q.dims, q.split) * rows, shape


def _scores(t: Tape, q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """The bias is added in place."""
    split = {"B": q.split.get("B", ()), "S": q.split.get("S", ()), "A": q.split.get("Q", ())}
    scores = Tensor("core_scores", ("B", "A", "S", "T"), split, t.dtype)
    flops, shape = _product(t, q)
    t.emit("core_scores", (q, k), (scores,), flops, shape)
    t.emit("add_bias", (scores, bias), (scores,))

    def transpose() -> None:
        d = t.grad(scores)
        if t.requires_grad(bias):
            t.emit("sum", (d,), (db := bias_gradient(bias),))
            t.add_grad(bias, db)
        for name, x, other in (("dq", q, k), ("dk", k, q)):
            t.emit(name, (d, other), (dx := x.like(name="d_" + x.name),), flops, shape)
            t.add_grad(x, dx)

    return t.then(scores, transpose)


def _softmax(t: Tape, scores: Tensor) -> Tensor:
    wide = t.kernel("to_float", (scores,), scores, "fp32") if t.half else scores
    soft = t.kernel("core_softmax", (wide,), wide)
    probs = t.kernel("to_half", (soft,), scores) if t.half else soft

    def transpose() -> None:
        d = t.grad(probs)
        d = t.kernel("to_float", (d,), d, "fp32") if t.half else d
        ds = t.kernel("d_core_softmax", (d, soft), soft)
        t.add_grad(scores, t.kernel("to_half", (ds,), scores) if t.half else ds)

    return t.then(probs, transpose)


def _values(t: Tape, probs: Tensor, q: Tensor, v: Tensor) -> Tensor:
    out = q.like(name="core_values")
    flops, shape = _product(t, q)
    t.emit("core_values", (probs, v), (out,), flops, shape)

    def transpose() -> None:
        d = t.kernel("copy", (t.grad(out),), out)
        t.emit("d_values", (d, probs), (dv := v.like(name="d_v"),), flops, shape)
        t.emit("d_kept", (d, v), (dkept := probs.like(name="d_kept"),), flops, shape)
        t.add_grad(v, dv)
        t.add_grad(probs, dkept)

    return t.then(out, transpose)
