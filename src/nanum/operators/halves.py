"""A backward in two halves: what the input's gradient needs, and what is left for the weights' (zero-bubble schedules).

PyTorch (torch/distributed/pipelining/_backward.py at 2.13) runs as the first half a backward with dead code eliminated,
for its only result is the input's gradient; the second is all the rest. The first retains the graph, so no saved tensor
below the loss goes before the second has run, whoever reads it; and the gradients that the first made for the second's
operations wait for it. So nothing of the activations is freed early, whatever the papers count on.

The papers' own code is another matter (`Conventions.stores_products`; sail-sg/zero-bubble-pipeline-parallelism,
megatron/core/weight_grad_store.py and tensor_parallel/layers.py). A linear layer's backward puts the product of its
weight's gradient into a queue, with its two operands, and does all else at once; the graph goes with the first half.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanum.operators.lifetimes import lifetimes
from nanum.operators.recorder import Op
from nanum.program import Mark, Node
from nanum.sharding import Shapes, Tensor


@dataclass(frozen=True, eq=False)
class Halves:
    """`input` makes the input's gradient, `weight` those of the weights. `retained_bytes` are saved, and read by the
    first half alone, yet there until the second has run; `loss_bytes`, those of the loss, until the first has.
    """

    input: tuple[Node, ...]
    weight: tuple[Node, ...]
    retained_bytes: Any
    loss_bytes: Any


def divided(
    backward: Sequence[Op], result: Tensor, weight_grads: Collection[Tensor], *, products_alone: bool
) -> tuple[list[Op], list[Op]]:
    """The operations of each half, in order. One that makes both kinds of gradient is run in each, for its own part; or
    in the first, where the second has `products_alone`.
    """
    needed = {result}
    if products_alone:
        needed.update(t for op in backward if not _is_product(op) for t in op.writes if t in weight_grads)
    chosen: set[int] = set()
    for i, op in reversed(list(enumerate(backward))):
        if needed.intersection(op.writes):
            chosen.add(i)
            needed.update(op.reads)
    first: list[Op] = []
    second: list[Op] = []
    made: set[Tensor] = set()
    for i, op in enumerate(backward):
        own = () if products_alone else tuple(t for t in op.writes if t in weight_grads)
        if i in chosen:
            first.append(replace(op, writes=tuple(t for t in op.writes if t not in own)) if own else op)
            made.update(first[-1].writes)
            if own:
                second.append(replace(op, writes=own))
        elif isinstance(op.node, Mark) or (not op.writes and made.issuperset(_written(backward, op.reads))):
            first.append(op)  # a frame that returns in the first half, or a moment that something hangs on
        else:
            second.append(op)
    return first, second


def _is_product(op: Op) -> bool:
    """As `Tape.product` names them, whether one is a kernel of its own or has become part of another (`joined`)."""
    return op.name.startswith("dw_")


def _written(ops: Sequence[Op], tensors: Collection[Tensor]) -> set[Tensor]:
    return {t for op in ops for t in op.writes if t in tensors}


def halves(
    shapes: Shapes,
    forward: Sequence[Op],
    backward: Sequence[Op],
    *,
    enters: Collection[Tensor],
    enters_back: Collection[Tensor],
    result: Tensor,
    weight_grads: Collection[Tensor],
    stays_on: Collection[Tensor],
    products_alone: bool = False,
) -> Halves:
    """Both halves of a body's backward as Program nodes; `result` is its input's gradient, handed out after the first.
    With `products_alone` the second is the products of weights' gradients, and the graph is gone before it.

    What `lifetimes.split_step` says of `enters`, `enters_back` and `stays_on` holds here.
    """
    first, second = divided(backward, result, weight_grads, products_alone=products_alone)
    kept = {t for op in forward for t in op.writes} | set(enters)
    saved = {t for op in backward for t in op.reads if t in kept} | {t for t in stays_on if t in kept}
    later = {t for op in second for t in op.reads}
    mark = next((i for i, op in enumerate(first) if isinstance(op.node, Mark) and op.name == "pre_backward"), -1)
    below = {t for op in first[mark + 1 :] for t in op.reads} | later
    loss = {t for t in saved if t not in below and t not in stays_on}  # the graph above the head's weights goes at once
    waits = {t for op in first for t in op.writes if t in later} | {t for t in enters_back if t in later}
    retained = saved - loss - later - set(stays_on)
    kept_on = saved
    if products_alone:
        kept_on, retained, loss = saved & later, set(), set()
    end = len(first) - 1
    one = lifetimes(
        shapes,
        first,
        dict.fromkeys(saved) | dict.fromkeys(enters_back, 0),
        {result: end, **dict.fromkeys(kept_on), **dict.fromkeys(waits), **dict.fromkeys(stays_on)},
    )
    other = lifetimes(shapes, second, dict.fromkeys(saved & later) | dict.fromkeys(waits), dict.fromkeys(stays_on))
    return Halves(one, other, *(sum(map(shapes.bytes, tensors)) for tensors in (retained, loss)))
