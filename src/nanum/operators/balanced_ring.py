"""PyTorch's ring attention where a rank has a piece from either end of a sequence, so that all compute alike
(`_HeadTailLoadBalancer`, which `context_parallel` takes for causal attention).

Of c steps each takes a c-th of a rank's causal attention: the first on its own keys, then all its queries on half of
the keys that arrived, or half of its queries on all of them. Counted are those of the last rank, which has the first
kind throughout, and puts whole results together (`_SDPAMerger`, in fp32; torch.distributed.tensor.experimental,
PyTorch 2.13, `_context_parallel/_attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanum.conventions import RING
from nanum.operators.attention import flash_flops, flash_shape, keys_and_values, log_sum_exp
from nanum.operators.exchange import collective, exchange
from nanum.operators.tape import Tape
from nanum.program import Compute
from nanum.sharding import Tensor

Round = Callable[[Tape, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Passes keys and values round: a rank's own, the buffer that is sent, and those of the other ranks."""


def balanced_ring(t: Tape, q: Tensor, k: Tensor, v: Tensor, keys: Any, axis: str, passed: Round) -> Tensor:
    """Attention for q [B, S, Q], k and v [B, S, K], whose rows are split over `axis`, where each of a sequence's rows
    sees half of `keys` on average. Saves q, k, v, the output and its log-sum-exp.
    """
    flops = flash_flops(t, q, keys) / t.shapes.ranks((axis,))  # of a step
    out, lse, others = _forward(t, q, passed(t, k, v), flops, axis)

    def transpose() -> None:
        for x, dx in zip((q, k, v), _backward(t, (q, k, v), passed, out, lse, flops, axis), strict=True):
            t.add_grad(x, dx)

    t.frame(others)
    return t.then(out, transpose)


def _kernel(t: Tape, name: str, moved: Any) -> Compute:
    return Compute(name, t.phase, 0.0, moved, t.dtype, calls=t.calls)


def _attention(t: Tape, name: str, q: Tensor, flops: Any, moved: Any) -> Compute:
    library, shape = t.conventions.attention_library, flash_shape(t, q, flops)
    return Compute(name, t.phase, flops, moved, t.dtype, shape, library, calls=t.calls)


def _forward(
    t: Tape, q: Tensor, pieces: tuple[Tensor, Tensor, Tensor], flops: Any, axis: str
) -> tuple[Tensor, Tensor, Tensor]:
    own, _, others = pieces
    name, later = kernel_name(t), t.shapes.ranks((axis,)) - 1
    block, lse = q.like(name="attention"), log_sum_exp(q)
    t.emit(name, (q, own), (block, lse), flops, flash_shape(t, q, flops), attention=True)
    total = t.kernel("to_float", (block,), q, "fp32") if t.half else block
    row, wide, sums = (t.shapes.bytes(x) for x in (q, total, lse))
    of_step, its_lse = block.like(), lse.like()
    moved = 2 * row + t.shapes.bytes(own) / 2 + sums
    t.loop(name, (q, others), (of_step, its_lse), later, _attention(t, "attention", q, flops, moved))
    merged, both = total.like(name="merged"), lse.like(name="log of both")
    steps = (
        *((_kernel(t, "to_float", row + wide),) if t.half else ()),
        _kernel(t, "sub", 3 * wide),
        _kernel(t, "mul", 2 * wide + 2 * sums),  # by a sigmoid of the difference of log-sum-exps
        _kernel(t, "sub", 3 * wide),
        _kernel(t, "logaddexp", 3 * sums),
    )
    meanwhile = t.buffer("parts of a merge", 2 * wide if t.half else wide)
    t.loop("merge", (of_step, its_lse, block, total, lse), (merged, both, meanwhile), later, *steps)
    t.frame(total, lse, meanwhile, of_step, its_lse)
    out, saved = q.like(name="attended"), lse.like()
    t.emit("attended", (merged, both, block), (out, saved))
    return out, saved, others


def kernel_name(t: Tape) -> str:
    """What a ring's kernels go by, where selective recompute keeps what `attention` made: only an engine whose policy
    sees them one by one, and so runs a ring's exchanges again, keeps theirs; else the ring is one operation.
    """
    return "attention" if RING in t.conventions.selective.rerun else "ring_attention"


def _backward(
    t: Tape, inputs: tuple[Tensor, Tensor, Tensor], passed: Round, out: Tensor, lse: Tensor, flops: Any, axis: str
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v. Sums are fp32; those of keys and values travel one rank with each step."""
    q, k, v = inputs
    d = t.grad(out)
    sums, passing = q.like(name="sums", dtype="fp32"), keys_and_values(k).like(name="d_kv", dtype="fp32")
    t.emit("zeros", (), (sums, passing))
    own, flat, others = passed(t, k, v)
    new = tuple(x.like(name="d_" + x.name) for x in inputs)
    shape = flash_shape(t, q, flops)
    t.emit("attention_backward", (d, q, own, out, lse), new, 2 * flops, shape, attention=True)
    t.emit("add", (passing, *new[1:]), ())
    t.emit("cat", (passing,), (packed := passing.like(),))
    exchange(t, "permute", (axis,), packed, arrived := passing.like())
    t.emit("add", (sums, new[0]), ())
    row, wide, pair, one = (t.shapes.bytes(x) for x in (q, sums, passing, own))
    steps = (
        _attention(t, "attention_backward", q, 2 * flops, 4 * row + one),  # q, its output, their gradients; half of kv
        _kernel(t, "add", pair + one / 2),  # to the halves of what arrived
        _kernel(t, "cat", 2 * pair),  # with the other halves
        _kernel(t, "cat", 2 * pair),  # into what is sent
        collective(t.shapes, "permute", (axis,), passing, arrived, t.phase, "activations"),
        _kernel(t, "add", 2 * wide + row),
    )
    later = t.shapes.ranks((axis,)) - 1
    home = passing.like(name="home")
    t.loop("ring", (d, q, others, out, lse, sums, *new, packed, arrived), (home,), later, *steps)
    dq = t.kernel("to_half", (sums,), q) if t.half else sums
    dk, dv = (x.like(name="d_" + x.name) for x in (k, v))
    t.emit("to_half" if t.half else "views", (home,), (dk, dv))
    t.frame(d, q, k, v, out, lse, flat, others, arrived, home)
    return dq, dk, dv
