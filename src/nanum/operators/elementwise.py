"""Operators without a weight and without communication: residuals, activations, rotary positions, dropout."""

from __future__ import annotations

from collections.abc import Callable

from nanum.operators.tape import Tape
from nanum.sharding import Tensor


def residual(t: Tape, *xs: Tensor) -> Tensor:
    """`y = x1 + x2`: the gradient passes through to both."""
    t.emit("residual", xs, (y := xs[0].like(name="residual"),))

    def transpose() -> None:
        dy = t.grad(y)
        for x in xs:
            t.add_grad(x, dy)

    return t.then(y, transpose)


def pointwise(t: Tape, name: str, xs: tuple[Tensor, ...], *, saves: bool = True, dtype: str | None = None) -> Tensor:
    """One kernel forward and one backward, which reads the inputs again where `saves`."""
    t.emit(name, xs, (y := xs[0].like(name=name, dtype=dtype),))

    def transpose() -> None:
        new = [x.like(name="d_" + x.name) for x in xs]
        t.emit("d_" + name, (t.grad(y), *(xs if saves else ())), new)
        for x, dx in zip(xs, new, strict=True):
            t.add_grad(x, dx)

    return t.then(y, transpose)


def swiglu(t: Tape, project: Callable[[str], Tensor]) -> Tensor:
    """`silu(gate) * up`. Fused: gate and up are saved; eager: silu(gate) too."""
    if "activation" in t.conventions.fused:
        return pointwise(t, "swiglu", (project("gate"), project("up")))
    gate = project("gate")
    silu = pointwise(t, "silu", (gate,))
    up = project("up")
    t.emit("mul", (silu, up), (y := silu.like(name="swiglu"),))

    def transpose() -> None:
        d = t.grad(y)
        dup = t.kernel("mul", (d, silu), up)
        t.add_grad(silu, t.kernel("mul", (d, up), silu, holds=(silu,)))
        t.add_grad(up, dup)

    return t.then(y, transpose)


def rotary(t: Tape, x: Tensor) -> Tensor:
    """Rotary positions: linear in x, so nothing of it is saved. Eager: halves are cut, negated, joined and scaled."""
    if "rotary" in t.conventions.fused:
        return pointwise(t, "rotary", (x,), saves=False)
    k = t.kernel

    def half(source: Tensor) -> Tensor:
        t.emit("neg", (source,), (n := t.buffer("half", t.shapes.bytes(x) // 2),))
        return n

    y = k("add", (k("mul", (x,), x), k("mul", (k("cat", (half(x),), x),), x)), x)

    def transpose() -> None:
        d = t.grad(y)
        n = half(scaled := k("mul", (d,), x))
        t.add_grad(x, k("add", (k("mul", (d,), x), k("cat", (scaled, n), x)), x))

    return t.then(y, transpose)


def dropout(t: Tape, x: Tensor, probability: float, name: str = "dropout") -> Tensor:
    """Saves a mask of one byte an element (PyTorch's native_dropout; 0.0 is the identity)."""
    if probability == 0.0:
        return x
    t.emit(name, (x,), (y := x.like(name="dropout"), mask := x.like(name="mask", dtype="bool")))

    def transpose() -> None:
        t.emit("d_" + name, (t.grad(y), mask), (dx := x.like(name="d_dropout"),))
        t.add_grad(x, dx)

    return t.then(y, transpose)
