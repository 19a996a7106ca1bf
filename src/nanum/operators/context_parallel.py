"""Attention under context parallelism: each rank has its own rows of a sequence, and every row needs the keys of all.

Two ways are reshards, so that their exchanges, and the transposes of these, follow from the rules: Ulysses gives the
axis to the heads while attention runs (Jacobs et al., 2023), and gathered keys lose it. The third, a ring (Liu et al.,
2023), changes no split: blocks of keys and values pass every rank, and the gradients of a block travel with it and
return home. Its exchanges are those of `torch.distributed.tensor.experimental` (PyTorch 2.13,
`_context_parallel/_attention.py`).
"""

from __future__ import annotations

from typing import Any

from nanum.conventions import ATTENTION_CORE, RING
from nanum.operators.attention import (
    WHOLE,
    Window,
    attention,
    flash_flops,
    flash_shape,
    keys_and_values,
    log_sum_exp,
    scratch,
)
from nanum.operators.balanced_ring import balanced_ring, kernel_name
from nanum.operators.exchange import exchange
from nanum.operators.gathered_keys import gathered_keys
from nanum.operators.overlapped_ring import overlapped_ring
from nanum.operators.tape import Tape
from nanum.sharding import Split, Tensor, reshard

AXIS = "cp"


def context_attention(t: Tape, q: Tensor, k: Tensor, v: Tensor, probability: float, window: Window = WHOLE) -> Tensor:
    """Attention for q [B, S, Q], k and v [B, S, K], whose rows are split over `cp` where the tape says how it meets the
    keys of other ranks.
    """
    with t.region(ATTENTION_CORE):
        return _attention(t, q, k, v, probability, window)


def _attention(t: Tape, q: Tensor, k: Tensor, v: Tensor, probability: float, window: Window) -> Tensor:
    if t.context == "ulysses":
        heads, keys, values = (t.resharded(x, _on_heads(x)) for x in (q, k, v))
        out = attention(t, heads, keys, values, probability, window)
        home = {out.dims[-1] if d == q.dims[-1] else d: axes for d, axes in q.split.items()}
        return t.resharded(out, home)
    if t.context == "allgather" and t.flash and t.conventions.gathers_keys_again:
        return gathered_keys(t, q, k, v, window, AXIS)
    if t.context == "allgather":
        keys, values = (t.resharded(x, _whole_rows(x)) for x in (k, v))
        return attention(t, q, keys, values, probability, window)
    if t.context == "ring" and t.conventions.ring_overlaps:
        return overlapped_ring(t, q, k, v, window.keys(t.shapes.dims["S"]), AXIS)
    if t.context == "ring" and t.shapes.at is None:
        return balanced_ring(t, q, k, v, window.keys(t.shapes.dims["S"]), AXIS, _in_ring)
    if t.context == "ring":
        return _ring(t, q, k, v, window)
    return attention(t, q, k, v, probability, window)


def _whole_rows(x: Tensor) -> Split:
    return {**x.split, "S": tuple(a for a in x.split["S"] if a != AXIS)}


def _on_heads(x: Tensor) -> Split:
    """Heads are split over tp already; each rank's are split further."""
    heads = x.dims[-1]
    return {**_whole_rows(x), heads: (*x.split.get(heads, ()), AXIS)}


# --- the ring ---------------------------------------------------------------------------------------------------------
def _ring(t: Tape, q: Tensor, k: Tensor, v: Tensor, window: Window) -> Tensor:
    """Saves the rank's own q, k, v, output and log-sum-exp; keys and values go round again in backward.

    A rank computes on the blocks that it sees, one kernel each: the first on its own alone, the last on all of them.
    """
    flops = flash_flops(t, q, window.keys(t.shapes.dims["S"])) / _blocks(t)  # of each block that it sees
    out, lse, others = _ring_forward(t, q, k, v, flops)

    def transpose() -> None:
        for x, dx in zip((q, k, v), _ring_backward(t, q, k, v, out, lse, flops), strict=True):
            t.add_grad(x, dx)

    t.frame(others)
    return t.then(out, transpose)


def _blocks(t: Tape) -> int:
    """Blocks of keys that the causal mask shows the rank: its own, and those of the ranks before."""
    return 1 + (t.shapes.at or {}).get(AXIS, 0)


def _ring_forward(t: Tape, q: Tensor, k: Tensor, v: Tensor, flops: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The output, its log-sum-exp, and the keys and values of other ranks, which are there until it returns."""
    seen = _blocks(t)
    own, _, others = _in_ring(t, k, v)
    block, total, lse = _block(t, q, (own,), flops)
    for _ in range(1, seen):
        block, wide, block_lse = _block(t, q, (others, block, total, lse), flops)
        total, lse = _merged(t, total, lse, wide, block_lse, block)
    if not t.half:
        return total, lse, others
    saved = lse.like() if kernel_name(t) == "ring_attention" else lse  # what one operation writes is kept together
    out = q.like(name="attended")
    t.emit("attended", (total, block, lse), (out,) if saved is lse else (out, saved))
    return out, saved, others


def _block(t: Tape, q: Tensor, reads: tuple[Tensor, ...], flops: Any) -> tuple[Tensor, Tensor, Tensor]:
    """One block's output, the same in fp32, and its log-sum-exp."""
    block, lse = q.like(name="attention"), log_sum_exp(q)
    writes, shape = (block, lse, *scratch(t, q, q)), flash_shape(t, q, flops)
    t.emit(kernel_name(t), (q, *reads), writes, flops, shape, attention=True)
    return block, t.kernel("to_float", (block,), q, "fp32") if t.half else block, lse


def _merged(
    t: Tape, total: Tensor, lse: Tensor, wide: Tensor, block_lse: Tensor, block: Tensor
) -> tuple[Tensor, Tensor]:
    """`total - sigmoid(block_lse - lse) * (total - wide)`, and the log of both sums of exponentials."""
    scaled = t.kernel("mul", (t.kernel("sub", (total, wide), wide), lse, block_lse), wide)
    merged = t.kernel("sub", (total, scaled, wide, block), wide)
    return merged, t.kernel("logaddexp", (lse, block_lse, total, wide), lse)


def _ring_backward(
    t: Tape, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, flops: Any
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v. Sums are fp32; those of a block of keys and values travel one rank with each step."""
    d = t.grad(out)
    sums, passing = q.like(name="sums", dtype="fp32"), keys_and_values(k).like(name="d_kv", dtype="fp32")
    t.emit("zeros", (), (sums, passing))
    own, flat, others = _round(t, k, v)
    seen, ranks = _blocks(t), t.shapes.ranks((AXIS,))
    hidden = seen == 1 or seen < ranks  # the last of all blocks is hidden to every rank but the last
    steps = [*range(seen), *([seen] if hidden else [])]
    grads: tuple[Tensor, ...] = ()
    sent: tuple[Tensor, ...] = ()  # what the step before passed on
    for i in steps:
        if i < seen:
            reads = d, q, others if i else own, out, lse, *grads, *sent
            new = tuple(x.like(name="d_" + x.name) for x in (q, k, v))
            writes, shape = (*new, *scratch(t, q, q, backward=True)), flash_shape(t, q, flops)
            t.emit("attention_backward", reads, writes, 2 * flops, shape, attention=True)
        else:
            reads = own, *sent
            new = tuple(t.kernel("zeros", (old, *reads), x, "fp32") for x, old in zip((q, k, v), grads, strict=True))
        t.emit("add", (passing, *new[1:], *sent), ())
        t.emit("cat", (passing,), (packed := passing.like(),))
        last = i == steps[-1]
        arrived = passing.like(factor=None if t.half or not last else 0)
        exchange(t, "permute", (AXIS,), packed, arrived, times=ranks - len(steps) + 1 if last else 1)
        t.emit("add", (sums, new[0], *(() if i else (own,))), ())
        grads, sent, before, passing = new, (passing, packed), passing, arrived
    dq = t.kernel("to_half", (sums,), q) if t.half else sums
    dk, dv = (x.like(name="d_" + x.name) for x in (k, v))
    t.emit("to_half" if t.half else "views", (passing, packed), (dk, dv))  # in fp32 they are what came home
    t.frame(d, q, k, v, out, lse, flat, others, before, passing)
    return dq, dk, dv


def _in_ring(t: Tape, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with t.region(RING):
        return _round(t, k, v)


def _round(t: Tape, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rank's own keys and values as the kernel reads them, the buffer that is sent, and those of the other ranks:
    gathered, their pieces taken in turn, or passed on one by one.
    """
    t.emit("contiguous", (k, v), (own := keys_and_values(k),))
    t.emit("cat", (k, v), (flat := keys_and_values(k),))
    if t.conventions.ring_gathers:
        (gather,) = reshard(flat, _whole_rows(flat))[1]
        exchange(t, gather.kind, gather.axes, flat, gather.after)  # pieces one after the other, not put in order
        return own, flat, gather.after
    exchange(t, "permute", (AXIS,), flat, arrived := flat.like(), times=t.shapes.ranks((AXIS,)) - 1)
    return own, flat, arrived
