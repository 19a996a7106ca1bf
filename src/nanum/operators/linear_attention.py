"""Linear attention: a short convolution, the core by chunks of tokens, and a gated norm of each head's output.

FLOPs of the core are those of its products by chunks (Yang et al. 2024, arXiv 2406.06484, section 3.2; Qin et al. 2024,
arXiv 2401.04658): within a chunk of C tokens scores and what they weigh, 2C(d_k + d_v) for a token and head, and of the
state 2·d_k·d_v to read it and as many to write it; the delta rule has the scores of keys by keys, two products of the
chunk's inverse, and one more product with the state. Backward counts twice the forward's.
"""

from __future__ import annotations

from typing import Any, Literal

from nanum.conventions import ATTENTION_CORE
from nanum.operators.tape import Tape
from nanum.sharding import Tensor

CHUNK = {"delta": 64, "lightning": 256}
"""Tokens of a chunk: flash-linear-attention's, and that of MiniMax's kernel."""


def convolution(t: Tape, x: Tensor, name: str, taps: int) -> Tensor:
    """Each channel of x over its last `taps` tokens, and SiLU of the sum, as one kernel: x is saved."""
    dim = x.dims[-1]
    axes = x.split.get(dim, ())
    w = t.weight(name, (dim, "taps"), {dim: axes} if axes else {})
    flops = 2.0 * taps * t.shapes.elements(x.dims, x.split)
    t.emit(name, (x, w), (y := x.like(name=name),), flops)

    def transpose() -> None:
        dy = t.grad(y)
        dx, dw = x.like(name="d_" + name), t.grad_of_weight(w, x)
        t.emit("d_" + name, (dy, x, w), (dx, dw), 2 * flops)
        t.set_weight_grad(w, dw)
        t.add_grad(x, dx)

    return t.then(y, transpose)


def linear_core(
    t: Tape, mixed: Tensor, extra: tuple[Tensor, ...], weights: tuple[Tensor, ...], out: Tensor, sizes: Sizes
) -> Tensor:
    """What the heads answer, out of queries, keys and values side by side in `mixed`, and of what else the rule reads.
    Saves these, and of each token and head a row of the chunk's inverse.
    """
    flops = t.shapes.elements(("B", "S", "value_heads"), {**out.split, "value_heads": out.split.get("values", ())})
    flops = flops * sizes.flops_of_a_token
    kept: tuple[Tensor, ...] = ()
    if sizes.rule == "delta":
        heads = out.split.get("values", ())
        split = {d: axes for d, axes in out.split.items() if d != "values"}
        kept = (Tensor("inverse", ("B", "S", "value_heads", "chunk"), {**split, "value_heads": heads}, out.dtype),)
    with t.region(ATTENTION_CORE):
        t.emit("linear_attention", (mixed, *extra, *weights), (out, *kept), flops)

    def transpose() -> None:
        d = t.grad(out)
        new = [x.like(name="d_" + x.name) for x in (mixed, *extra)]
        grads = [t.grad_of_weight(w, out) for w in weights]
        t.emit("linear_attention_backward", (d, mixed, *extra, *weights, *kept), (*new, *grads), 2 * flops)
        for w, dw in zip(weights, grads, strict=True):
            t.set_weight_grad(w, dw)
        for x, dx in zip((mixed, *extra), new, strict=True):
            t.add_grad(x, dx)

    return t.then(out, transpose)


class Sizes:
    """Of one head, and how many tokens are taken at once."""

    def __init__(self, rule: Literal["delta", "lightning"], key: int, value: int) -> None:
        self.rule = rule
        chunk, delta = CHUNK[rule], rule == "delta"
        scores = 2 * chunk * (key + value)
        state = 2 * key * value
        self.flops_of_a_token = float(scores + 2 * state + delta * (2 * chunk * (2 * key + value) + state))


def gated_norm(t: Tape, x: Tensor, gate: Tensor, name: str, dim: str, rows: tuple[str, ...]) -> Tensor:
    """RMSNorm of each head (or of all at once), times the gate's SiLU or sigmoid, as one kernel: what it read is saved,
    and fp32 reciprocal deviations of `rows`.
    """
    heads = x.split.get(x.dims[-1], ())
    whole = dim == x.dims[-1]
    w = t.weight(name, (dim,), {dim: heads} if whole and heads else {})
    split: dict[str, Any] = {d: axes for d, axes in x.split.items() if d != x.dims[-1]}
    if not whole and heads:
        split[rows[-1]] = heads
    row = Tensor("row", rows, split, "fp32", partial=tuple(heads) if whole else ())
    y = x.like(name=name)
    if row.partial:  # of all heads at once, which ranks divide: they add up their squares
        t.emit("square_sums", (x,), (row,))
        row = t.move(row, row.split)
        t.emit(name, (x, gate, row, w), (y,))
    else:
        t.emit(name, (x, gate, w), (y, row))

    def transpose() -> None:
        d = t.grad(y)
        dx, dgate = x.like(name="d_" + name), gate.like(name="d_gate")
        dw = t.grad_of_weight(w, x, tuple(each for each in x.dims if each not in w.dims))
        reads: tuple[Tensor, ...] = (d, x, gate, row, w)
        if whole and heads:
            t.emit("product_sums", (d, x, gate, w), (part := row.like(partial=tuple(heads)),))
            reads = (*reads, t.move(part, part.split))
        t.emit("d_" + name, reads, (dx, dgate, dw))
        t.set_weight_grad(w, dw)
        t.add_grad(x, dx)
        t.add_grad(gate, dgate)

    return t.then(y, transpose)
