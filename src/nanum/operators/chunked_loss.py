"""The loss without all logits at once: the head's product, the loss and their backward, some rows after others.

`chunked` is torchtitan's ChunkedLossWrapper (b5bcd76, components/loss.py), whose chunks are whole heads and losses of
shorter sequences, each differentiated at once; what their gradients add up to is there before backward begins. `fused`
is Liger's fused linear cross-entropy (ead96b6, ops/fused_linear_cross_entropy.py), whose kernel makes the gradient of
logits in their place; it chooses the size of its chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanum.arrays import least, power_of_two
from nanum.dtypes import ITEMSIZE
from nanum.operators.loss import cross_entropy, end_with
from nanum.operators.recorder import Op
from nanum.operators.tape import Tape
from nanum.program import Compute, Mark, Node, Operands, Repeat
from nanum.sharding import Shapes, Split, Tensor


def chunked(t: Tape, h: Tensor, whole: Split, chunks: int, head: Callable[[Tape, Tensor], Tensor]) -> None:
    """Ends the forward pass with the loss of `head(tape, rows)`, for each of so many chunks of the rows of h, which are
    gathered once to the split `whole`, and whose gradient is reduced once.

    The gradient of all rows is put together in fp32; those of the head's weights are added up in the dtype in which
    gradients are kept.
    """
    x = t.move(h, whole)
    inner = _of_one_chunk(t, chunks)
    part = Tensor("rows", x.dims, x.split, x.dtype)
    inner.require_grad(part)
    logits = head(inner, part)
    cross_entropy(inner, logits)
    inner.run_backward()
    arrived = inner.pending(part)
    held = {part: x}

    def here(tensor: Tensor) -> Tensor:
        """A tensor of one chunk, with the bytes that it has there."""
        if tensor.category == "params" or tensor.dtype == "onehot":
            return tensor
        return held.setdefault(tensor, tensor.like(size=inner.shapes.bytes(tensor)))

    def again(node: Node | None, times: int = chunks) -> Repeat | None:
        return None if node is None else Repeat(times, (node,))

    sums = {w: dw.like(name="d_" + w.name) for w, dw in inner.weight_grads.items()}
    wider = tuple(_beyond(t, g) for g in sums.values())
    rows = x.like(name="d_rows", dtype="fp32", partial=arrived.partial)
    loss, seed = (t.buffer(name, 4) for name in ("loss", "seed"))
    t.emit("zeros", (), (rows, loss))
    t.forward.append(Op("begin", (), (*sums.values(), *wider)))
    for op in (*inner.forward, *inner.backward):
        if not isinstance(op.node, Mark):
            reads, writes = (tuple(map(here, tensors)) for tensors in (op.reads, op.writes))
            t.forward.append(Op(op.name, reads, writes, again(op.node)))
    for w, dw in inner.weight_grads.items():
        moved = 3 * t.shapes.bytes(sums[w])
        add = Compute("add", "backward", 0.0, moved, t.conventions.numerics.grad_dtype)
        t.forward.append(Op("add", (here(dw), sums[w]), (), again(add, chunks - 1)))
    wide = t.buffer("wide rows", t.half * 2 * t.shapes.bytes(here(arrived)))
    copy = Compute("copy", "backward", 0.0, 2 * t.shapes.bytes(here(arrived)), "fp32")
    t.forward.append(Op("copy", (here(arrived), rows), (wide,), again(copy)))
    t.frame(here(logits), x)
    dx = t.kernel("to_half", (rows,), rows, t.dtype) if t.half else rows
    t.weights += inner.weights
    for w, g in sums.items():
        t.require_grad(w)
        t.set_weight_grad(w, g)

    def transpose() -> None:
        t.frame(*wider)
        t.add_grad(h, dx)

    end_with(t, x, loss, seed, transpose)


def _of_one_chunk(t: Tape, chunks: int) -> Tape:
    """A tape of a shorter sequence."""
    shapes = Shapes(t.shapes.mesh, {**t.shapes.dims, "S": t.shapes.dims["S"] // chunks}, t.shapes.at)
    conventions = replace(t.conventions, step_keeps_logits=False)
    settings = t.tp, t.sequence_parallel, t.flash, t.own_experts, t.trained, t.own_trained, t.adapters, t.context
    return Tape(shapes, conventions, *settings)


def _beyond(t: Tape, grad: Tensor) -> Tensor:
    """What a sum in the dtype that gradients are kept in takes beyond the gradient as it is handed on."""
    itemsize = ITEMSIZE[grad.dtype]
    more = t.shapes.bytes(grad) // itemsize * (ITEMSIZE[t.conventions.numerics.grad_dtype] - itemsize)
    return t.buffer("wider sums", more, "grads")


def fused(t: Tape, h: Tensor, w: Tensor) -> None:
    """Ends the forward pass with the loss of h [B, S, D] by the head's whole matrix w [V, D]. A chunk has about as many
    logits as h has entries; gradients of h and of w are made with the loss. Each chunk's part of the latter is there in
    fp32 before it is added.
    """
    rows, width, vocabulary = (t.shapes.elements(dims, h.split) for dims in (("B", "S"), h.dims[-1:], w.dims[:1]))
    size = least(fused_chunk(rows, vocabulary, width), rows)
    chunks = -(-rows // size)
    each = rows / chunks  # on average: the last chunk may be shorter
    itemsize = ITEMSIZE[t.dtype]
    dh, dw = h.like(name="d_rows"), t.grad_of_weight(w, h)
    losses, loss, seed = t.buffer("losses", 4 * rows), t.buffer("loss", 4), t.buffer("seed", 4)
    logits = t.buffer("logits", itemsize * size * vocabulary)
    part = t.buffer("d_rows of a chunk", itemsize * size * width)
    own = t.buffer("d_head of a chunk", itemsize * vocabulary * width, "grads")
    wide = t.buffer("the same, wider", 4 * vocabulary * width * t.half, "grads")

    def kernel(name: str, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], node: Compute) -> None:
        t.forward.append(Op(name, reads, writes, Repeat(chunks, (node,))))

    def product(name: str, m: Any, n: Any, k: Any, operands: Operands, phase: Any) -> Compute:
        moved = itemsize * (m * k + k * n + m * n)
        return Compute(name, phase, 2.0 * m * n * k, moved, t.dtype, (m, n, k), operands=operands)

    def passing(name: str, moved: Any) -> Compute:
        return Compute(name, "backward", 0.0, moved, t.dtype)

    t.emit("zeros", (), (dh, losses, *((dw,) if t.requires_grad(w) else ())))
    kernel("head", (h, w), (logits,), product("head", each, vocabulary, width, "nt", "forward"))
    kernel("nll", (logits, losses), (), passing("nll", 2 * itemsize * each * vocabulary))
    kernel("dx_head", (logits, w), (part,), product("dx_head", each, width, vocabulary, "nn", "backward"))
    kernel("copy", (part, dh), (), passing("copy", 2 * itemsize * each * width))
    if t.requires_grad(w):
        kernel("dw_head", (logits, h), (own,), product("dw_head", vocabulary, width, each, "tn", "backward"))
        kernel("to_float", (own,), (wide,), passing("to_float", (itemsize + 4 * t.half) * vocabulary * width))
        kernel("add", (own, wide, dw), (), passing("add", (2 * itemsize + 4) * vocabulary * width))
        t.set_weight_grad(w, dw)
    t.frame(logits)
    t.emit("sum", (losses,), (loss,))
    end_with(t, h, loss, seed, lambda: t.add_grad(h, dh))


def fused_chunk(rows: Any, vocabulary: Any, width: Any) -> Any:
    """Rows of one chunk by Liger's rule: as many as have about so many logits as all rows have entries, rounded up to a
    power of two.
    """
    return power_of_two(-(-rows // -(-vocabulary // width)))
