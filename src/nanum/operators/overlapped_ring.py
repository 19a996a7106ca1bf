"""Ring attention of Transformer Engine: each block's exchange beside the attention to the block before it.

Read at TransformerEngine d0067d0 (pytorch/attention/dot_product_attention/context_parallel.py,
AttnFuncWithCPAndKVP2P; neither fp8 nor packed sequences). A rank has a block from either end of a sequence, so each of
the c steps takes a c-th of its causal attention. Keys and values pass in one buffer; every block that arrives, and
every step's output, is there until forward returns, and the last that arrived is what is saved: backward begins with
it. There the gradients of keys and values follow one step behind these, in their dtype, in two buffers that take turns.
"""

from __future__ import annotations

from typing import Any

from nanum.operators.attention import flash_flops, flash_shape, keys_and_values, log_sum_exp
from nanum.operators.exchange import collective
from nanum.operators.tape import Tape
from nanum.program import CONTEXT_STREAM, Compute, Node, Wait
from nanum.sharding import Tensor

TICKET = "ring"


def overlapped_ring(t: Tape, q: Tensor, k: Tensor, v: Tensor, keys: Any, axis: str) -> Tensor:
    """Attention for q [B, S, Q], k and v [B, S, K], whose rows are split over `axis`, where each of a sequence's rows
    sees half of `keys` on average.
    """
    ranks, block = t.shapes.ranks((axis,)), keys_and_values(k)
    flops = flash_flops(t, q, keys) / ranks  # of a step
    whole, own = t.shapes.bytes(block), t.shapes.bytes(q)
    later = ranks - 1

    def step(name: str, sent: Any, operations: Any, moved: Any) -> tuple[Node, ...]:
        """An exchange of so many bytes, and a step's attention beside it."""
        node = collective(t.shapes, "permute", (axis,), block.like(size=sent), block, t.phase, "activations")
        shape = flash_shape(t, q, flops)
        library = t.conventions.attention_library
        kernel = Compute(name, t.phase, operations, moved, t.dtype, shape, library, calls=t.calls)
        return node.started(t.phase, CONTEXT_STREAM, TICKET), kernel, Wait(CONTEXT_STREAM, TICKET)

    t.emit("cat", (k, v), (mine := block.like(),))
    passed = t.buffer("blocks passed on", whole * (ranks - 2))
    arrived = block.like()
    outputs = t.buffer("outputs of steps", own * later)  # of the last rank, which sees all of each block with all rows
    t.loop("ring", (q, mine), (passed, arrived, outputs), later, *step("attention", whole, flops, whole + 2 * own))
    out, lse = q.like(name="attention"), log_sum_exp(q)
    last = q.like(name="output of a step")
    t.emit("attention", (q, arrived), (last, lse), flops, flash_shape(t, q, flops), attention=True)
    t.emit("merge", (outputs, last, lse), (out,))
    t.frame(mine, passed, outputs, last)

    def transpose() -> None:
        d = t.grad(out)
        two = [t.buffer("kv and d_kv", 2 * whole) for _ in range(2)]
        t.emit("copy", (arrived,), (dq := q.like(name="d_q"), *two))
        reads = d, q, arrived, out, lse, *two
        moved = 3 * own + 2 * whole
        new = tuple(x.like(name="d_" + x.name) for x in (k, v))
        add = Compute("add", "backward", 0.0, 3 * (own + whole), t.dtype, calls=t.calls)
        for sent, times, writes in ((whole, 1, ()), (2 * whole, ranks - 2, ()), (whole, 1, new)):
            parts = tuple(x.like(name="part of d_" + x.name) for x in (q, k, v))
            t.loop("ring", reads, parts, times, *step("attention_backward", sent, 2 * flops, moved))
            t.loop("add", (*parts, dq, *two), writes, times, add)
        t.frame(*reads)
        for x, dx in zip((q, k, v), (dq, *new), strict=True):
            t.add_grad(x, dx)

    return t.then(out, transpose)
