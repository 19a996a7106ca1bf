"""The core of attention: one flash kernel, or eager scores, softmax and values.

FLOPs are of the causal half for the flash kernel, which skips the rest, and whole for the eager one, which does not.
Backward counts twice the forward's (the kernel's own recomputation of the scores is its affair, and in its efficiency).
Rows of queries and rows of keys are two dims, S and T: queries may be split where keys are whole. The causal half of a
rank's rows is then the average over the ranks; the first has less, the last more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanum.arrays import least
from nanum.conventions import ATTENTION_CORE
from nanum.dtypes import ITEMSIZE
from nanum.operators.elementwise import dropout
from nanum.operators.tape import Tape
from nanum.sharding import Tensor


@dataclass(frozen=True)
class Window:
    """Which keys a token sees, of itself and those before: all (None), the last `size`, or those of its own chunk. In
    an encoder, those after it too.
    """

    size: int | None = None
    chunked: bool = False
    causal: bool = True

    def keys(self, rows: Any) -> Any:
        """Twice the keys that each of `rows` tokens sees on average, its own counted as half: `rows` where it sees all,
        since the causal half of the square of scores is rows²/2. Of a window of w, the first tokens see 1, 2, … and all
        from the w-th on see w; chunks are squares of their own.
        """
        if not self.causal:
            return 2 * rows
        if self.size is None:
            return rows
        if self.chunked:
            whole, rest = rows // self.size, rows % self.size
            return (whole * self.size**2 + rest**2) / rows
        size = least(self.size, rows)
        return 2 * size - 1 - size * (size - 1) / rows


WHOLE = Window()


def attention(t: Tape, q: Tensor, k: Tensor, v: Tensor, probability: float, window: Window = WHOLE) -> Tensor:
    """`softmax(q k^T) v` for q [B, S, Q], k and v [B, S, K]; heads are split as Q is. A rank has all keys that its
    queries need. An eager kernel masks what is outside the window; a flash kernel leaves it out.
    """
    with t.region(ATTENTION_CORE):
        return _flash(t, q, k, v, window) if t.flash else _eager(t, q, k, v, probability, window)


def _heads(q: Tensor, name: str, dims: tuple[str, ...], dtype: str) -> Tensor:
    return Tensor(name, dims, {"B": q.split.get("B", ()), "S": q.split.get("S", ()), "A": q.split.get("Q", ())}, dtype)


def _scores(t: Tape, q: Tensor) -> Tensor:
    return _heads(q, "core_scores", ("B", "A", "S", "T"), t.dtype)


def sloped(t: Tape, q: Tensor) -> None:
    """ALiBi: eager scores begin as a copy of what positions say, which their product reads and adds to (`baddbmm` of a
    bias that is broadcast). A fused kernel has it in registers.
    """
    if not t.flash:
        t.pass_over("alibi", _scores(t, q))


def log_sum_exp(q: Tensor) -> Tensor:
    """fp32, of each row and head."""
    return _heads(q, "lse", ("B", "S", "A"), "fp32")


def keys_and_values(k: Tensor) -> Tensor:
    """Keys like `k`, and values like them, in one buffer."""
    return Tensor("kv", ("pair", *k.dims), k.split, k.dtype)


def flash_flops(t: Tape, q: Tensor, keys: Any) -> Any:
    """Of the causal half of q's rows by `keys` rows: two products, of two operations each."""
    return 2.0 * t.shapes.elements(q.dims, q.split) * keys


def flash_shape(t: Tape, q: Tensor, flops: Any) -> tuple[Any, Any, Any]:
    """Heads of a rank's sequences, the side of the causal square of scores whose forward pass takes these FLOPs, and
    the size of a head.
    """
    head = t.shapes.dims["head"]
    rows = t.shapes.elements(("B", "A"), {"B": q.split.get("B", ()), "A": q.split.get("Q", ())})
    return rows, (flops / (2.0 * rows * head)) ** 0.5, head


def answers(q: Tensor, k: Tensor, v: Tensor, name: str) -> Tensor:
    """Of each query's heads: as wide as values, where these are not as wide as keys (each head then has its own)."""
    if v.dims == k.dims:
        return q.like(name=name)
    heads = q.split.get(q.dims[-1], ())
    rows = {d: axes for d, axes in q.split.items() if d != q.dims[-1]}
    return Tensor(name, v.dims, {**rows, **({v.dims[-1]: heads} if heads else {})}, q.dtype)


def _keys(t: Tape, k: Tensor) -> Any:
    return t.shapes.part("S", k.split.get("S", ()))


def _gradient(q: Tensor, x: Tensor) -> Tensor:
    """What a rank's own queries say of `x`: of keys and values that are whole where the queries are split, a pending
    sum.
    """
    pending = tuple(a for a in q.split.get("S", ()) if a not in x.split.get("S", ()))
    return x.like(name="d_" + x.name, partial=pending, size=None)


def _mask(t: Tape, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """What a kernel is told of the rows that its queries are among those of more keys."""
    rows, keys = q.split.get("S", ()), k.split.get("S", ())
    if rows == keys or not t.conventions.cpu_attention:
        return ()
    mask = Tensor("mask", ("S", "T"), {"S": rows, "T": keys}, t.dtype)
    t.emit("mask", (), (mask,))
    return (mask,)


def scratch(t: Tape, q: Tensor, k: Tensor, *, backward: bool = False) -> tuple[Tensor, ...]:
    """What the CPU's kernel takes meanwhile, on one thread: the scores of a block of rows and keys, and of rows their
    maxima, sums and outputs (PyTorch's aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
    """
    if not t.conventions.cpu_attention:
        return ()
    rows = t.shapes.part("S", q.split.get("S", ()))
    rows, keys = least(32 + 32 * (rows >= 192) + 192 * (rows >= 768), rows), least(512, _keys(t, k))
    scores = rows * keys * (4 + (ITEMSIZE[t.dtype] if t.half else 0))
    size = 2 * scores + 4 * rows if backward else scores + 4 * rows * (2 + t.shapes.dims["head"])
    return (t.buffer("the kernel's scratch", size),)


def _flash(t: Tape, q: Tensor, k: Tensor, v: Tensor, window: Window) -> Tensor:
    """Saves q, k, v, the output, and fp32 log-sum-exp of each row."""
    out = answers(q, k, v, "attention")
    lse, flops = log_sum_exp(q), (t.shapes.elements(q.dims, q.split) + t.shapes.elements(out.dims, out.split)) * 1.0
    flops = flops * window.keys(_keys(t, k))
    shape = flash_shape(t, q, flops)
    t.emit("attention", (q, k, v, *_mask(t, q, k)), (out, lse, *scratch(t, q, k)), flops, shape, attention=True)

    def transpose() -> None:
        new = [_gradient(q, x) for x in (q, k, v)]
        reads = t.grad(out), q, k, v, out, lse, *_mask(t, q, k)
        writes = *new, *scratch(t, q, k, backward=True)
        t.emit("attention_backward", reads, writes, 2 * flops, shape, attention=True)
        for x, dx in zip((q, k, v), new, strict=True):
            t.add_grad(x, dx)

    return t.then(out, transpose)


def _eager(t: Tape, q: Tensor, k: Tensor, v: Tensor, probability: float, window: Window) -> Tensor:
    """Saves q, k, v, and of each head's S x T scores: the softmax, and under dropout its mask and its result. A fused
    softmax reads no scores that are masked (Megatron's scaled_upper_triang_masked_softmax).
    """
    scores = _scores(t, q)
    s = _keys(t, k)
    flops = 2.0 * t.shapes.elements(q.dims, q.split) * s
    tall, head = t.shapes.elements(("B", "A", "S"), scores.split), t.shapes.dims["head"]
    heads = t.shapes.elements(("B", "A"), scores.split)

    def product(name: str, reads: tuple[Tensor, Tensor], out: Tensor, *, wide: bool) -> None:
        """Of each head: scores are `wide`, and sums over a head; the others are a head wide, and sums over scores."""
        n, summed = (s, head) if wide else (head, s)
        t.emit(name, reads, (out,), flops, (tall, n, summed), products=heads)

    product("core_scores", (q, k), scores, wide=True)
    unread = -t.shapes.bytes(scores) // 2 if window.causal and "softmax" in t.conventions.fused else 0
    t.emit("core_softmax", (scores,), (probs := scores.like(name="core_softmax"),), besides=unread)

    def softmax_transpose() -> None:
        d = t.grad(probs)
        t.emit("d_core_softmax", (d, probs), (ds := scores.like(),), besides=2 * unread)
        for name, x, other in (("dq", q, k), ("dk", k, q)):
            if t.requires_grad(x):
                product(name, (ds, other), dx := _gradient(q, x), wide=False)
                t.add_grad(x, dx)
        if "heads" in t.conventions.more_passes:
            t.pass_over("d_heads", q, k, v)

    t.then(probs, softmax_transpose)
    kept = dropout(t, probs, probability, "core_dropout")
    out = answers(q, k, v, "core_values")
    product("core_values", (kept, v), out, wide=False)
    if "heads" in t.conventions.more_passes:
        t.pass_over("order_rows", out)

    def values_transpose() -> None:
        d = t.grad(out)
        product("d_values", (d, kept), dv := _gradient(q, v), wide=False)
        product("d_kept", (d, v), dkept := kept.like(), wide=True)
        t.add_grad(v, dv)
        t.add_grad(kept, dkept)

    return t.then(out, values_transpose)
