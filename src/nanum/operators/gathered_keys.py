"""Attention of Transformer Engine to keys and values that are gathered in forward, and again in backward.

Read at TransformerEngine d0067d0 (pytorch/attention/dot_product_attention/context_parallel.py,
AttnFuncWithCPAndKVAllGather; neither fp8 nor packed sequences). Saved are a rank's own q, k, v, output and log-sum-exp.
What was gathered lies by ranks, each with a block from either end of a sequence, and is copied into the order of the
sequence; keys and values are gathered one after the other, and the compute waits. Each of a rank's two blocks then sees
the keys up to its end, by a kernel of its own: their outputs are copied together, and the gradients of their keys and
values, in the dtype of activations, are added into whole ones, put back into the order of ranks, and reduced.
"""

from __future__ import annotations

from typing import Any

from nanum.arrays import least
from nanum.operators.attention import Window, answers, flash_flops, flash_shape, log_sum_exp
from nanum.operators.exchange import exchange
from nanum.operators.tape import Tape
from nanum.sharding import Split, Tensor, reshard


def gathered_keys(t: Tape, q: Tensor, k: Tensor, v: Tensor, window: Window, axis: str) -> Tensor:
    """Attention for q [B, S, Q], k and v [B, S, K], whose rows are split over `axis`."""
    out, lse = answers(q, k, v, "attention"), log_sum_exp(q)
    rows = t.shapes.dims["S"]
    flops = (flash_flops(t, q, window.keys(rows)) + flash_flops(t, out, window.keys(rows))) / 2
    shape = flash_shape(t, q, flops)
    seen = _seen(t, window, axis)

    keys, values = (_whole(t, x, axis) for x in (k, v))
    room = out.like(name="zeros")  # of packed sequences, and made for others too
    t.emit("zeros", (), (room,))
    blocks = out.like(name="outputs of blocks")
    t.emit("attention", (q, keys, values), (blocks, lse), flops, shape, attention=True)
    t.emit("copy", (blocks,), (out,))
    t.frame(keys, values, room, blocks)

    def transpose() -> None:
        d = t.grad(out)
        dq = q.like(name="d_q")
        whole = tuple(x.like(name="d_" + x.name, split=_without(x, axis), partial=(axis,)) for x in (k, v))
        t.emit("zeros", (), (dq, *whole))
        keys, values = (_whole(t, x, axis) for x in (k, v))
        parts = tuple(
            x.like(name="part of " + x.name, size=t.shapes.bytes(x) * seen // rows) for x in whole
        )  # of both blocks, of the keys that each sees
        dq_parts = q.like(name="part of d_q")
        reads = d, q, keys, values, out, lse
        t.emit("attention_backward", reads, (dq_parts, *parts), 2 * flops, shape, attention=True)
        t.emit("copy", (dq_parts,), (dq,))
        t.emit("add", (*parts, *whole), whole)
        for x, dx in zip((k, v), whole, strict=True):
            t.emit("order_of_ranks", (dx,), (ordered := dx.like(),))
            back, moves = reshard(ordered, x.split)
            for m in moves:
                exchange(t, m.kind, m.axes, ordered, m.after)
            t.add_grad(x, back)
        t.frame(*reads, dq_parts, *parts, *whole)
        t.add_grad(q, dq)

    return t.then(out, transpose)


def _without(x: Tensor, axis: str) -> Split:
    return {**x.split, "S": tuple(a for a in x.split["S"] if a != axis)}


def _whole(t: Tape, x: Tensor, axis: str) -> Tensor:
    """All rows, in the order of the sequence."""
    (gather,) = reshard(x, _without(x, axis))[1]
    exchange(t, gather.kind, gather.axes, x, gather.after)
    return t.kernel("order_of_sequence", (gather.after,), gather.after)


def _seen(t: Tape, window: Window, axis: str) -> Any:
    """Rows of keys up to the ends of a rank's two blocks, together: i + 1 and 2c - i of the 2c blocks of a sequence; of
    a window no more than it and a block, each.
    """
    rows, ranks = t.shapes.dims["S"], t.shapes.ranks((axis,))
    block = rows // (2 * ranks)
    every = rows + block
    return every if window.size is None else least(every, 2 * (window.size + block))
