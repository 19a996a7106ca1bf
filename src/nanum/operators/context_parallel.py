"""Attention under context parallelism: each rank has its own rows of a sequence, and every row needs the keys of all.

Two ways are reshards, so that their exchanges, and the transposes of these, follow from the rules: Ulysses gives the
axis to the heads while attention runs (Jacobs et al., 2023), and gathered keys lose it. The third, a ring (Liu et al.,
2023), changes no split: blocks of keys and values pass every rank, and the gradients of a block travel with it and
return home. Its exchanges are those of `torch.distributed.tensor.experimental` (PyTorch 2.13,
`_context_parallel/_attention.py`).
"""

from __future__ import annotations

from nanum.operators.attention import attention, flash_flops, log_sum_exp
from nanum.operators.tape import Tape
from nanum.sharding import Split, Tensor, reshard

AXIS = "cp"


def context_attention(t: Tape, q: Tensor, k: Tensor, v: Tensor, probability: float) -> Tensor:
    """Attention for q [B, S, Q], k and v [B, S, K], whose rows are split over `cp` where the tape says how it meets the
    keys of other ranks.
    """
    if t.context == "ulysses":
        heads, keys, values = (t.resharded(x, _on_heads(x)) for x in (q, k, v))
        return t.resharded(attention(t, heads, keys, values, probability), q.split)
    if t.context == "allgather":
        keys, values = (t.resharded(x, _whole_rows(x)) for x in (k, v))
        return attention(t, q, keys, values, probability)
    if t.context == "ring":
        return _ring(t, q, k, v)
    return attention(t, q, k, v, probability)


def _whole_rows(x: Tensor) -> Split:
    return {**x.split, "S": tuple(a for a in x.split["S"] if a != AXIS)}


def _on_heads(x: Tensor) -> Split:
    """Heads are split over tp already; each rank's are split further."""
    heads = x.dims[-1]
    return {**_whole_rows(x), heads: (*x.split.get(heads, ()), AXIS)}


def _ring(t: Tape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Saves the rank's own q, k, v, output and log-sum-exp; keys and values go round again in backward."""
    out, lse = q.like(name="attention"), log_sum_exp(q)
    flops = flash_flops(t, q, t.shapes.dims["S"])
    t.emit("attention", (q, k, v, _round(t, k, v)), (out, lse), flops, attention=True)

    def transpose() -> None:
        others = _round(t, k, v)
        sums = q.like(name="d_" + q.name, dtype="fp32")  # fp32, like those of keys and values
        passing = _pair(k).like(name="d_kv", dtype="fp32")
        t.emit(
            "attention_backward", (t.grad(out), q, k, v, others, out, lse), (sums, passing), 2 * flops, attention=True
        )
        home = passing.like()
        t.exchange("permute", (AXIS,), passing, home, times=t.shapes.ranks((AXIS,)))
        dq = t.kernel("to_half", (sums,), q) if t.half else sums
        dk, dv = (x.like(name="d_" + x.name) for x in (k, v))
        t.emit("split", (home,), (dk, dv))
        for x, dx in zip((q, k, v), (dq, dk, dv), strict=True):
            t.add_grad(x, dx)

    return t.then(out, transpose)


def _pair(k: Tensor) -> Tensor:
    return Tensor("kv", ("pair", *k.dims), k.split, k.dtype)


def _round(t: Tape, k: Tensor, v: Tensor) -> Tensor:
    """Keys and values of the other ranks, sent as one buffer: gathered, their pieces taken in turn, or passed on one by
    one.
    """
    t.emit("cat", (k, v), (own := _pair(k),))
    if t.conventions.ring_gathers:
        (gather,) = reshard(own, _whole_rows(own))[1]
        t.exchange(gather.kind, gather.axes, own, gather.after)  # pieces one after the other, not put in order
        return gather.after
    t.exchange("permute", (AXIS,), own, arrived := own.like(), times=t.shapes.ranks((AXIS,)) - 1)
    return arrived
