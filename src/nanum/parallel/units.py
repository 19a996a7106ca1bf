"""Weights that are gathered and reduced together. The exchange of each is derived, weight by weight, from its two
splits: how it is computed with, and how ZeRO stores it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from nanum.arrays import most
from nanum.conventions import Conventions
from nanum.dtypes import ITEMSIZE, bytes_of
from nanum.operators.exchange import collective
from nanum.program import Collective, Node, Phase, Repeat
from nanum.sharding import EXPERT_ZERO_AXES, ZERO_AXES, Shapes, Split, Tensor, places, reshard
from nanum.states import States, is_hidden_matrix, newton_schulz

Matrices = tuple[tuple[Any, Any, Any], ...]
"""How many there are alike (experts), and rows and columns of each."""


def stored(w: Tensor, axes: tuple[str, ...], dim: str | None = None) -> Split:
    """ZeRO's split of a weight: its first dim, cut further over those `axes` that do not already cut it. Of experts it
    is each expert's first: there may be fewer experts than ranks.
    """
    have = places(w.split)
    dim = dim or w.dims[1 if w.dims[0] == "E" and len(w.dims) > 2 else 0]
    return {**w.split, dim: (*w.split.get(dim, ()), *(a for a in axes if a not in have))}


def zero_axes(w: Tensor, *, over_replicas: bool = False) -> tuple[str, ...]:
    """The axes over which ZeRO may split a weight, and what belongs to it."""
    axes = EXPERT_ZERO_AXES if "ep" in w.stays else ZERO_AXES
    return ("dp_replicate", *axes) if over_replicas else axes


@dataclass(frozen=True, eq=False)
class Unit:
    """Bytes and exchanges of one unit, on one rank."""

    gathers: tuple[Collective, ...]  # one for each mesh that weights are stored over
    reduce: tuple[Collective, ...]
    tp_sum: Collective | None  # of norm weights, where it was left for the reduction
    elements: Any  # trained ones, as computed with
    stored_elements: Any  # as ZeRO stores it, padded
    stored_bytes: Any  # of these, each in the dtype it is stored in
    whole_bytes: Any  # as computed with, in the storage that DTensor cut them into: padded over tp
    cast_bytes: Any  # of a shard's copy in another dtype than it is stored in, to be gathered
    own_elements: Any  # of trained ones without padding: those that the optimizer has states for
    largest_elements: Any  # of one tensor, of own_elements
    in_turn_elements: Any  # the most of two of one tensor's and one of the tensor's before it
    states_bytes: Any  # of the optimizer's states for own_elements
    counters_bytes: Any  # of its counts of steps
    tensors: Any
    weights_bytes: Any  # gathered, in the compute dtype, with their padding
    gather_bytes: Any  # the flat buffer
    grads_bytes: Any  # unreduced gradients as backward leaves them
    last_grad_bytes: Any
    reduce_bytes: Any  # the padded flat input of the reduction
    shard_bytes: Any  # its output, in the parameters' dtype
    sizes: tuple[Any, ...]  # elements of each tensor as computed with, in the model's order
    divided: tuple[bool, ...]  # is it of a module that tp divides?
    states: tuple[Any, ...]  # bytes of the states of each tensor as computed with
    counters: tuple[Any, ...]  # and of its count of steps
    matrices: Matrices  # rows and columns of those between activations, as computed with
    alone: Any = 0  # 1 where no other rank has a part of them: nothing is gathered
    groups: tuple[Unit, ...] = ()  # of weights on one mesh each, where they lie on several
    fp8_tensors: Any = 0  # those that are gathered in fp8

    @property
    def sent_bytes(self) -> Any:
        """Of its shard, in the dtype that is gathered."""
        if self.groups:
            return sum(group.sent_bytes for group in self.groups)
        return self.gather_bytes // self.gathers[0].group_size if self.gathers else self.gather_bytes

    @property
    def in_turn(self) -> tuple[Unit, ...]:
        """What is gathered and reduced one after the other (`_fsdp_init.py`: a parameter group for each mesh)."""
        return self.groups or (self,)

    def times(self, presence: Any, take: Any) -> Unit:
        """The unit where `presence` is 1, and nothing where it is 0; quantities taken to the stages' space."""

        def scale(q: Any) -> Any:
            return take(q) * presence

        def scaled(c: Collective | None) -> Collective | None:
            return c.times(presence, take) if c else None

        reduce = tuple(c.times(presence, take) for c in self.reduce)
        return Unit(
            tuple(c.times(presence, take) for c in self.gathers),
            reduce, scaled(self.tp_sum), scale(self.elements), scale(self.stored_elements), scale(self.stored_bytes),
            scale(self.whole_bytes), scale(self.cast_bytes), scale(self.own_elements), scale(self.largest_elements),
            scale(self.in_turn_elements),
            scale(self.states_bytes), scale(self.counters_bytes), scale(self.tensors), scale(self.weights_bytes),
            scale(self.gather_bytes), scale(self.grads_bytes), scale(self.last_grad_bytes), scale(self.reduce_bytes),
            scale(self.shard_bytes), tuple(map(scale, self.sizes)), self.divided, tuple(map(scale, self.states)),
            tuple(map(scale, self.counters)),
            tuple((take(k), take(rows), take(columns)) for k, rows, columns in self.matrices),
            take(self.alone), tuple(group.times(presence, take) for group in self.groups), scale(self.fp8_tensors),
        )  # fmt: skip

    def __add__(self, other: Unit) -> Unit:
        """One unit of both: the same exchanges, with the sum of their bytes. Its last gradient is the other's, where it
        has one.
        """
        return self.beside(other, several=False)

    def beside(self, other: Unit, *, several: bool) -> Unit:
        """One unit of both, which may remain groups of their own."""
        return Unit(
            _joined(self.gathers, other.gathers),
            _joined(self.reduce, other.reduce),
            _both(self.tp_sum, other.tp_sum),
            self.elements + other.elements,
            self.stored_elements + other.stored_elements,
            self.stored_bytes + other.stored_bytes,
            self.whole_bytes + other.whole_bytes,
            self.cast_bytes + other.cast_bytes,
            self.own_elements + other.own_elements,
            most(self.largest_elements, other.largest_elements),
            most(self.in_turn_elements, other.in_turn_elements),
            self.states_bytes + other.states_bytes,
            self.counters_bytes + other.counters_bytes,
            self.tensors + other.tensors,
            self.weights_bytes + other.weights_bytes,
            self.gather_bytes + other.gather_bytes,
            self.grads_bytes + other.grads_bytes,
            self.last_grad_bytes * (other.grads_bytes == 0) + other.last_grad_bytes,
            self.reduce_bytes + other.reduce_bytes,
            self.shard_bytes + other.shard_bytes,
            (*self.sizes, *other.sizes),
            (*self.divided, *other.divided),
            (*self.states, *other.states),
            (*self.counters, *other.counters),
            (*self.matrices, *other.matrices),
            groups=(*self.in_turn, *other.in_turn) if several else (),
            fp8_tensors=self.fp8_tensors + other.fp8_tensors,
        )


def scratch_bytes(conventions: Conventions, elements: Any, largest: Any, in_turn: Any) -> Any:
    """What the optimizer makes beside its states."""
    fused, at_once = "optimizer" in conventions.fused, conventions.optimizer_at_once
    return conventions.numerics.states.scratch_bytes(elements, largest, in_turn, fused=fused, at_once=at_once)


def as_dtype(c: Collective, dtype: str) -> Collective:
    """The same exchange in a dtype of another size."""
    new, old = ITEMSIZE[dtype], ITEMSIZE[c.dtype]
    return replace(c, dtype=dtype, payload_bytes=c.payload_bytes * new // old, wire_bytes=c.wire_bytes * new // old)


def _joined(ours: tuple[Collective, ...], theirs: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """Exchanges of one kind over the same axes are one."""
    found: dict[tuple[str, tuple[str, ...]], Collective] = {}
    for c in (*ours, *theirs):
        key = c.kind, c.axes
        found[key] = _add(found[key], c) if key in found else c
    return tuple(found.values())


def _both(a: Collective | None, b: Collective | None) -> Collective | None:
    return a.beside(b) if a and b else a or b


def _add(a: Collective, b: Collective) -> Collective:
    """One exchange of both: as bytes, where they are of several dtypes."""
    both = a.beside(b)
    dtype = a.dtype if a.dtype == b.dtype else "uint8"
    return replace(both, calls=(both.calls > 0) * 1, dtype=dtype)


def unit(
    shapes: Shapes,
    weights: Iterable[Tensor],
    grads: Mapping[Tensor, Tensor],
    conventions: Conventions,
    phase: Phase = "backward",
    *,
    whole: bool = False,
) -> Unit:
    """The unit of FSDP2: each weight is stored as a shard of its first dim, padded to equal shards, and so are its
    gradient and all that is exchanged; the optimizer sees what is not padding (`_fsdp_param.py`: `_sharded_param_data`
    beside `sharded_size`). Where weights are stored `whole`, their gradients are wanted whole by all data ranks. A
    weight without a gradient is stored and gathered, and no more.
    """
    weights = tuple(weights)
    meshes = [[w for w in weights if zero_axes(w) == axes] for axes in dict.fromkeys(map(zero_axes, weights))]
    first, *others = (_group(shapes, on_mesh, grads, conventions, phase, whole=whole) for on_mesh in meshes or [[]])
    for other in others:
        first = first.beside(other, several=True)
    return first


def _group(
    shapes: Shapes,
    weights: Sequence[Tensor],
    grads: Mapping[Tensor, Tensor],
    conventions: Conventions,
    phase: Phase,
    *,
    whole: bool,
) -> Unit:
    """Those of a unit's weights that lie on one mesh. A mesh of one rank has no gather: parameters are copied."""
    own = shapes
    numerics = conventions.numerics
    gathers: tuple[Collective, ...] = ()
    reduce: tuple[Collective, ...] = ()
    tp_sum: Collective | None = None
    elements: Any = 0
    stored_elements: Any = 0
    stored_bytes: Any = 0
    whole_bytes: Any = 0
    cast_bytes: Any = 0
    own_elements: Any = 0
    largest_elements: Any = 0
    in_turn_elements: Any = 0
    before: Any = 0  # elements of the tensor before
    weights_bytes: Any = 0
    states_bytes: Any = 0
    reduce_bytes: Any = 0
    shard_bytes: Any = 0
    grads_bytes: Any = 0
    for w in weights:
        axes = zero_axes(w, over_replicas=conventions.shards_over_replicas)
        shapes = own.first(axes)
        at_rest = w if whole else w.like(split=stored(w, axes))
        for m in reshard(at_rest, w.split)[1]:
            node = collective(shapes, m.kind, m.axes, m.before, m.after, "forward", "params")
            gathers = _joined(gathers, (node,))
        shard = shapes.elements(w.dims, at_rest.split)
        ranks = shapes.ranks(axes)
        sent, stored_as = bytes_of(shard, w.dtype), numerics.stored_dtype(w.dtype, trained=w in grads)
        weights_bytes = weights_bytes + sent * ranks
        stored_elements, stored_bytes = stored_elements + shard, stored_bytes + bytes_of(shard, stored_as)
        whole_bytes = whole_bytes + bytes_of(own.first(("tp",)).elements(w.dims, w.split), stored_as)
        cast_bytes = cast_bytes + sent * (stored_as != w.dtype)
        if w not in grads:
            continue
        elements = elements + shapes.elements(w.dims, w.split)
        mine = own.elements(w.dims, at_rest.split)
        own_elements, largest_elements = own_elements + mine, most(largest_elements, mine)
        in_turn_elements, before = most(in_turn_elements, 2 * mine + before), mine
        states_bytes = states_bytes + numerics.states.bytes(w.dims, own.shape(w.dims, at_rest.split))
        g = grads[w]
        grads_bytes = grads_bytes + shapes.bytes(g)
        if "tp" in g.partial:
            for m in reshard(g.like(size=None), g.split, dtype=numerics.grad_dtype, only=("tp",))[1]:
                tp_sum = _both(tp_sum, collective(shapes, m.kind, m.axes, m.before, m.after, phase, "grads"))
        due = tuple(a for a in g.partial if a != "tp")
        for m in reshard(g.like(size=None), at_rest.split, dtype=numerics.grad_dtype, only=due)[1]:
            node = collective(shapes, m.kind, m.axes, m.before, m.after, phase, "grads")
            reduce = _joined(reduce, (node,))
        reduce_bytes = reduce_bytes + shard * ranks * ITEMSIZE[numerics.grad_dtype]
        shard_bytes = shard_bytes + shard * ITEMSIZE[numerics.param_dtype]
    apart = any("ep" in w.stays for w in weights)
    alone = (own.ranks(EXPERT_ZERO_AXES) == 1) * 1 if apart else 0
    weights = [w for w in weights if w in grads]
    last = own.bytes(grads[weights[-1]]) if weights else 0  # a head's norm may have no weights
    states = tuple(numerics.states.bytes(w.dims, own.shape(w.dims, w.split)) for w in weights)
    counters = tuple(numerics.states.counter_bytes(w.dims) for w in weights)
    return Unit(
        gathers, reduce, tp_sum, elements, stored_elements, stored_bytes, whole_bytes, cast_bytes, own_elements,
        largest_elements, in_turn_elements, states_bytes, sum(counters), len(weights), weights_bytes,
        weights_bytes * (1 - alone),
        grads_bytes, last, reduce_bytes, shard_bytes, tuple(own.elements(w.dims, w.split) for w in weights),
        tuple(bool(w.stays) for w in weights), states, counters, hidden_matrices(own, weights), alone,
        fp8_tensors=sum(w.dtype == "fp8" for w in weights),
    )  # fmt: skip


def hidden_matrices(shapes: Shapes, weights: Iterable[Tensor]) -> Matrices:
    """Rows and columns of the matrices between activations, as computed with."""
    found = (shapes.shape(w.dims, w.split) for w in weights if is_hidden_matrix(w.dims))
    return tuple((prod(alike), rows, columns) for *alike, rows, columns in found)


def orthogonalized(states: States, parts: Iterable[tuple[Matrices, Any]], owners: Any = 1) -> list[Node]:
    """Muon's work on the matrices of parts, each part so many times, where `owners` ranks share them evenly; of another
    optimizer nothing.
    """
    if states.optimizer != "muon":
        return []
    nodes: list[Node] = []
    for matrices, times in parts:
        before: Any = 0
        for alike, rows, columns in matrices:  # dealt to the owners one after the other
            after = before + times * alike
            mine = -(-after // owners) + before // -owners
            nodes.append(Repeat(mine, newton_schulz((rows, columns))))
            before = after
    return nodes
