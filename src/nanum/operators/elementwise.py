"""Operators without a weight and without communication: residuals, activations, rotary positions, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def side_by_side(t: Tape, a: Tensor, b: Tensor, dim: str) -> Tensor:
    """Rows of `a` and then of `b`, as one of the width of `dim`; each has its own part of the gradient."""
    y = Tensor("both", (*a.dims[:-1], dim), a.split, a.dtype)
    t.emit("cat", (a, b), (y,))

    def transpose() -> None:
        t.emit("d_cat", (t.grad(y),), parts := (a.like(name="d_cat"), b.like(name="d_cat")))
        for x, dx in zip((a, b), parts, strict=True):
            t.add_grad(x, dx)

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


def activated(t: Tape, name: str, x: Tensor) -> Tensor:
    """An activation. PyTorch's relu keeps what it wrote, the others what they read; an eager squared relu is both."""
    if name == "relu2" and "activation" not in t.conventions.fused:
        return square(t, known_by_result(t, "relu", x))
    return known_by_result(t, name, x) if name == "relu" else pointwise(t, name, (x,))


def square(t: Tape, x: Tensor) -> Tensor:
    """PyTorch's power: backward makes `x`, twice it, and that times the gradient, each a tensor."""
    y = t.kernel("pow", (x,), x)

    def transpose() -> None:
        d, power = t.grad(y), t.kernel("pow", (x,), x)
        t.add_grad(x, t.kernel("mul", (d, t.kernel("mul", (power,), x)), x, holds=(power, x)))

    return t.then(y, transpose)


def known_by_result(t: Tape, name: str, x: Tensor) -> Tensor:
    """A function whose slope is a function of its value (relu, sigmoid): backward reads what forward wrote."""
    t.emit(name, (x,), (y := x.like(name=name),))

    def transpose() -> None:
        t.emit("d_" + name, (t.grad(y), y), (dx := x.like(name="d_" + name),))
        t.add_grad(x, dx)

    return t.then(y, transpose)


def capped(t: Tape, x: Tensor) -> Tensor:
    """`cap * tanh(x / cap)`: backward reads the tanh, or what one kernel wrote. A number is a tensor of its own."""
    if "activation" in t.conventions.fused:
        return known_by_result(t, "softcap", x)

    def scaled_by_a_number(x: Tensor, name: str) -> Tensor:
        number = t.buffer("a double", 8)
        t.emit(name, (x,), (y := x.like(name=name), number))
        return t.then(y, lambda: t.add_grad(x, t.kernel(name, (t.grad(y), number), x)))

    return scaled_by_a_number(known_by_result(t, "tanh", scaled_by_a_number(x, "div")), "mul")


def times_a_number(t: Tape, x: Tensor, name: str, result: str | None = None) -> Tensor:
    """A number, which autograd saves as a tensor of 8 bytes in the host's memory."""
    number = Tensor("number", (), {}, "number", factor=1 * t.conventions.device_is_host)
    t.emit(name, (x,), (y := x.like(name=result or name), number))

    def transpose() -> None:
        t.emit("d_" + name, (t.grad(y), number), (dx := x.like(name="d_" + (result or name)),))
        t.add_grad(x, dx)

    return t.then(y, transpose)


GATED = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu", "relu2": "relu2 gate"}


def swiglu(t: Tape, project: Callable[[str], Tensor], activation: str = "silu") -> Tensor:
    """`silu(gate) * up`, or by another activation. Fused: gate and up are saved; eager: silu(gate) too."""
    if "activation" in t.conventions.fused:
        return pointwise(t, GATED[activation], (project("gate"), project("up")))
    silu = activated(t, activation, project("gate"))
    return scaled(t, silu, project("up"), GATED[activation])


def scaled(t: Tape, x: Tensor, by: Tensor, name: str) -> Tensor:
    """`x * by`, entry by entry: both are saved."""
    t.emit("mul", (x, by), (y := x.like(name=name),))

    def transpose() -> None:
        d = t.grad(y)
        dby = t.kernel("mul", (d, x), by)
        t.add_grad(x, t.kernel("mul", (d, by), x, holds=(x,)))
        t.add_grad(by, dby)

    return t.then(y, transpose)


def repeated(t: Tape, x: Tensor, like: Tensor) -> Tensor:
    """Each of a few heads copied for all heads of queries, whose tensor is `like`; the copies' gradients are summed."""
    t.emit("repeat", (x,), (y := like.like(name="repeated"),))

    def transpose() -> None:
        t.emit("d_repeat", (t.grad(y),), (dx := x.like(name="d_" + x.name),))
        t.add_grad(x, dx)

    return t.then(y, transpose)


def rotary(t: Tape, x: Tensor, turned: int | None = None) -> Tensor:
    """Rotary positions: linear in x, so nothing of it is saved. Eager: halves are cut, negated, joined and scaled. Of
    each head only `turned` entries may be, the others then being joined to them again.
    """
    if "rotary" in t.conventions.fused:
        return pointwise(t, "rotary", (x,), saves=False)
    k = t.kernel
    whole = turned is None or turned == t.shapes.dims["head"]
    size: Any = t.shapes.bytes(x) if whole else t.shapes.bytes(x) * turned // t.shapes.dims["head"]
    part = x if whole else x.like(size=size)

    def half(source: Tensor) -> Tensor:
        t.emit("neg", (source,), (n := t.buffer("half", size // 2),))
        return n

    y = k("add", (k("mul", (x,), part), k("mul", (k("cat", (half(x),), part),), part)), part)
    if not whole:
        y = k("cat", (y, x), x)

    def transpose() -> None:
        d = t.grad(y)
        n = half(scaled := k("mul", (d,), part))
        dx = k("add", (k("mul", (d,), part), k("cat", (scaled, n), part)), part)
        t.add_grad(x, dx if whole else k("cat", (dx, d), x))

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
