"""What an encoder of pictures does beside its layers: a row before those of each picture, a table added, one row taken.

Gradients of what all pictures share are sums over them, made as autograd makes them (PyTorch's `sum_to_size`).
"""

from __future__ import annotations

from nanum.operators.tape import Tape
from nanum.sharding import Tensor


def prepended(t: Tape, row: Tensor, x: Tensor, dims: tuple[str, ...]) -> Tensor:
    """`row` [1, D], a weight, before the rows of every x: `y[dims]`, in which x has one dim less by one. Backward reads
    the rest of the gradient, which does not lie in one piece, from a copy.
    """
    outer, rows, _ = x.dims
    y = Tensor("joined", dims, {dims[0]: x.split.get(outer, ()), dims[1]: x.split.get(rows, ())}, x.dtype)
    t.emit("cat", (row, x), (y,))

    def transpose() -> None:
        d = t.grad(y)
        if t.requires_grad(row):
            t.emit("sum", (), (drow := t.grad_of_weight(row, y),), holds=(d,))
            t.set_weight_grad(row, drow)
        if t.requires_grad(x):
            t.emit("copy", (d,), (dx := x.like(name="d_" + x.name),))
            t.add_grad(x, dx)

    return t.then(y, transpose)


def shifted(t: Tape, x: Tensor, table: Tensor) -> Tensor:
    """`x + table`, a weight that every sequence has added."""
    t.emit("residual", (x, table), (y := x.like(name="shifted"),))

    def transpose() -> None:
        d = t.grad(y)
        if t.requires_grad(table):
            t.emit("sum", (d,), (dtable := t.grad_of_weight(table, y),))
            t.set_weight_grad(table, dtable)
        t.add_grad(x, d)

    return t.then(y, transpose)


def first_row(t: Tape, x: Tensor, dims: tuple[str, ...], *, copied: bool) -> Tensor:
    """`x[:, 0]` as `y[dims]`: a view, which keeps x for whoever saves it, or a copy. Its gradient is zero elsewhere."""
    outer, rows, _ = x.dims
    split = {dims[0]: x.split.get(outer, ()), dims[1]: x.split.get(rows, ())}
    y = Tensor("first_row", dims, split, x.dtype, factor=None if copied else 0)
    t.emit("select", (x,), (y,))

    def transpose() -> None:
        d = t.grad(y)
        if not copied:
            t.frame(x)
        t.emit("select_backward", (d,), (dx := x.like(name="d_" + x.name),))
        t.add_grad(x, dx)

    return t.then(y, transpose)
