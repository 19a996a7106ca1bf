"""Linear layers and the embedding: a product, and its two transposes."""

from __future__ import annotations

from nanum.conventions import NOT_IN_FP8
from nanum.operators.tape import Tape
from nanum.sharding import Split, Tensor


def linear(
    t: Tape,
    x: Tensor,
    name: str,
    w_dims: tuple[str, str],
    w_split: Split,
    dims: tuple[str, ...],
    want: Split,
    *,
    bias: bool = False,
    weight: Tensor | None = None,
) -> Tensor:
    """`y[dims] = x . W`, resharded to `want`. `w_dims` is (out, in), as PyTorch stores a weight.

    A bias split like the output is added by the matmul's epilogue; where the output is a pending sum it is added after
    the sum. DTensor adds it before, to one rank's part, so that its gradient is read off the gathered one.
    """
    w = weight or t.weight(name, w_dims, w_split)
    b = (
        t.weight(name + "_bias", w_dims[:1], {d: axes for d, axes in w_split.items() if d == w_dims[0]}, w.stays)
        if bias
        else None
    )
    fp8 = name not in NOT_IN_FP8
    raw = t.product(name, x, w, dims, want, fp8=fp8)
    y = t.move(raw, want)

    def transpose() -> None:
        dy = t.grad(y)
        dw = t.product("dw_" + name, x, dy, w.dims, w.split, category="grads", size=t.accumulated, fp8=fp8)
        node = t.backward[-1].reads  # autograd's node holds its operands until both products are there
        dx = t.product("dx_" + name, dy, w, x.dims, x.split, fp8=fp8)
        if b:
            summed = node[1] if t.conventions.dtensor else dy  # DTensor gathers dY for the products, and sums that
            db = t.grad_of_weight(b, summed)
            t.emit("db_" + name, (summed,), (db,))
            t.set_weight_grad(b, db)
        t.frame(*node)
        t.frame(dw)  # which lives as long, though it be added into an earlier one
        t.add_grad(x, dx)
        t.set_weight_grad(w, dw)

    return t.then(y, transpose)


def embedding(
    t: Tape, ids: Tensor, name: str, dims: tuple[str, str], want: Split, *, split_rows: bool = True, added: bool = False
) -> Tensor:
    """Rows of a table [rows, width]: a product with a one-hot operand, which no rank needs to gather. Split over the
    rows, it is a pending sum. Where its gradient is `added` to another of the same table, which has arrived, it does
    not stay. A table that every rank of tp has whole is looked up, by DTensor, for a rank's own part of a sequence: its
    gradient is then the pending sum.
    """
    rows, width = dims
    w = t.weight(name, dims, {rows: t.tp} if split_rows and t.tp else {})
    y = t.move(t.product(name, ids, w, ("B", "S", width), want), want)

    def transpose() -> None:
        dy = t.grad(y)
        if split_rows or not t.conventions.dtensor:
            dy = t.move(dy, {d: tuple(a for a in axes if a != "tp") for d, axes in dy.split.items()})
        dw = t.grad_of_weight(w, dy)
        if t.conventions.dtensor:  # the gradient is made for the whole table; a rank's own is a view into it
            whole = dw.like(size=t.shapes.bytes(dw.like(split={})))
            t.emit("embedding_backward", (dy,), (whole,))
            if added and w.split:
                t.emit("slice", (whole,), (dw,))
            else:
                dw = whole
        else:
            t.emit("embedding_backward", (dy,), (dw,))
        t.set_weight_grad(w, dw)

    return t.then(y, transpose)
