"""Megatron's data parallelism: parameters and fp32 gradients in contiguous buffers, and a distributed optimizer over
them.

Conventions of Megatron-LM (core/distributed/param_and_grad_buffer.py, core/optimizer/distrib_optimizer.py; core 0.20):
gradients of all micro-batches are added into one fp32 buffer, and exchanged during the last backward, bucket by bucket;
ZeRO-1's gathers of the updated parameters overlap the next step's first forward, which is here this step's own. Of an
interleaved schedule's chunks both are begun by the schedule. ZeRO-2 and 3 are Megatron-FSDP's `optim_grads` and
`optim_grads_params`: what is stored split must be reduced, or gathered, in each micro-batch.

With `--fp8-param-gather` weights of fp8 products lie in a buffer of their own, of a byte each, and are gathered so.
What their backward reads is made of them then, a byte each (fp8_utils.py: `post_all_gather_processing`; Blackwell's
products do without, which is not told apart).

With `--optimizer-cpu-offload` (core/optimizer/cpu_offloading/hybrid_optimizer.py) masters and states are in the host's
memory, all of them or a fraction, and so is an fp32 copy of the gradients: these go down when all are reduced, the host
updates, and the masters come up in fp32, to be cast on the device, one after the other unless told to overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nanum.conventions import Conventions
from nanum.dtypes import ITEMSIZE
from nanum.layout import Structure
from nanum.parallel.buffer import Buffer, added, tensors_updated
from nanum.parallel.buffer_exchanges import BufferExchanges
from nanum.parallel.chain import Around, Chain, Each, Half
from nanum.parallel.late_sums import sums_at_the_end
from nanum.parallel.on_host import hybrid_states, hybrid_update, updates_on_host
from nanum.parallel.places import Direction, Part, Place
from nanum.parallel.stand_ins import stand_in_bytes
from nanum.parallel.units import orthogonalized
from nanum.program import DATA_STREAM, Compute, Held, Node, Wait


@dataclass(frozen=True, eq=False)
class FlatBuffers:
    """Buffers around the parts of a stage."""

    chain: Chain
    conventions: Conventions
    structure: Structure
    buffers: tuple[Each[Buffer], ...]  # of what lies on one mesh each
    data_ranks: Any

    @cached_property
    def _exchanges(self) -> BufferExchanges:
        return BufferExchanges(self.chain, self.conventions, self._zero, self.buffers, self.data_ranks)

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
        by_parts = self._exchanges.by_parts

        def starts(parts: list[tuple[Part, Any]]) -> list[Node]:
            nodes: list[Node] = []
            for part, presence in parts:
                if self._zero == 3:
                    nodes.append(Held("params", self._gathered(part) * presence, "gathered parameters"))
                for each in self.buffers:
                    nodes += self._exchanges.of_part(each[part].gather, "gather", direction, presence * by_parts)
            return nodes

        def with_gather(place: Place) -> tuple[list[Node], list[Node]]:
            enter, leave = around(place)
            ahead = [Wait(DATA_STREAM, "gather"), *starts(self.chain.follows(place, direction))]
            if direction == "forward" and isinstance(place.part, int):  # with the last layer's
                ends = sum(presence for part, presence in self.chain.follows(place, direction) if part == "head")
                if self._several:
                    ends = ends * by_parts
                for each in self.buffers:
                    ahead += self._exchanges.calls(each, each.layers[0].gather, "gather", direction, ends)
            return [*ahead, *enter], leave

        begin = starts(self.chain.begins(direction))
        if self._exchanges.bucketed and not self._several:
            for each in self.buffers:
                begin += self._exchanges.of_stage(each, lambda b: b.gather, "gather", direction, 1 - by_parts)
        if direction == "forward":
            layers = sum(times for part, times in self.chain.counted() if isinstance(part, int))
            alone = (layers == 0) * (by_parts if self._several else 1)  # an end that is a stage of its own
            for each in self.buffers:
                begin += self._exchanges.calls(each, each.layers[0].gather, "gather", direction, alone)
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

    def gather_ahead(self, ticket: str) -> list[Node]:
        """Begin to gather all of a chunk, but on the first stage."""
        return [] if self._after else self._exchanges.gather_all(ticket, "forward", 1 - self._exchanges.by_parts)

    def arrive(self, ticket: str) -> list[Node]:
        return [Wait(DATA_STREAM, ticket)]

    def reduce(self) -> list[Node]:
        """Begin to reduce all gradients of a chunk."""
        return self._exchanges.reduce_all()

    def _of(self, part: Part) -> list[Buffer]:
        return [each[part] for each in self.buffers]

    def _gathered(self, part: Part) -> Any:
        return sum(b.gather.payload_bytes for b in self._of(part) if b.gather)

    def _reshard(self, place: Place) -> list[Node]:
        return [Held("params", -self._gathered(place.part))] if self._zero == 3 else []

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
                leave += [*added(buffers, self.conventions), Held("grads", -transient)]
                if last and not self._several and not self._after:
                    leave += self._exchanges.reduce_part(buffers, self._exchanges.by_parts)
                return [], leave
            size = sum(b.elements for b in buffers) * ITEMSIZE[n.grad_dtype]
            leave += [
                Held("buffers", size, "input of the reduction"),
                Compute("copy_in", "backward", 0.0, transient + size, n.grad_dtype),
                Held("grads", -transient),
                *self._exchanges.reduce_part(buffers),
                Held("buffers", -size),
            ]
            return [], leave

        if zero == 3 and self.structure.reshard:
            nodes = self._gathering("backward", around)
        else:
            nodes = self.chain.backward([], around, half)
        if half != "input" and (zero >= 2 or (last and not self._several)):
            nodes += self._exchanges.reduce_all(1 if self._after else 1 - self._exchanges.by_parts)
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
            tensors = sum(tensors_updated(chunk.chain, chunk.buffers) for chunk in chunks)
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
                nodes += [*chunk._exchanges.gather_all("gather", "optimizer"), *chunk.arrive("gather")]
        return nodes

    def same_forward(self, *, gathers: bool, first: bool) -> tuple[Any, ...]:
        return ("F", gathers if self._zero == 3 else first and self._zero > 0)

    def same_backward(self, *, gathers: bool, first: bool, last: bool) -> tuple[Any, ...]:
        return ("B", last)
