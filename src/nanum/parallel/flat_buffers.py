"""Megatron's data parallelism: parameters and fp32 gradients in contiguous buffers, and a distributed optimizer over
them.

Conventions of Megatron-LM (core/distributed/param_and_grad_buffer.py, core/optimizer/distrib_optimizer.py; core 0.20):
gradients of all micro-batches are added into one fp32 buffer, and exchanged during the last backward, bucket by bucket;
ZeRO-1's gathers of the updated parameters overlap the next step's first forward, which is here this step's own. Of an
interleaved schedule's chunks both are begun by the schedule. ZeRO-2 and 3 are Megatron-FSDP's `optim_grads` and
`optim_grads_params`: what is stored split must be reduced, or gathered, in each micro-batch. A buffer is cut as one
flat dim, whatever tensors it holds.

With `--fp8-param-gather` weights of fp8 products lie in a buffer of their own, of a byte each, and are gathered so.
What their backward reads is made of them then, a byte each (fp8_utils.py: `post_all_gather_processing`; Blackwell's
products do without, which is not told apart).

With `--optimizer-cpu-offload` (core/optimizer/cpu_offloading/hybrid_optimizer.py) masters and states are in the host's
memory, all of them or a fraction, and so is an fp32 copy of the gradients: these go down when all are reduced, the host
updates, and the masters come up in fp32, to be cast on the device, one after the other unless told to overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from nanum.arrays import most, where
from nanum.collectives import wire_bytes
from nanum.conventions import Conventions
from nanum.dtypes import ITEMSIZE, bytes_of
from nanum.layout import Structure
from nanum.operators.exchange import collective
from nanum.parallel.buckets import bucket_count, carried, counted
from nanum.parallel.chain import Around, Chain, Each, Half
from nanum.parallel.on_host import hybrid_states, hybrid_update, updates_on_host
from nanum.parallel.places import Direction, Part, Place
from nanum.parallel.stand_ins import Shape, stand_in_bytes, stand_in_shapes
from nanum.parallel.units import Matrices, hidden_matrices, orthogonalized, zero_axes
from nanum.program import DATA_STREAM, Collective, Compute, Held, Node, Phase, Wait
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


@dataclass(frozen=True, eq=False)
class FlatBuffers:
    """Buffers around the parts of a stage."""

    chain: Chain
    conventions: Conventions
    structure: Structure
    buffers: tuple[Each[Buffer], ...]  # of what lies on one mesh each
    data_ranks: Any

    def _total(self, field: str) -> Any:
        return sum(self.chain.total(field, each) for each in self.buffers)

    @property
    def _zero(self) -> int:
        return self.structure.zero

    def resident(self) -> list[Node]:
        n, zero = self.conventions.numerics, self._zero
        whole, shard = self._total("elements"), self._total("shard_elements")
        less = sum(self.chain.total("elements", each) for each in self.buffers if self._in_fp8(each))
        params = (shard if zero == 3 else whole) * ITEMSIZE[n.param_dtype] - less
        return [
            Held("params", params, "parameters"),
            Held("params", less, "fp8 parameters the other way round"),
            Held("params", self._total("frozen_bytes"), "frozen parameters"),
            Held("grads", (shard if zero >= 2 else whole) * ITEMSIZE[n.grad_dtype], "gradient buffer"),
            *hybrid_states(self.structure, self._states_bytes, self._updated),
        ]

    def _in_fp8(self, each: Each[Buffer]) -> bool:
        """Are its parameters of one byte each?"""
        gather = each.layers[0].gather
        return gather is not None and gather.dtype == "fp8"

    @property
    def _updated(self) -> Any:
        """Elements that this rank updates."""
        return self._total("shard_elements" if self._zero else "elements")

    def once(self, chunks: Sequence[FlatBuffers]) -> list[Node]:
        """What a rank has besides, whatever the number of its chunks."""
        found = (
            (count, shape)
            for chunk in chunks
            for each in chunk.buffers
            for part, count in chunk.chain.counted()
            for shape in each[part].stand_ins
        )
        size = stand_in_bytes(found, self.conventions.numerics.compute_dtype)
        each, of_shard, constant = self.conventions.flat_copies
        copies = constant + sum(
            each * chunk._total("elements") + of_shard * chunk._total("shard_elements") for chunk in chunks
        )
        return [Held("buffers", size, "stand-ins for weights' gradients"), Held("buffers", copies, "flat copies")]

    @property
    def _states_bytes(self) -> Any:
        """Of what this rank updates: elements of a shard of the flat dim, or tensors."""
        if not self._zero:
            return self._total("states_bytes")
        return self._total("shard_elements") * self.conventions.numerics.states.each()

    # --- exchanges --------------------------------------------------------------------------------------------------
    def _start(self, c: Collective | None, ticket: str, phase: Phase, share: Any = 1) -> list[Node]:
        """Start an exchange, or that `share` (0 or 1) of it. Buckets do not end where parts do: where there are buckets
        the parts carry the bytes, and `_calls` the calls.
        """
        if c is None:
            return []
        started = c.started(phase, DATA_STREAM, ticket, share)
        return [carried(started) if self._bucketed else started]

    @property
    def _bucketed(self) -> bool:
        return bool(self.conventions.bucket_elements) and self._zero < 2

    @property
    def _by_parts(self) -> Any:
        """1 where buckets follow one another; only the first stage has several (distributed_data_parallel.py)."""
        return self.chain.stage.embeds if self._bucketed else 1

    def _whole(
        self, each: Each[Buffer], which: Callable[[Buffer], Collective | None], ticket: str, phase: Phase, share: Any
    ) -> list[Node]:
        """One exchange of all that a stage has."""
        found = [(which(each[part]), times) for part, times in self.chain.counted()]
        template = found[1][0]
        if template is None:
            return []
        payload = sum(c.payload_bytes * times for c, times in found if c)
        wire = sum(c.wire_bytes * times for c, times in found if c)
        return self._start(replace(template, payload_bytes=payload, wire_bytes=wire), ticket, phase, share)

    def _calls(
        self, each: Each[Buffer], template: Collective | None, ticket: str, phase: Phase, share: Any = 1
    ) -> list[Node]:
        """The calls of a whole stage's buckets, without bytes: they went with the parts."""
        if template is None or not self._bucketed or (isinstance(share, int) and not share):
            return []
        return [counted(template.started(phase, DATA_STREAM, ticket), self._bucket_count(each) * share)]

    def _bucket_count(self, each: Each[Buffer]) -> Any:
        """Buckets of at least max(`bucket_elements`, 1e6 x data ranks) elements (Megatron's default); one bucket on a
        stage that is not the first.
        """
        stage = self.chain.stage
        least = most(self.conventions.bucket_elements, 1_000_000 * stage.take(self.data_ranks))
        least = where(stage.embeds > 0, least, 2**40)
        return bucket_count(self.chain, [each.map(lambda b: b.sizes)], least, least)

    # --- forward and backward ---------------------------------------------------------------------------------------
    def forward(self, *, gathers: bool, first: bool) -> list[Node]:
        """The `first` forward of a step fetches what the optimizer updated, where the update itself does not. ZeRO-3
        gathers in each that `gathers`.
        """
        if not (gathers if self._zero == 3 else first and self._zero):
            return self.chain.forward(lambda place: ([], []), [])
        if self._after:
            return self.chain.forward(lambda place: ([], []), [])
        return self._gathering("forward", lambda place: ([], self._reshard(place) if self.structure.reshard else []))

    def _gathering(self, direction: Direction, around: Around) -> list[Node]:
        """Parts whose weights are gathered one ahead. ZeRO-3 holds them from their start until they are resharded."""
        by_parts = self._by_parts

        def starts(parts: list[tuple[Part, Any]]) -> list[Node]:
            nodes: list[Node] = []
            for part, presence in parts:
                if self._zero == 3:
                    nodes.append(Held("params", self._gathered(part) * presence, "gathered parameters"))
                for each in self.buffers:
                    nodes += self._start(each[part].gather, "gather", direction, presence * by_parts)
            return nodes

        def with_gather(place: Place) -> tuple[list[Node], list[Node]]:
            enter, leave = around(place)
            ahead = [Wait(DATA_STREAM, "gather"), *starts(self.chain.follows(place, direction))]
            if direction == "forward" and isinstance(place.part, int):  # with the last layer's
                ends = sum(presence for part, presence in self.chain.follows(place, direction) if part == "head")
                if self._several:
                    ends = ends * by_parts
                for each in self.buffers:
                    ahead += self._calls(each, each.layers[0].gather, "gather", direction, ends)
            return [*ahead, *enter], leave

        begin = starts(self.chain.begins(direction))
        if self._bucketed and not self._several:
            for each in self.buffers:
                begin += self._whole(each, lambda b: b.gather, "gather", direction, 1 - by_parts)
        if direction == "forward":
            return [*begin, *self.chain.forward(with_gather, [])]
        return self.chain.backward(begin, with_gather)

    @property
    def _several(self) -> bool:
        """Is this one of a rank's several chunks? Its exchanges are then the schedule's (`schedule.turns`), but that
        the first stage gathers its buckets in its first forward, as they are needed.
        """
        return self.structure.pipelined and self.structure.virtual_stages > 1

    @property
    def _after(self) -> bool:
        """Is nothing exchanged beside the passes?"""
        return not self.conventions.reduces_beside and self._zero < 2

    def _all(self, ticket: Literal["gather", "reduce"]) -> list[Node]:
        """Begin to gather, or to reduce, all of a stage."""
        nodes: list[Node] = []
        phase: Phase = "optimizer" if ticket == "gather" else "backward"
        for each in self.buffers:

            def exchanges(b: Buffer) -> Sequence[Collective | None]:
                return [b.gather] if ticket == "gather" else b.reduce

            for i, c in enumerate(exchanges(each.layers[0])):
                nodes += self._whole(each, lambda b, i=i: exchanges(b)[i], ticket, phase, 1)  # type: ignore[misc]
                nodes += self._calls(each, c, ticket, phase)
        return nodes

    def gather_ahead(self, ticket: str) -> list[Node]:
        """Begin to gather all of a chunk, but on the first stage."""
        nodes: list[Node] = []
        if self._after:
            return nodes
        for each in self.buffers:
            nodes += self._whole(each, lambda b: b.gather, ticket, "forward", 1 - self._by_parts)
            nodes += self._calls(each, each.layers[0].gather, ticket, "forward", 1 - self._by_parts)
        return nodes

    def arrive(self, ticket: str) -> list[Node]:
        return [Wait(DATA_STREAM, ticket)]

    def reduce(self) -> list[Node]:
        """Begin to reduce all gradients of a chunk."""
        return self._all("reduce")

    def _of(self, part: Part) -> list[Buffer]:
        return [each[part] for each in self.buffers]

    def _gathered(self, part: Part) -> Any:
        return sum(b.gather.payload_bytes for b in self._of(part) if b.gather)

    def _reshard(self, place: Place) -> list[Node]:
        return [Held("params", -self._gathered(place.part))] if self._zero == 3 else []

    def _added(self, buffers: list[Buffer]) -> list[Node]:
        """Gradients are added to those of earlier micro-batches, tensor by tensor: both are read and one is written,
        and what is narrower is made as wide before.
        """
        if not self.conventions.adds_apart:
            return []
        n = self.conventions.numerics
        own, wide = ITEMSIZE[n.compute_dtype], ITEMSIZE[n.grad_dtype]
        size = sum(b.elements for b in buffers) * (3 * wide + (own != wide) * (own + wide))
        calls = sum(len(b.sizes) for b in buffers)
        return [Compute("add_grads", "backward", 0.0, size, n.grad_dtype, launches=calls, calls=calls)]

    def backward(self, *, gathers: bool, first: bool, last: bool, half: Half = "whole") -> list[Node]:
        """Gradients are reduced in the last backward or, where they are stored split, in each. In halves the second has
        the weights'.
        """
        n, zero = self.conventions.numerics, self._zero
        pipelined = self.structure.pipelined
        frees = self.structure.reshard or last or not pipelined

        def around(place: Place) -> tuple[list[Node], list[Node]]:
            if half == "input":
                return [], []
            buffers = self._of(place.part)
            transient = sum(b.transient_grads_bytes for b in buffers)
            leave = self._reshard(place) if frees else []
            if zero < 2:
                leave += [*self._added(buffers), Held("grads", -transient)]
                if last and not self._several and not self._after:
                    reduce = [c for b in buffers for c in b.reduce]
                    leave += [node for c in reduce for node in self._start(c, "reduce", "backward", self._by_parts)]
                return [], leave
            size = sum(b.elements for b in buffers) * ITEMSIZE[n.grad_dtype]
            leave += [
                Held("buffers", size, "input of the reduction"),
                Compute("copy_in", "backward", 0.0, transient + size, n.grad_dtype),
                Held("grads", -transient),
                *(node for b in buffers for c in b.reduce for node in self._start(c, "reduce", "backward")),
                Held("buffers", -size),
            ]
            return [], leave

        if zero == 3 and self.structure.reshard:
            nodes = self._gathering("backward", around)
        else:
            nodes = self.chain.backward([], around, half)
        if half != "input" and (zero >= 2 or (last and not self._several)):
            for each in self.buffers:
                for i, c in enumerate(each.layers[0].reduce):
                    if self._bucketed or self._after:
                        share = 1 if self._after else 1 - self._by_parts
                        nodes += self._whole(each, lambda b, i=i: b.reduce[i], "reduce", "backward", share)  # type: ignore[misc]
                    nodes += self._calls(each, c, "reduce", "backward")
            nodes.append(Wait(DATA_STREAM, "reduce"))
        return nodes

    def optimizer(self) -> list[Node]:
        """What was left for the end of the step, and the update."""
        return self.update([self])

    def update(self, chunks: Sequence[FlatBuffers]) -> list[Node]:
        """That of all chunks of a rank at once."""
        n = self.conventions.numerics
        nodes: list[Node] = [Wait(DATA_STREAM, "reduce")] if self._several else []
        pending = sum(chunk._total("tp_grads_elements") for chunk in chunks)
        nodes += sums_at_the_end(self.conventions, self.structure, [chunk.chain for chunk in chunks], pending)
        updated = sum(chunk._updated for chunk in chunks)
        states = sum(chunk._states_bytes for chunk in chunks)
        moved = 2 * states + updated * (ITEMSIZE[n.grad_dtype] + ITEMSIZE[n.param_dtype])
        for chunk in chunks:
            for each in chunk.buffers:
                nodes += orthogonalized(n.states, ((each[part].matrices, k) for part, k in chunk.chain.counted()))
        if updates_on_host(self.structure):
            tensors = sum(chunk._tensors for chunk in chunks)
            return [*nodes, *hybrid_update(self.structure, states, updated, moved, tensors)]
        grads = updated * ITEMSIZE[n.grad_dtype]
        whole = sum(chunk._total("elements") for chunk in chunks) * ITEMSIZE[n.grad_dtype]
        # Their norm is read, they are scaled to be no larger (clip_grads.py), and set to zero before the next step.
        nodes.append(Compute("grad_norm", "optimizer", 0.0, grads, n.grad_dtype))
        nodes.append(Compute("clip_grads", "optimizer", 0.0, 2 * grads, n.grad_dtype))
        nodes.append(Compute("optimizer", "optimizer", 0.0, moved, "fp32"))
        nodes.append(Compute("zero_grads", "optimizer", 0.0, whole, n.grad_dtype))
        if self._zero and self._after:  # on all stages at once, and not as each begins
            for chunk in chunks:
                nodes += [*chunk._all("gather"), *chunk.arrive("gather")]
        return nodes

    @property
    def _tensors(self) -> Any:
        """Of which this rank updates a part, were each cut by no rank: its even share of them."""
        count: Any = 0
        for each in self.buffers:
            gather = each.layers[0].gather
            here = sum(times * len(each[part].sizes) for part, times in self.chain.counted())
            count = count - (-here // (gather.group_size if gather else 1))
        return count

    def same_forward(self, *, gathers: bool, first: bool) -> tuple[Any, ...]:
        return ("F", gathers if self._zero == 3 else first and self._zero > 0)

    def same_backward(self, *, gathers: bool, first: bool, last: bool) -> tuple[Any, ...]:
        return ("B", last)


def sums_at_the_end(
    conventions: Conventions, structure: Structure, chains: Sequence[Chain], tp_grads_elements: Any
) -> list[Node]:
    """Sums of a rank's chunks that were left for the end of the step, after the reductions over data ranks."""
    nodes: list[Node] = []
    dtype, chain = conventions.numerics.grad_dtype, chains[0]

    def all_reduce(axes: tuple[str, ...], ranks: Any, calls: Any, elements: Any) -> Collective:
        size = elements * ITEMSIZE[dtype]
        wire = wire_bytes("all_reduce", size, ranks)
        return Collective("all_reduce", axes, "optimizer", "grads", dtype, ranks, calls, size * (calls > 0), wire)

    if structure.tensor != "none" and not conventions.tp_grads_at_once:
        # Over tp, in one coalesced call: of weights that each rank used for its part of a sequence, or for its heads
        # (Megatron-LM: finalize_model_grads.py).
        nodes.append(all_reduce(("tp",), chain.tp, (chain.tp > 1) * (tp_grads_elements > 0) * 1, tp_grads_elements))
    if chain.tied_elements is not None and chain.table_trained and structure.pipelined:
        # The two copies of a tied embedding add their gradients, on the first and the last stage.
        ends = sum(each.stage.embeds + each.stage.heads for each in chains)
        nodes.append(all_reduce(("pp",), 2, ends, chain.tied_elements * ends))
    return nodes
