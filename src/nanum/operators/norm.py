"""RMSNorm and LayerNorm. Fused: the input and its statistics are saved. Eager RMSNorm saves two fp32 tensors.

What is normed is the last dim: whole, or each head's entries alone, by weights that the heads share.
"""

from __future__ import annotations

from nanum.operators.tape import Tape
from nanum.sharding import Split, Tensor

HEADS = {"Q": "A", "K": "key_heads"}
"""The dim of heads among those of queries, and of keys."""


def norm(t: Tape, x: Tensor, name: str, kind: str, *, heads: bool = False) -> Tensor:
    """PyTorch's LayerNorm is one kernel everywhere; its RMSNorm is one where the engine says so, else a chain of fp32
    kernels. A bare norm has no weights.
    """
    weights = [] if kind.endswith(("no_weight", "bare")) else [_weight(t, x, name, heads)]
    if kind == "layer_norm":
        weights.append(_weight(t, x, name + "_bias", heads))
    row = _row(x, heads)
    if row.partial:
        return _across(t, x, row, weights, name)
    means = kind.startswith("layer_norm")
    if means or "norm" in t.conventions.fused:
        return _fused(t, x, row, weights, name, means=means)
    return _eager_rms(t, x, row, weights, name)


def _weight(t: Tape, x: Tensor, name: str, heads: bool) -> Tensor:
    dim = x.dims[-1]
    axes = x.split.get(dim, ())
    return t.weight(name, ("head",)) if heads else t.weight(name, (dim,), {dim: axes} if axes else {})


def _row(x: Tensor, heads: bool) -> Tensor:
    """A statistic of what is normed: a pending sum where that is split."""
    dim = x.dims[-1]
    axes = x.split.get(dim, ())
    split: Split = {d: a for d, a in x.split.items() if d != dim}
    if heads:
        return Tensor("row", (*x.dims[:-1], HEADS[dim]), {**split, HEADS[dim]: axes}, "fp32")
    return Tensor("row", x.dims[:-1], split, "fp32", partial=tuple(axes))


def _grads(t: Tape, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [t.grad_of_weight(w, x, tuple(d for d in x.dims if d not in w.dims)) for w in weights]


def _fused(t: Tape, x: Tensor, row: Tensor, weights: list[Tensor], name: str, *, means: bool) -> Tensor:
    y = x.like(name=name)
    dtype = x.dtype if t.conventions.half_statistics else "fp32"
    saved = [row.like(name=name, dtype=dtype) for name in (("rstd", "mean") if means else ("rstd",))]
    t.emit(name, (x, *weights), (y, *saved))

    def transpose() -> None:
        dy = t.grad(y)
        trained = [w for w in weights if t.requires_grad(w)]
        grads = _grads(t, x, trained)
        new = [x.like(name="dx_" + name)] if t.requires_grad(x) else []
        t.emit("d_" + name, (dy, x, *saved, *weights[:1]), (*new, *grads))
        if trained and "norm_grads" in t.conventions.more_passes:
            t.emit("d_weights_of_" + name, (dy, x), ())
        for w, dw in zip(trained, grads, strict=True):
            t.set_weight_grad(w, dw)
        for dx in new:
            t.add_grad(x, dx)

    return t.then(y, transpose)


def _across(t: Tape, x: Tensor, row: Tensor, weights: list[Tensor], name: str) -> Tensor:
    """RMSNorm of what is split over ranks: they add up the sums of squares, and in backward those of `dy . x`."""
    t.emit("square_sums", (x,), (row,))
    total = t.move(row, row.split)
    t.emit(name, (x, total, *weights), (y := x.like(name=name),))

    def transpose() -> None:
        dy = t.grad(y)
        t.emit("product_sums", (dy, x, *weights), (part := row.like(),))
        both = t.move(part, part.split)
        trained = [w for w in weights if t.requires_grad(w)]
        dx, grads = x.like(name="dx_" + name), _grads(t, x, trained)
        t.emit("d_" + name, (dy, x, total, both, *weights), (dx, *grads))
        for w, dw in zip(trained, grads, strict=True):
            t.set_weight_grad(w, dw)
        t.add_grad(x, dx)

    return t.then(y, transpose)


def _eager_rms(t: Tape, x: Tensor, row: Tensor, weights: list[Tensor], name: str) -> Tensor:
    k = t.kernel
    xf = k("to_float", (x,), x, "fp32") if t.half else x
    # Where gradients of the input are summed: DTensor makes the local input a node of its own.
    node = xf if t.half else x.like() if t.tp else x
    if t.requires_grad(x):
        t.require_grad(node)
    square = k("pow", (xf,), xf)
    rstd = k("rsqrt", (k("mean", (square,), row),), row, holds=(square,))
    xhat = k("mul", (xf, rstd), xf)
    y = scaled = k("mul", (xhat, *weights), xf, holds=(xf,)) if weights else xhat
    if t.half:
        y = k("to_half", (scaled,), x, t.dtype)
    t.frame(xhat, rstd)

    def transpose() -> None:
        dy = t.grad(y)
        d = dxhat = k("to_float", (dy,), dy, "fp32") if t.half else dy
        for w in weights:
            if t.requires_grad(x):
                dxhat = k("mul", (d, w), xf)
            if not t.requires_grad(w):
                continue
            product = k("mul", (d, xhat), xf)
            (dw,) = _grads(t, x, [w])
            if t.half:
                t.emit("to_half", (k("sum", (product,), dw.like(size=None), "fp32"),), (dw,), holds=(d, xhat))
            else:
                t.emit("sum", (product,), (dw,), holds=(d, xhat))
        if t.requires_grad(x):
            to_input(dxhat)
        for w in weights:
            if t.requires_grad(w):
                t.set_weight_grad(w, dw)

    def to_input(dxhat: Tensor) -> None:
        dx, product = k("mul", (dxhat, rstd), xf), k("mul", (dxhat, xf), xf)
        drstd = k("sum", (product,), row, holds=(dxhat,))
        t.add_grad(node, dx)
        cube = k("pow", (rstd,), row)
        scaled = k("mul", (drstd, cube), row)
        dmean = k("mul", (scaled,), row, holds=(drstd, cube, rstd))
        dsquare, power = k("div", (dmean,), xf), k("pow", (xf,), xf)
        t.add_grad(node, k("mul", (dsquare, k("mul", (power,), xf)), xf, holds=(power, xf)))
        if node is not x:
            t.add_grad(x, k("to_half", (t.grad(node),), x, t.dtype) if t.half else t.grad(node))

    return t.then(y, transpose)
