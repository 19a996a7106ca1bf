"""One part's share of a flat buffer of parameters and of one of gradients, and the exchanges of these.

A buffer is cut as one flat dim, whatever tensors it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from nanum.conventions import Conventions
from nanum.dtypes import ITEMSIZE, bytes_of
from nanum.operators.exchange import collective
from nanum.parallel.buckets import carried, counted
from nanum.parallel.chain import Chain, Each
from nanum.parallel.stand_ins import Shape, stand_in_shapes
from nanum.parallel.units import Matrices, hidden_matrices, zero_axes
from nanum.program import Collective, Compute, Node, Repeat
from nanum.sharding import EXPERT_ZERO_AXES, ZERO_AXES, Shapes, Tensor, reshard


@dataclass(frozen=True, eq=False)
class Buffer:
    """One part's share of the flat buffers, on one rank."""

    gather: Collective | None  # of parameters in the compute dtype
    reduce: tuple[Collective, ...]
    elements: Any
    shard_elements: Any
    transient_grads_bytes: Any  # gradients that backward leaves outside the buffer
    tp_grads_elements: Any  # norm weights, whose sums over tp are still pending
    sizes: tuple[Any, ...]  # elements of each tensor, in order
    states_bytes: Any  # of the optimizer's states for all of them
    matrices: Matrices  # rows and columns of those between activations
    stand_ins: tuple[Shape, ...]  # of gradients that are in the buffer already
    frozen_bytes: Any  # of weights that are not trained, and lie in no buffer

    @property
    def matrix_elements(self) -> Any:
        return sum(map(prod, self.matrices))

    def times(self, presence: Any, take: Any) -> Buffer:
        return Buffer(
            self.gather.times(presence, take) if self.gather else None,
            tuple(c.times(presence, take) for c in self.reduce),
            take(self.elements) * presence,
            take(self.shard_elements) * presence,
            take(self.transient_grads_bytes) * presence,
            take(self.tp_grads_elements) * presence,
            tuple(take(q) * presence for q in self.sizes),
            take(self.states_bytes) * presence,
            tuple((take(k), take(rows), take(columns)) for k, rows, columns in self.matrices),
            tuple((take(rows) * presence, take(columns) * presence) for rows, columns in self.stand_ins),
            take(self.frozen_bytes) * presence,
        )

    def __add__(self, other: Buffer) -> Buffer:
        """Of two of which each stage has one at the most: that one."""
        gather = self.gather.beside(other.gather) if self.gather and other.gather else None
        return Buffer(
            gather,
            tuple(a.beside(b) for a, b in zip(self.reduce, other.reduce, strict=True)),
            self.elements + other.elements,
            self.shard_elements + other.shard_elements,
            self.transient_grads_bytes + other.transient_grads_bytes,
            self.tp_grads_elements + other.tp_grads_elements,
            (*self.sizes, *other.sizes),
            self.states_bytes + other.states_bytes,
            (*self.matrices, *other.matrices),
            (*self.stand_ins, *other.stand_ins),
            self.frozen_bytes + other.frozen_bytes,
        )


def buffer(
    shapes: Shapes,
    weights: Iterable[Tensor],
    grads: Mapping[Tensor, Tensor],
    conventions: Conventions,
    zero: int,
    *,
    experts: bool,
    fp8: bool = False,
) -> Buffer:
    """Of those weights that lie on experts' own mesh, or of the others: they are exchanged among other ranks; and of
    those that are stored in fp8, or of the others (param_and_grad_buffer.py: a buffer for each dtype). Those without a
    gradient are in no buffer, and whole on each rank (distributed_data_parallel.py: `requires_grad`).

    The exchanges are derived from the flat dim's splits: gradients are a pending sum over the data ranks, wanted split
    where ZeRO keeps the optimizer states (or the gradients) split, whole otherwise.
    """
    n = conventions.numerics
    elements: Any = 0
    transient: Any = 0
    pending_tp: Any = 0
    states: Any = 0
    sizes = []
    frozen: Any = 0
    here = [w for w in weights if (zero_axes(w) == EXPERT_ZERO_AXES, w.dtype == "fp8") == (experts, fp8)]
    for w in here:
        if w not in grads:
            stored_as = n.stored_dtype(w.dtype, trained=False)
            frozen = frozen + bytes_of(shapes.elements(w.dims, w.split), stored_as)
    weights = tuple(w for w in here if w in grads)
    for w in weights:
        size = shapes.elements(w.dims, w.split)
        elements = elements + size
        sizes.append(size)
        states = states + n.states.bytes(w.dims, shapes.shape(w.dims, w.split))
        g = grads[w]
        transient = transient + shapes.bytes(g)
        if "tp" in g.partial:
            pending_tp = pending_tp + size
    flat = Shapes(shapes.mesh, {"flat": elements})
    shards = EXPERT_ZERO_AXES if experts else ZERO_AXES
    cut = {"flat": shards} if zero else {}
    over = shards if zero and conventions.reduces_whole else ("dp_replicate", *shards)
    pending = Tensor("flat_grads", ("flat",), {}, n.grad_dtype, over, "grads")
    _, moves = reshard(pending, {} if conventions.reduces_whole else cut)
    reduce = tuple(collective(flat, m.kind, m.axes, m.before, m.after, "backward", "grads") for m in moves)
    gather = None
    if zero:
        at_rest = Tensor("flat_params", ("flat",), cut, "fp8" if fp8 else n.compute_dtype, category="params")
        (m,) = reshard(at_rest, {})[1]
        gather = collective(flat, m.kind, m.axes, m.before, m.after, "forward", "params")
    shard, matrices = flat.elements(("flat",), cut), hidden_matrices(shapes, weights)
    stand_ins = stand_in_shapes(shapes, weights, conventions)
    return Buffer(
        gather, reduce, elements, shard, transient, pending_tp, tuple(sizes), states, matrices, stand_ins, frozen
    )


def added(buffers: Sequence[Buffer], conventions: Conventions) -> list[Node]:
    """Gradients are added to those of earlier micro-batches, tensor by tensor: both are read and one is written, and
    what is narrower is made as wide before.
    """
    if not conventions.adds_apart:
        return []
    n = conventions.numerics
    own, wide = ITEMSIZE[n.compute_dtype], ITEMSIZE[n.grad_dtype]
    size = sum(b.elements for b in buffers) * (3 * wide + (own != wide) * (own + wide))
    calls = sum(len(b.sizes) for b in buffers)
    return [Compute("add_grads", "backward", 0.0, size, n.grad_dtype, launches=calls, calls=calls)]


def gather_updated(chain: Chain, each: Each[Buffer]) -> list[Node]:
    """All updated parameters in one call."""
    parts = [(each[part].gather, count) for part, count in chain.counted()]
    nodes: list[Node] = [Repeat(count, (carried(replace(c, phase="optimizer")),)) for c, count in parts if c]
    return nodes + [counted(replace(c, phase="optimizer"), 1) for c, _ in parts[1:2] if c]


def tensors_updated(chain: Chain, buffers: Iterable[Each[Buffer]]) -> Any:
    """Of which this rank updates a part, were each cut by no rank: its even share of them."""
    count: Any = 0
    for each in buffers:
        gather = each.layers[0].gather
        here = sum(times * len(each[part].sizes) for part, times in chain.counted())
        count = count - (-here // (gather.group_size if gather else 1))
    return count
