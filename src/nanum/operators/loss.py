"""Cross-entropy over the vocabulary: eager fp32 kernels, one fused kernel, or a loss whose logits stay split over the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from nanum.conventions import ITEMSIZE
from nanum.operators.tape import Tape
from nanum.sharding import Tensor


def cross_entropy(t: Tape, logits: Tensor) -> None:
    """Ends the forward pass. The mark `pre_backward` is where a root unit's weights are gathered again."""
    kernel = t.conventions.loss_kernel
    if kernel == "in_place":
        _in_place(t, logits)
    elif kernel == "softmax" or any(logits.split.get("V", ())):
        _vocab_parallel(t, logits)
    elif "loss" in t.conventions.fused:
        _fused(t, logits)
    else:
        _eager(t, logits)


def _eager(t: Tape, logits: Tensor) -> None:
    """`F.cross_entropy(logits.float())`: an fp32 copy until it returns, log-softmax saved, two fp32 gradients: 14 bytes
    a bf16 logit.
    """
    k = t.kernel
    loss, weight, seed = (t.buffer(name, 4) for name in ("loss", "weight", "seed"))
    wide = k("to_float", (logits,), logits, "fp32") if t.half else logits
    logp = k("log_softmax", (wide,), wide)
    t.emit("nll", (logp,), (loss, weight))
    t.frame(wide)

    def transpose() -> None:
        d = k("log_softmax_backward", (k("nll_backward", (logp, weight), logp), logp), logp)
        if t.half:
            d = k("to_half", (d,), logits, t.dtype)
        t.add_grad(logits, d)

    _end(t, logits, loss, seed, transpose)


def _fused(t: Tape, logits: Tensor) -> None:
    """One kernel that reads the logits; its gradient is made in backward from the same logits."""
    loss, weight, seed = (t.buffer(name, 4) for name in ("loss", "weight", "seed"))
    t.emit("nll", (logits,), (loss, weight))

    def transpose() -> None:
        t.add_grad(logits, t.kernel("dlogits", (logits, weight), logits))

    _end(t, logits, loss, seed, transpose)


def _vocab_parallel(t: Tape, logits: Tensor) -> None:
    """Three fp32 [B, S] sums over the vocabulary's ranks (the largest logit, the target's, the sum of exponentials);
    the fp32 softmax is kept, and becomes its own gradient in place (Megatron-LM core/tensor_parallel/cross_entropy.py;
    DTensor's loss_parallel exchanges the same).
    """
    loss, seed = (t.buffer(name, 4) for name in ("loss", "seed"))
    wide = t.kernel("to_float", (logits,), logits, "fp32") if t.half else logits
    rows = {d: axes for d, axes in logits.split.items() if d != "V"}
    sums = t.conventions.loss_reductions
    for i in range(sums):
        # Two of the three are sent as one where the engine fuses them: the same bytes in fewer calls.
        dims = ("B", "S", "pair") if i == 1 and sums == 2 else ("B", "S")
        part = Tensor("loss_rows", dims, rows, "fp32", logits.split.get("V", ()))
        t.emit("loss_rows", (wide,), (part,))
        t.move(part, rows, what="loss")
    softmax = t.kernel("softmax", (wide,), wide) if t.conventions.dtensor else wide
    if softmax is wide:
        t.emit("softmax_in_place", (wide,), ())
    t.emit("nll", (softmax,), (loss,))
    t.frame(wide)

    def transpose() -> None:
        d = t.kernel("log_softmax_backward", (softmax,), softmax) if t.conventions.dtensor else softmax
        if d is softmax:
            t.emit("softmax_backward_in_place", (softmax,), ())
        if t.half:
            d = t.kernel("to_half", (d,), logits, t.dtype)
        t.add_grad(logits, d)

    _end(t, logits, loss, seed, transpose)


def _in_place(t: Tape, logits: Tensor) -> None:
    """Transformer Engine's: each rank's largest logit, sum of exponentials and target's logit are gathered (three fp32
    numbers a token), and the gradient is written over the logits, in forward (pytorch/triton/cross_entropy.py).
    """
    loss, seed = (t.buffer(name, 4) for name in ("loss", "seed"))
    rows = {d: axes for d, axes in logits.split.items() if d != "V"}
    size = t.shapes.elements(("B", "S"), rows) * 3 * ITEMSIZE["fp32"]
    t.emit("online_softmax", (logits,), (part := t.buffer("loss_rows", size),))
    axes = logits.split.get("V", ())
    if axes:
        whole = t.buffer("loss_rows", size * t.shapes.ranks(axes))
        t.exchange("all_gather", axes, part, whole, what="loss")
        part = whole
    t.emit("cross_entropy_in_place", (logits, part), (loss,))

    def transpose() -> None:
        t.emit("scale_in_place", (logits,), ())
        t.add_grad(logits, logits)

    _end(t, logits, loss, seed, transpose)


def _end(t: Tape, logits: Tensor, loss: Tensor, seed: Tensor, transpose: Callable[[], None]) -> None:
    """What every loss leaves, and where its gradient comes from."""

    def backward() -> None:
        t.emit("ones_like", (), (seed,))
        transpose()
        t.mark("pre_backward")

    t.seed = (seed,)
    if t.conventions.step_keeps_logits:  # the caller's frame holds the loss too
        t.kept = (*t.kept, loss)
    t.then(logits, backward)
