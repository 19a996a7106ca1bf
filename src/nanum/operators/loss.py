"""Cross-entropy over the vocabulary: eager fp32 kernels, one fused kernel, or a loss whose logits stay split over the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from nanum.dtypes import ITEMSIZE
from nanum.operators.exchange import exchange
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

    end_with(t, logits, loss, seed, transpose)


def _fused(t: Tape, logits: Tensor) -> None:
    """One kernel that reads the logits; its gradient is made in backward from the same logits."""
    loss, weight, seed = (t.buffer(name, 4) for name in ("loss", "weight", "seed"))
    t.emit("nll", (logits,), (loss, weight))

    def transpose() -> None:
        t.add_grad(logits, t.kernel("dlogits", (logits, weight), logits))

    end_with(t, logits, loss, seed, transpose)


def _vocab_parallel(t: Tape, logits: Tensor) -> None:
    """Three fp32 [B, S] sums over the vocabulary's ranks: the largest logit, the target's, the sum of exponentials.

    Megatron keeps the fp32 softmax, which becomes its own gradient in place (core/tensor_parallel/cross_entropy.py).
    DTensor's loss_parallel keeps a log-softmax, and its backward makes four more of it, three of them at once
    (torch/distributed/tensor/parallel/loss.py: `_log_softmax`, `_nll_loss_and_log_softmax_backward`).
    """
    loss, seed = (t.buffer(name, 4) for name in ("loss", "seed"))
    wide = t.kernel("to_float", (logits,), logits, "fp32") if t.half else logits
    eager = t.conventions.dtensor and "loss" not in t.conventions.fused
    shifted = _row_sums(t, wide, eager=eager)
    softmax = t.kernel("softmax", (shifted,), wide) if t.conventions.dtensor else wide
    if softmax is wide:
        t.emit("softmax_in_place", (wide,), ())
    t.emit("nll", (softmax,), (loss,))
    t.frame(wide, shifted)

    def transpose() -> None:
        if eager:
            target = t.kernel("zeros", (), softmax)
            both = t.kernel("add", (target, t.kernel("exp", (softmax,), softmax)), softmax)
            d = t.kernel("log_softmax_backward", (both,), softmax, holds=(target, softmax))
        elif t.conventions.dtensor:
            d = t.kernel("log_softmax_backward", (softmax,), softmax)
        else:
            t.emit("softmax_backward_in_place", (softmax,), ())
            d = softmax
        if t.half:
            d = t.kernel("to_half", (d,), logits, t.dtype, holds=(softmax,) if eager else ())
        t.add_grad(logits, d)

    end_with(t, logits, loss, seed, transpose)


def _row_sums(t: Tape, wide: Tensor, *, eager: bool) -> Tensor:
    """Sum over the vocabulary's ranks; what is left of the logits, less the largest where that is a kernel apart."""
    rows = {d: axes for d, axes in wide.split.items() if d != "V"}
    sums = t.conventions.loss_reductions
    shifted = wide
    for i in range(sums):
        # Two of the three are sent as one where the engine fuses them: the same bytes in fewer calls.
        dims = (*wide.dims[:-1], "pair") if i == 1 and sums == 2 else wide.dims[:-1]
        part = Tensor("loss_rows", dims, rows, "fp32", wide.split.get("V", ()))
        source = t.kernel("exp", (shifted,), wide) if eager and i == 1 else shifted
        t.emit("loss_rows", (source,), (part,))
        t.move(part, rows, what="loss")
        if eager and i == 0:
            shifted = t.kernel("shift", (wide,), wide)
    return shifted


def _in_place(t: Tape, logits: Tensor) -> None:
    """Transformer Engine's: each rank's largest logit, sum of exponentials and target's logit are gathered (three fp32
    numbers a token), and the gradient is written over the logits, in forward (pytorch/triton/cross_entropy.py).
    """
    loss, seed = (t.buffer(name, 4) for name in ("loss", "seed"))
    rows = {d: axes for d, axes in logits.split.items() if d != "V"}
    size = t.shapes.elements(logits.dims[:-1], rows) * 3 * ITEMSIZE["fp32"]
    t.emit("online_softmax", (logits,), (part := t.buffer("loss_rows", size),))
    axes = logits.split.get("V", ())
    if axes:
        whole = t.buffer("loss_rows", size * t.shapes.ranks(axes))
        exchange(t, "all_gather", axes, part, whole, what="loss")
        part = whole
    t.emit("cross_entropy_in_place", (logits, part), (loss,))

    def transpose() -> None:
        t.emit("scale_in_place", (logits,), ())
        t.add_grad(logits, logits)

    end_with(t, logits, loss, seed, transpose)


def end_with(t: Tape, logits: Tensor, loss: Tensor, seed: Tensor, transpose: Callable[[], None]) -> None:
    """What every loss leaves, and where its gradient comes from."""

    def backward() -> None:
        t.emit("ones_like", (), (seed,))
        transpose()
        if seed is t.seed[-1]:  # of several losses the model's own comes last, and first in backward
            t.mark("pre_backward")

    t.seed = (*t.seed, seed)
    if t.conventions.step_keeps_logits:  # the caller's frame holds the loss too
        t.kept = (*t.kept, loss)
    t.then(logits, backward)
