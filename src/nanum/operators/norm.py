"""RMSNorm and LayerNorm. Fused: the input and its statistics are saved. Eager RMSNorm saves two fp32 tensors."""

from __future__ import annotations

from nanum.operators.tape import Tape
from nanum.sharding import Tensor


def norm(t: Tape, x: Tensor, name: str, kind: str) -> Tensor:
    """PyTorch's LayerNorm is one kernel everywhere; its RMSNorm is one where the engine says so, else a chain of fp32
    kernels.
    """
    if kind == "layer_norm" or "norm" in t.conventions.fused:
        return _fused(t, x, name, means=kind == "layer_norm")
    return _eager_rms(t, x, name)


def _statistic(x: Tensor, name: str, dtype: str = "fp32") -> Tensor:
    return Tensor(name, ("B", "S"), x.split, dtype)


def _fused(t: Tape, x: Tensor, name: str, *, means: bool) -> Tensor:
    weights = [t.weight(name, x.dims[-1:])]
    if means:
        weights.append(t.weight(name + "_bias", x.dims[-1:]))
    y = x.like(name=name)
    dtype = x.dtype if t.conventions.half_statistics else "fp32"
    saved = [_statistic(x, name, dtype) for name in (("rstd", "mean") if means else ("rstd",))]
    t.emit(name, (x, *weights), (y, *saved))

    def transpose() -> None:
        dy = t.grad(y)
        dx, grads = x.like(name="dx_" + name), [t.grad_of_weight(w, x) for w in weights]
        t.emit("d_" + name, (dy, x, *saved, weights[0]), (dx, *grads))
        for w, dw in zip(weights, grads, strict=True):
            t.set_weight_grad(w, dw)
        t.add_grad(x, dx)

    return t.then(y, transpose)


def _eager_rms(t: Tape, x: Tensor, name: str) -> Tensor:
    w, row = t.weight(name, x.dims[-1:]), _statistic(x, "row")
    k = t.kernel
    xf = k("to_float", (x,), x, "fp32") if t.half else x
    # Where gradients of the input are summed: DTensor makes the local input a node of its own.
    node = xf if t.half else x.like() if t.tp else x
    square = k("pow", (xf,), xf)
    rstd = k("rsqrt", (k("mean", (square,), row),), row, holds=(square,))
    xhat = k("mul", (xf, rstd), xf)
    y = scaled = k("mul", (xhat, w), xf, holds=(xf,))
    if t.half:
        y = k("to_half", (scaled,), x, t.dtype)
    t.frame(xhat, rstd)

    def transpose() -> None:
        dy = t.grad(y)
        d = k("to_float", (dy,), dy, "fp32") if t.half else dy
        dxhat, product = k("mul", (d, w), xf), k("mul", (d, xhat), xf)
        dw = t.grad_of_weight(w, x)
        if t.half:
            t.emit("to_half", (k("sum", (product,), dw.like(size=None), "fp32"),), (dw,), holds=(d, xhat))
        else:
            t.emit("sum", (product,), (dw,), holds=(d, xhat))
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
        t.set_weight_grad(w, dw)

    return t.then(y, transpose)
