"""Linear layers and the embedding: a product, and its two transposes."""

from __future__ import annotations

from nanum.conventions import LORA_A, LORA_B, NOT_IN_FP8
from nanum.dtypes import NF4
from nanum.operators.elementwise import residual, times_a_number
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
    """`y[dims] = x . W`, resharded to `want`, and where the layer has an adapter what that adds."""
    y = _product(t, x, name, w_dims, w_split, dims, want, bias=bias, weight=weight)
    return _adapted(t, x, y, name, w_dims, dims) if t.adapts(name) else y


def _adapted(t: Tape, x: Tensor, y: Tensor, name: str, w_dims: tuple[str, str], dims: tuple[str, ...]) -> Tensor:
    """`y + s B A x`, in PEFT's order (peft/tuners/lora/layer.py at 0.18: `Linear.forward`, without dropout; torchtune
    and torchtitan do the same): the products, a kernel that scales, and one that adds.
    """
    outer, inner = w_dims
    narrow = *x.dims[:-1], "R"
    rows = {d: axes for d, axes in x.split.items() if d != inner}
    a = _product(t, x, name + LORA_A, ("R", inner), {}, narrow, rows, trained=True)
    b = _product(t, a, name + LORA_B, (outer, "R"), {}, dims, y.split, trained=True)
    return residual(t, y, times_a_number(t, b, "lora_scale", "lora"))


def _product(
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
    trained: bool | None = None,
) -> Tensor:
    """`y[dims] = x . W`, resharded to `want`. `w_dims` is (out, in), as PyTorch stores a weight.

    A bias split like the output is added by the matmul's epilogue; where the output is a pending sum it is added after
    the sum. DTensor adds it before, to one rank's part, so that its gradient is read off the gathered one.
    """
    quantized = t.quantizes(trained=t.own_trained if trained is None else trained)
    fp8 = name not in NOT_IN_FP8 and trained is None  # adapters are not
    dtype = NF4 if quantized else "fp8" if fp8 and t.conventions.fp8_gather else None
    w = weight or t.weight(name, w_dims, w_split, dtype=dtype, trained=trained)
    b = (
        t.weight(name + "_bias", w_dims[:1], {d: axes for d, axes in w_split.items() if d == w_dims[0]}, w.stays)
        if bias
        else None
    )
    raw = t.product(name, x, _wide(t, w), dims, want, fp8=fp8)
    y = t.move(raw, want)

    def transpose() -> None:
        dy = t.grad(y)
        node: tuple[Tensor, ...] = ()  # autograd's holds its operands until both products are there
        if t.requires_grad(w):
            dw = t.product("dw_" + name, x, dy, w.dims, w.split, category="grads", size=t.accumulated, fp8=fp8)
            node = t.backward[-1].reads
        if t.requires_grad(x):
            dx = t.product("dx_" + name, dy, _wide(t, w), x.dims, x.split, fp8=fp8)
            node = node or t.backward[-1].reads
        if b and t.requires_grad(b):
            summed = node[1] if t.conventions.dtensor else dy  # DTensor gathers dY for the products, and sums that
            db = t.grad_of_weight(b, summed, tuple(d for d in summed.dims if d not in b.dims))
            t.emit("db_" + name, (summed,), (db,))
            t.set_weight_grad(b, db)
        t.frame(*node)
        if t.requires_grad(w):
            t.frame(dw)  # which lives as long, though it be added into an earlier one
        if t.requires_grad(x):
            t.add_grad(x, dx)
        if t.requires_grad(w):
            t.set_weight_grad(w, dw)

    return t.then(y, transpose)


def _wide(t: Tape, w: Tensor) -> Tensor:
    """A quantized weight as the product reads it, made anew for each (bitsandbytes, autograd/_functions.py:
    `MatMul4Bit`; torchao, dtypes/nf4tensor.py: `LinearNF4`).
    """
    if w.dtype != NF4:
        return w
    wide = Tensor(w.name, w.dims, w.split, t.dtype, category="buffers", stays=w.stays)
    t.emit("dequantize", (w,), (wide,))
    return wide


def embedding(
    t: Tape,
    ids: Tensor,
    name: str,
    dims: tuple[str, str],
    want: Split,
    *,
    split_rows: bool = True,
    added: bool = False,
    weight: Tensor | None = None,
) -> Tensor:
    """Rows of a table [rows, width]: a product with a one-hot operand, which no rank needs to gather. Split over the
    rows, it is a pending sum. Where its gradient is `added` to another of the same table, which has arrived, it does
    not stay. A table that every rank of tp has whole is looked up, by DTensor, for a rank's own part of a sequence: its
    gradient is then the pending sum.
    """
    rows, width = dims
    w = weight or t.weight(name, dims, {rows: t.tp} if split_rows and t.tp else {})
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
                t.emit("slice", (whole,), (dw,))  # and a DTensor is not added to in place
                t.emit("add", (dw,), (t.buffer("sum", t.shapes.bytes(dw)),), holds=(whole,))
            else:
                dw = whole
        else:
            t.emit("embedding_backward", (dy,), (dw,))
        t.set_weight_grad(w, dw)

    return t.then(y, transpose)
