"""A body: one part of a model (the embedding, a layer, the head), forward and backward, emitted once and repeated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nanum.conventions import EVERYTHING, Conventions, Kept
from nanum.job import ALL, Trained
from nanum.layout import Structure
from nanum.operators.exchange import beside_products
from nanum.operators.halves import Halves, halves
from nanum.operators.joined import join
from nanum.operators.lifetimes import split_step
from nanum.operators.tape import Tape
from nanum.program import Held, Mark, Node
from nanum.sharding import BATCH_AXES, Shapes, Split, Tensor


@dataclass(frozen=True, eq=False)
class Body:
    """Program nodes of one part, and the weights that it uses. Unreduced gradients stay held after `backward`: the
    data-parallel engine releases them. In `adding()` they are added, as they are made, into those of an earlier
    backward. `loss` and `loss_backward` are the head's alone: what follows the model's forward pass.
    """

    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    loss: tuple[Node, ...]
    loss_backward: tuple[Node, ...]
    weights: tuple[Tensor, ...]
    weight_grads: Mapping[Tensor, Tensor]
    input_bytes: Any = 0  # of what the part before (or the pipeline stage before) hands to it
    output_bytes: Any = 0  # of what it hands to the next part (or to the next pipeline stage)
    input_grad_bytes: Any = 0  # of what it hands back, where what it was handed needs a gradient
    output_grad_bytes: Any = 0  # of what it is handed back
    needs_grad: bool = True  # is there a gradient of what it makes?
    gives_grad: bool = True  # and one of its input, where it has one?
    seed_bytes: Any = 0  # what is held to the end of the whole backward
    kept_bytes: Any = 0  # what a caller's frame holds to the end of the step
    keeps_input: bool = False  # is its input among what forward saves for backward?
    emitted: Emitted | None = None  # the operations that it was laid out from
    shared: tuple[str, ...] = ()  # weights whose gradients wait for another part's
    lends_bytes: Any = 0  # of what it makes for later parts beside its output
    back_in_bytes: Any = 0  # of the gradients of what parts share, as later ones leave them
    back_out_bytes: Any = 0  # and as this one does, of what it borrowed
    keeps: frozenset[str] = frozenset()  # what it borrowed, and its backward reads

    @cached_property
    def adding(self) -> tuple[Node, ...]:
        """Backward where there are gradients of the weights already: each is added, and goes, as soon as the operation
        that made it has made its input's gradient too, which comes next. Those of `shared` weights stay.
        """
        made = {g.name for w, g in self.weight_grads.items() if w.name not in self.shared}
        before = (*self.forward, *self.loss)  # a loss may make gradients in the forward pass
        nodes: list[Node] = [
            Held("grads", -node.bytes, node.name)
            for node in before
            if isinstance(node, Held) and node.category == "grads" and node.name in made
        ]
        new: list[Node] = []
        old: list[Node] = []
        for node in self.backward:
            nodes.append(node)
            if isinstance(node, Held):
                if node.category == "grads" and node.name in made:
                    new.append(Held("grads", -node.bytes, node.name))
            else:
                nodes += old
                new, old = [], new
        return (*nodes, *old, *new)

    @property
    def halves(self) -> Halves:
        """Backward in two halves; the loss's own backward comes before the first, and is `loss_backward_half`."""
        return self._halves[1]

    @property
    def loss_backward_half(self) -> tuple[Node, ...]:
        """The loss's backward, where backward goes on in halves."""
        return self._halves[0]

    @cached_property
    def _halves(self) -> tuple[tuple[Node, ...], Halves]:
        if self.emitted is None:
            raise ValueError("a part that was not emitted has no halves")
        both = self.emitted.halves()
        loss, rest = _cut(both.input, "pre_backward", keep="after")
        return loss, replace(both, input=rest)


@dataclass(frozen=True)
class Streams:
    """The splits that the parts share: of the residual stream between layers, and of what a tensor-parallel region
    reads.
    """

    stream: Split
    whole: Split

    @classmethod
    def of(cls, structure: Structure) -> Streams:
        rows = ("cp", "tp") if structure.tensor == "sequence" else ("cp",)
        return cls({"B": BATCH_AXES, "S": rows}, {"B": BATCH_AXES, "S": ("cp",)})


def new_tape(
    shapes: Shapes,
    conventions: Conventions,
    structure: Structure,
    trained: Trained = ALL,
    *,
    own_trained: bool = True,
    adapters: bool = False,
) -> Tape:
    """For a part of which the own weights are trained or not; linear layers in it may have `adapters`."""
    tp = () if structure.tensor == "none" else ("tp",)
    flash = structure.attention == "flash"
    sequence, own = structure.tensor == "sequence", structure.own_experts
    return Tape(
        shapes, conventions, tp, sequence, flash, own, trained, own_trained, adapters, structure.cp_kind,
        structure.dispatcher, structure.dispatch_dtype,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Emitted:
    """A part's operations, forward and backward, before it is settled what is kept of the one for the other."""

    tape: Tape
    x: Tensor | None
    y: Tensor | None
    dy: Tensor | None
    dx: Tensor | None
    back_out: tuple[Tensor, ...] = ()  # gradients of what it borrowed

    def body(self, kept: Kept = EVERYTHING, shared: tuple[str, ...] = ()) -> Body:
        """Lay out what is held, where `kept` outlives the forward pass. The gradients of weights named in `shared` wait
        for those of another part, whatever they are added into.
        """
        tape, bytes_of = self.tape, self.tape.shapes.bytes

        def given(t: Tensor | None) -> list[Tensor]:
            return [] if t is None else [t]

        lends = [s.tensor for s in tape.shared if not s.borrowed]
        arrived = [s.arrives for s in tape.shared if s.arrives is not None]
        forward, backward, saved = split_step(
            tape.shapes,
            tape.forward,
            tape.backward,
            kept=kept,
            stops_early=tape.conventions.recompute_stops_early,
            enters=given(self.x),
            leaves=[*given(self.y), *lends],
            enters_back=[*given(self.dy), *arrived],
            leaves_back=[*given(self.dx), *self.back_out],
            stays_on=[*tape.weight_grads.values(), *tape.kept, *tape.seed],
            borrowed=[*tape.given, *(s.tensor for s in tape.shared if s.borrowed)],
        )
        kept, seed, handed, output, back, given_back = (
            sum(map(bytes_of, ts)) for ts in (tape.kept, tape.seed, *map(given, (self.x, self.y, self.dx, self.dy)))
        )
        lent, back_in, back_out = (sum(map(bytes_of, ts)) for ts in (lends, arrived, self.back_out))
        forward, loss = _cut(forward, "post_forward", keep="before")
        loss_backward, backward = _cut(backward, "pre_backward", keep="after")
        grads = dict(tape.weight_grads)
        return Body(
            forward, backward, loss, loss_backward, tuple(tape.weights), grads, handed, output, back, given_back,
            self.y is None or self.dy is not None, self.x is None or self.dx is not None, seed, kept, self.x in saved,
            self, shared, lent, back_in, back_out,
            frozenset(s.tensor.name for s in tape.shared if s.borrowed and s.tensor in saved),
        )  # fmt: skip

    def halves(self) -> Halves:
        """Backward in two halves, where all is kept that backward reads. Raises ValueError for a part without input,
        which has no gradient to give before those of its weights.
        """
        if self.dx is None:
            raise ValueError("backward has no half for an input's gradient where there is no input")
        tape = self.tape
        return halves(
            tape.shapes,
            tape.forward,
            tape.backward,
            enters=[] if self.x is None else [self.x],
            enters_back=[] if self.dy is None else [self.dy],
            result=self.dx,
            weight_grads=set(tape.weight_grads.values()),
            stays_on=[*tape.weight_grads.values(), *tape.kept, *tape.seed],
            products_alone=tape.conventions.stores_products,
        )


def emit(
    tape: Tape, compute: Callable[[], Tensor | None], *, x: Tensor | None = None, given_grad: bool = True
) -> Emitted:
    """Run `compute` forward, and its transpose: as far as something trained, or `x` where `given_grad`, needs it."""
    if x is not None and given_grad:
        tape.require_grad(x)
    y = compute()
    dy = None
    if y is not None and tape.requires_grad(y):
        dy = y.like(name="dy")
        tape.add_grad(y, dy)
    tape.begin_shared()
    tape.run_backward()
    dx = tape.grad(x) if x is not None and given_grad else None
    borrowed = tape.end_shared()
    join(tape)
    beside_products(tape)
    return Emitted(tape, x, y, dy, dx, borrowed)


def _cut(nodes: tuple[Node, ...], mark: str, *, keep: str) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The nodes before and after a mark; without it, all on the side `keep`."""
    for i, node in enumerate(nodes):
        if isinstance(node, Mark) and node.name == mark:
            return nodes[:i], nodes[i + 1 :]
    return (nodes, ()) if keep == "before" else ((), nodes)
