"""What each side of an fp8 product is quantized from, when, and what that moves.

Weights are quantized wherever they are used, unless they were before they were gathered: then backward, where nothing
was kept for it, lays them the other way round for its product (torchao, float8_ops.py: `preprocess_addmm`; Transformer
Engine does once, when they are gathered). So it does, for a weight's gradient, with the gradient that the other product
reads as it is, and with an input that came in fp8: products of fp8 sum over what lies closest. The scale of what is
`remade` (torchao's dynamic scaling, float8_scaling_utils.py) is of the whole tensor, or of a row of what is summed:
then that gradient is quantized once more, by the other dim (float8_linear.py). Where inputs are `kept` (Transformer
Engine), weights are quantized once, in the first micro-batch, which is not counted, and activations by rows and by
columns: by the norm that makes them, or by a kernel of their own.
"""

from __future__ import annotations

from typing import Any

from nanum.dtypes import ITEMSIZE
from nanum.operators.exchange import collective
from nanum.operators.recorder import Recorder
from nanum.program import Collective, Compute
from nanum.sharding import Split, Tensor, places


def quantized(t: Recorder, x: Tensor, known: dict[Tensor, Tensor]) -> Tensor:
    """`x` in fp8, as a product reads it: what is `known` to have been quantized is not quantized again. Ranks that each
    have a part of a DTensor agree on its scale.
    """
    if x.category == "params" and x.dtype == "fp8":
        turned = t.phase == "backward" and t.conventions.fp8 == "remade"
        return turned_round(t, x) if turned else x
    if x.dtype in ("fp8", "mxfp8"):
        return x
    if x not in known or x.category == "params":
        out = known[x] = x.like(name="quantize", size=None, dtype="fp8")
        moved = _moved_bytes(t, x, out)
        _agree_on_scale(t, x)
        t.record("quantize", (x,), (out,), Compute("quantize", t.phase, 0.0, moved, t.dtype, calls=min(1, t.calls)))
    return known[x]


def turned_round(t: Recorder, x: Tensor) -> Tensor:
    """A copy that lies the other way round, as another product reads it."""
    return t.kernel("transpose", (x,), x.like(size=None), "fp8")


def for_other_product(t: Recorder, small: Tensor, gradient: Tensor) -> Tensor:
    """The gradient that one product reads as it is, for the other: its copy, or with scales of the other dim."""
    if t.conventions.fp8_scales == "rows" and gradient.dtype != "fp8":
        return quantized(t, gradient, {})
    return turned_round(t, small)


def sent_quantized(t: Recorder, x: Tensor, goal: Split, known: dict[Tensor, Tensor]) -> Tensor:
    """`x` as it is gathered for a product, if it is: in fp8 where the engine exchanges that. It is what autograd keeps
    (torchao, float8_tensor_parallel.py: `PrepareFloat8ModuleInput`, `NoopFwToFloat8BwDynamic`; Transformer Engine,
    distributed.py: `_all_gather_fp8`).
    """
    gathers = places(x.split).keys() - places(goal).keys()
    if not t.conventions.fp8_exchanges or x.category == "params" or x.partial or not gathers:
        return x
    return quantized(t, x, known)


def _agree_on_scale(t: Recorder, x: Tensor) -> None:
    """Ranks quantize their parts of a DTensor by the largest value of all. (Transformer Engine does so of current
    scaling alone: delayed scaling has one exchange a pass, blocks have their own scales.)
    """
    c = t.conventions
    if c.dtensor and c.fp8_exchanges and x.category != "params" and "tp" in places(x.split):
        scale = Tensor("scale", (), {}, "fp32", category="buffers", size=ITEMSIZE["fp32"])
        node = collective(t.shapes, "all_reduce", ("tp",), scale, scale, t.phase, "scales")
        t.record("all_reduce", (x,), (scale,), node)


def _moved_bytes(t: Recorder, x: Tensor, out: Tensor) -> Any:
    if t.conventions.fp8 == "remade":  # read for its largest value, and again to be scaled by that
        return t.shapes.bytes(out) + 2 * t.shapes.bytes(x)
    if x.category == "params":
        return 0 * t.shapes.bytes(out)
    by_rows_and_columns = 2 * t.shapes.bytes(out)
    return by_rows_and_columns + t.shapes.bytes(x) * (not _of_norm(t, x))


def _of_norm(t: Recorder, x: Tensor) -> bool:
    """Has a norm made it, whatever it was exchanged since?"""
    made = next((op for op in reversed(t.forward) if x in op.writes), None)
    if made is not None and isinstance(made.node, Collective):
        return _of_norm(t, made.reads[0])
    return made is not None and "norm" in made.name
