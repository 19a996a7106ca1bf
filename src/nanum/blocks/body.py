"""A body: forward and backward of one part of a model (the embedding, one layer, the head), emitted once and repeated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nanum.conventions import Conventions
from nanum.layout import Structure
from nanum.operators.lifetimes import split_step
from nanum.operators.tape import Tape
from nanum.program import Mark, Node
from nanum.sharding import BATCH_AXES, Shapes, Split, Tensor


@dataclass(frozen=True, eq=False)
class Body:
    """Program nodes of one part, and the weights that it uses. Unreduced gradients stay held after `backward`: the data-parallel
    engine releases them. `loss` and `loss_backward` are the head's alone: what follows the model's forward pass."""

    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    loss: tuple[Node, ...]
    loss_backward: tuple[Node, ...]
    weights: tuple[Tensor, ...]
    weight_grads: Mapping[Tensor, Tensor]
    input_bytes: Any = 0  # of what the part before (or the pipeline stage before) hands to it
    output_bytes: Any = 0  # of what it hands to the next part (or to the next pipeline stage)
    seed_bytes: Any = 0  # what is held to the end of the whole backward
    kept_bytes: Any = 0  # what a caller's frame holds to the end of the step


@dataclass(frozen=True)
class Streams:
    """The splits that the parts share: of the residual stream between layers, and of what a tensor-parallel region reads."""

    stream: Split
    whole: Split

    @classmethod
    def of(cls, structure: Structure) -> Streams:
        rows = ("cp", "tp") if structure.tensor == "sequence" else ("cp",)
        return cls({"B": BATCH_AXES, "S": rows}, {"B": BATCH_AXES, "S": ("cp",)})


def new_tape(shapes: Shapes, conventions: Conventions, structure: Structure) -> Tape:
    tp = () if structure.tensor == "none" else ("tp",)
    return Tape(shapes, conventions, tp, structure.tensor == "sequence", structure.attention == "flash")


def emit(
    tape: Tape,
    compute: Callable[[], Tensor | None],
    *,
    x: Tensor | None = None,
    keeps: frozenset[str] | None | str = "all",
) -> Body:
    """Run `compute` forward and its transpose, and lay out what is held."""
    y = compute()
    dy = dx = None
    if y is not None:
        dy = y.like(name="dy")
        tape.add_grad(y, dy)
    tape.run_backward()
    if x is not None:
        dx = tape.grad(x)
    forward, backward = split_step(
        tape.shapes,
        tape.forward,
        tape.backward,
        keeps=keeps,
        stops_early=tape.conventions.recompute_stops_early,
        enters=[t for t in (x,) if t is not None],
        leaves=[t for t in (y,) if t is not None],
        enters_back=[t for t in (dy,) if t is not None],
        leaves_back=[t for t in (dx,) if t is not None],
        stays_on=[*tape.weight_grads.values(), *tape.kept, *tape.seed],
    )
    kept: Any = 0
    for t in tape.kept:
        kept = kept + tape.shapes.bytes(t)
    seed = sum(tape.shapes.bytes(t) for t in tape.seed)
    forward, loss = _cut(forward, "post_forward", keep="before")
    loss_backward, backward = _cut(backward, "pre_backward", keep="after")
    handed, output = (tape.shapes.bytes(t) if t is not None else 0 for t in (x, y))
    return Body(forward, backward, loss, loss_backward, tuple(tape.weights), dict(tape.weight_grads), handed, output, seed, kept)


def _cut(nodes: tuple[Node, ...], mark: str, *, keep: str) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The nodes before and after a mark; without it, all on the side `keep`."""
    for i, node in enumerate(nodes):
        if isinstance(node, Mark) and node.name == mark:
            return nodes[:i], nodes[i + 1 :]
    return (nodes, ()) if keep == "before" else ((), nodes)
