"""Megatron's data parallelism: parameters and fp32 gradients in contiguous buffers, and a distributed optimizer over
them.

Conventions of Megatron-LM (core/distributed/param_and_grad_buffer.py, core/optimizer/distrib_optimizer.py; core 0.20):
gradients of all micro-batches are added into one fp32 buffer, and exchanged during the last backward, bucket by bucket;
ZeRO-1's gathers of the updated parameters overlap the next step's first forward, which is here this step's own. ZeRO-2
and 3 are Megatron-FSDP's `optim_grads` and `optim_grads_params`: what is stored split must be reduced, or gathered, in
each micro-batch. A buffer is cut as one flat dim, whatever tensors it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from nanum.arrays import distinct, most
from nanum.conventions import ITEMSIZE, Conventions
from nanum.layout import Structure
from nanum.operators.tape import collective
from nanum.parallel.chain import Chain, Place
from nanum.parallel.fully_shard import STREAM, copy, held
from nanum.program import Collective, Compute, Node, Wait
from nanum.sharding import BATCH_AXES, ZERO_AXES, Shapes, Tensor, reshard


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

    def times(self, presence: Any, take: Any) -> Buffer:
        def scaled(c: Collective) -> Collective:
            return replace(
                c, group_size=take(c.group_size), calls=take(c.calls) * presence,
                payload_bytes=take(c.payload_bytes) * presence, wire_bytes=take(c.wire_bytes) * presence,
            )  # fmt: skip

        return Buffer(
            scaled(self.gather) if self.gather else None,
            tuple(map(scaled, self.reduce)),
            take(self.elements) * presence,
            take(self.shard_elements) * presence,
            take(self.transient_grads_bytes) * presence,
            take(self.tp_grads_elements) * presence,
            tuple(take(q) * presence for q in self.sizes),
        )

    def __add__(self, other: Buffer) -> Buffer:
        """Of two of which each stage has one at the most: that one."""
        gather = _sum(self.gather, other.gather) if self.gather and other.gather else None
        return Buffer(
            gather,
            tuple(_sum(a, b) for a, b in zip(self.reduce, other.reduce, strict=True)),
            self.elements + other.elements,
            self.shard_elements + other.shard_elements,
            self.transient_grads_bytes + other.transient_grads_bytes,
            self.tp_grads_elements + other.tp_grads_elements,
            (*self.sizes, *other.sizes),
        )


def _sum(a: Collective, b: Collective) -> Collective:
    return replace(
        a,
        calls=a.calls + b.calls,
        payload_bytes=a.payload_bytes + b.payload_bytes,
        wire_bytes=a.wire_bytes + b.wire_bytes,
    )


def buffer(
    shapes: Shapes, weights: Iterable[Tensor], grads: Mapping[Tensor, Tensor], conventions: Conventions, zero: int
) -> Buffer:
    """The exchanges are derived from the flat dim's splits: gradients are a pending sum over the data ranks, wanted
    split where ZeRO keeps the optimizer states (or the gradients) split, whole otherwise.
    """
    n = conventions.numerics
    elements: Any = 0
    transient: Any = 0
    pending_tp: Any = 0
    sizes = []
    for w in weights:
        size = shapes.elements(w.dims, w.split)
        elements = elements + size
        sizes.append(size)
        g = grads[w]
        transient = transient + shapes.bytes(g)
        if "tp" in g.partial:
            pending_tp = pending_tp + size
    flat = Shapes(shapes.mesh, {"flat": elements})
    cut = {"flat": ZERO_AXES} if zero else {}
    pending = Tensor("flat_grads", ("flat",), {}, n.grad_dtype, (*BATCH_AXES, "cp"), "grads")
    _, moves = reshard(pending, cut)
    reduce = tuple(collective(flat, m.kind, m.axes, m.before, m.after, "backward", "grads") for m in moves)
    gather = None
    if zero:
        at_rest = Tensor("flat_params", ("flat",), cut, n.compute_dtype, category="params")
        (m,) = reshard(at_rest, {})[1]
        gather = collective(flat, m.kind, m.axes, m.before, m.after, "forward", "params")
    return Buffer(gather, reduce, elements, flat.elements(("flat",), cut), transient, pending_tp, tuple(sizes))


@dataclass(frozen=True, eq=False)
class FlatBuffers:
    chain: Chain
    conventions: Conventions
    structure: Structure
    embedding: Buffer
    layer: Buffer
    head: Buffer
    data_ranks: Any

    def _buffer(self, place: Place) -> Buffer:
        return {"embedding": self.embedding, "head": self.head}.get(place, self.layer)

    def _total(self, field: str) -> Any:
        return (
            self.chain.stage.layers * getattr(self.layer, field)
            + getattr(self.embedding, field)
            + getattr(self.head, field)
        )

    def resident(self) -> list[Node]:
        n, zero = self.conventions.numerics, self.structure.zero
        whole, shard = self._total("elements"), self._total("shard_elements")
        return [
            held("params", (shard if zero == 3 else whole) * ITEMSIZE[n.param_dtype], "parameters"),
            held("grads", (shard if zero >= 2 else whole) * ITEMSIZE[n.grad_dtype], "gradient buffer"),
            held("optimizer_states", (shard if zero else whole) * n.state_bytes, "optimizer states"),
        ]

    def _gathered(self, b: Buffer) -> Any:
        return b.gather.payload_bytes if b.gather else 0

    def _bucketed(self, c: Collective) -> Collective:
        """The same bytes, with the calls left to `_calls`: buckets do not end where layers do."""
        return replace(c, calls=c.calls * 0) if self.conventions.bucket_elements and self.structure.zero < 2 else c

    def _exchange(self, c: Collective | None, ticket: str, phase: str | None = None) -> list[Node]:
        if c is None:
            return []
        stream = STREAM if self.conventions.overlaps_data_parallel else None
        return [replace(self._bucketed(c), stream=stream, ticket=ticket, phase=phase or c.phase)]  # type: ignore[arg-type]

    def _calls(self, which: str) -> list[Node]:
        """The calls of a whole stage's buckets, without bytes: they went with the parts."""
        template = self.layer.gather if which == "gather" else None
        templates = [template] if template else list(self.layer.reduce) if which == "reduce" else []
        if not self.conventions.bucket_elements or self.structure.zero >= 2:
            return []
        count = buckets(
            self.chain, self.embedding, self.layer, self.head, self.conventions.bucket_elements, self.data_ranks
        )
        stream = STREAM if self.conventions.overlaps_data_parallel else None
        return [
            replace(
                c,
                calls=(c.group_size > 1) * count,
                payload_bytes=c.payload_bytes * 0,
                wire_bytes=c.wire_bytes * 0,
                stream=stream,
                ticket=which,
            )
            for c in templates
        ]

    def forward(self, *, gathers: bool, first: bool) -> list[Node]:
        """The `first` forward of a step fetches what the optimizer updated; ZeRO-3 gathers in each."""
        zero = self.structure.zero
        each = zero == 3
        if not each and not (first and zero and self.conventions.overlaps_data_parallel):
            return self.chain.forward(lambda place: ([], []), [])

        def around(place: Place) -> tuple[list[Node], list[Node]]:
            b = self._buffer(place)
            enter: list[Node] = [*self._exchange(b.gather, "gather"), Wait(STREAM, "gather")]
            if not each:
                return enter, []
            enter.insert(0, held("params", self._gathered(b), "gathered parameters"))
            return enter, [held("params", -self._gathered(b))] if self.structure.reshard else []

        nodes = self.chain.forward(around, [])
        return [*self._calls("gather"), *nodes] if not each else nodes

    def backward(self, *, gathers: bool, first: bool, last: bool) -> list[Node]:
        zero = self.structure.zero
        n = self.conventions.numerics
        reduces = zero >= 2 or last

        def around(place: Place) -> tuple[list[Node], list[Node]]:
            b = self._buffer(place)
            enter: list[Node] = []
            leave: list[Node] = []
            if zero == 3 and self.structure.reshard:
                enter += [
                    held("params", self._gathered(b), "gathered parameters"),
                    *self._exchange(b.gather, "gather", "backward"),
                ]
                enter.append(Wait(STREAM, "gather"))
            if zero == 3:
                leave.append(held("params", -self._gathered(b)))
            if zero < 2:
                leave.append(held("grads", -b.transient_grads_bytes))
                leave += [node for c in b.reduce if reduces for node in self._exchange(c, "reduce")]
            else:
                size = b.elements * ITEMSIZE[n.grad_dtype]
                leave += [
                    held("buffers", size, "input of the reduction"),
                    copy("copy_in", "backward", size, n.grad_dtype),
                ]
                leave += [held("grads", -b.transient_grads_bytes)]
                leave += [node for c in b.reduce for node in self._exchange(c, "reduce")]
                leave += [held("buffers", -size)]
            return enter, leave

        nodes = self.chain.backward([], around)
        if reduces:
            nodes += [*self._calls("reduce"), Wait(STREAM, "reduce")]
        return nodes

    def optimizer(self) -> list[Node]:
        n, zero = self.conventions.numerics, self.structure.zero
        nodes: list[Node] = []
        stage = self.chain.stage
        pending = self._total("tp_grads_elements")
        if self.structure.tensor == "sequence" and not self.conventions.tp_grads_at_once:
            # Sums of the norm weights over tp, once a step in one coalesced call (finalize_model_grads.py).
            tp = self.chain.tp
            size = pending * ITEMSIZE[n.grad_dtype]
            nodes.append(
                Collective(
                    "all_reduce",
                    ("tp",),
                    "optimizer",
                    "grads",
                    n.grad_dtype,
                    tp,
                    (tp > 1) * 1,
                    size * (tp > 1),
                    size * 2 * (tp - 1) // tp,
                )
            )
        if self.chain.tied_elements is not None and self.structure.pipelined:
            # The two copies of a tied embedding add their gradients, on the first and the last stage.
            ends = stage.embeds + stage.heads
            size = self.chain.tied_elements * ITEMSIZE[n.grad_dtype] * ends
            nodes.append(Collective("all_reduce", ("pp",), "optimizer", "grads", n.grad_dtype, 2, ends, size, size))
        updated = self._total("shard_elements" if zero else "elements")
        moved = updated * (2 * n.state_bytes + ITEMSIZE[n.grad_dtype] + ITEMSIZE[n.param_dtype])
        nodes.append(Compute("optimizer", "optimizer", 0.0, moved, "fp32"))
        if zero in (1, 2) and not self.conventions.overlaps_data_parallel:
            for place, times in (("embedding", 1), ("last", stage.layers), ("head", 1)):
                c = self._buffer(place).gather  # type: ignore[arg-type]
                if c:
                    nodes.append(
                        replace(
                            c,
                            phase="optimizer",
                            calls=c.calls * times,
                            payload_bytes=c.payload_bytes * times,
                            wire_bytes=c.wire_bytes * times,
                        )
                    )
        return nodes

    def same_forward(self, *, gathers: bool, first: bool) -> tuple[Any, ...]:
        return ("F", first and self.structure.zero > 0)

    def same_backward(self, *, gathers: bool, first: bool, last: bool) -> tuple[Any, ...]:
        return ("B", last or self.structure.zero >= 2)


# --- buckets ---------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=4096)
def _bucket_count(
    embedding: tuple[int, ...], layer: tuple[int, ...], layers: int, head: tuple[int, ...], least_elements: int
) -> int:
    """Buckets are filled with whole tensors in the order in which gradients become ready, and closed once they are
    large enough.
    """
    count = filled = 0
    for size in (*reversed(head), *tuple(reversed(layer)) * layers, *reversed(embedding)):
        filled += size
        if size and filled >= least_elements:
            count, filled = count + 1, 0
    return count + (filled > 0)


def buckets(chain: Chain, embedding: Buffer, layer: Buffer, head: Buffer, least_elements: int, data_ranks: Any) -> Any:
    """Buckets of one stage: at least max(`least_elements`, 1e6 x data ranks) elements each (Megatron's default)."""
    stage = chain.stage
    least = most(least_elements, 1_000_000 * stage.take(data_ranks))
    parts = (embedding.sizes, layer.sizes, head.sizes)

    def count(layers: Any, least: Any, *sizes: tuple[Any, ...]) -> int:
        e, m, h = (tuple(map(int, part)) for part in sizes)
        return _bucket_count(e, m, int(layers), h, int(least))

    if not any(isinstance(q, np.ndarray) for q in (stage.layers, least, *layer.sizes, *head.sizes)):
        return count(stage.layers, least, *parts)
    # What tensors are left of is told by tp, and by which ends are here.
    _, inverse = distinct((stage.layers, stage.embeds, stage.heads, chain.tp, least))
    _, first = np.unique(inverse, return_index=True)

    def pick(q: Any, i: int) -> Any:
        return q[i] if isinstance(q, np.ndarray) and q.ndim else q

    sizes = ([tuple(pick(q, i) for q in part) for part in parts] for i in first)
    return np.array([count(pick(stage.layers, i), pick(least, i), *of) for i, of in zip(first, sizes, strict=True)])[
        inverse
    ]
