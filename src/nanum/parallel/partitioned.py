"""Weights whole on each rank, of which it updates its share: DeepSpeed's ZeRO-1 and 2, and its plain data parallelism.

Conventions of DeepSpeed 0.19.6 (runtime/zero/stage_1_and_2.py, runtime/fp16/fused_optimizer.py, runtime/engine.py):
- parameters lie in one flat buffer, of which each rank has an equal part in fp32, with the states of its optimizer;
- a gradient is copied, as it becomes ready, into a bucket (`reduce_bucket_size`; two in turn under `overlap_comm`);
  before one that would not fit, the bucket is all-reduced, also where each rank keeps but its share
  (`use_multi_rank_bucket_allreduce`), and unless told otherwise backward waits for it;
- ZeRO-2 does so in each backward, ZeRO-1 in the last; before it, and without ZeRO, gradients are kept whole. Without
  ZeRO they are reduced after the last backward, and so they are in a pipeline;
- a rank's share of the gradients is made fp32 for the update, and the updated parameters are gathered at once.
- with `offload_optimizer` masters, states, their gradients in fp32 and a half-precision copy of the masters are in the
  host's memory. A rank's share of the reduced gradients goes there, made fp32 on the device, in the last backward; in
  the others, and before that one, in half precision, to be added on the device to what came before. All copies are on
  the stream of the compute (a comment in stage_1_and_2.py says why). The host updates, and the weights come up in half
  precision.
What flattening a full bucket takes until it is reduced is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain as joined
from typing import Any

from nanum.arrays import least, most
from nanum.conventions import Conventions
from nanum.dtypes import ITEMSIZE
from nanum.layout import Structure
from nanum.parallel.buckets import Kinds, Sizes, carried, counted, per_stage
from nanum.parallel.buffer import Buffer, gather_updated, tensors_updated
from nanum.parallel.chain import Chain, Each, copy
from nanum.parallel.late_sums import sums_at_the_end
from nanum.parallel.on_host import cpu_adam, updates_on_host
from nanum.parallel.places import Place
from nanum.parallel.units import orthogonalized
from nanum.program import (
    DATA_STREAM,
    FROM_HOST,
    TO_HOST,
    Collective,
    Compute,
    Held,
    Node,
    OnHost,
    Phase,
    Repeat,
    Wait,
    host_copy,
)


@dataclass(frozen=True, eq=False)
class Partitioned:
    chain: Chain
    conventions: Conventions
    structure: Structure
    buffers: Each[Buffer]

    def _total(self, field: str) -> Any:
        return self.chain.total(field, self.buffers)

    @property
    def _grad(self) -> int:
        return ITEMSIZE[self.conventions.numerics.grad_dtype]

    @property
    def _share(self) -> Any:
        """Elements that a rank updates."""
        return self._total("shard_elements" if self.structure.zero else "elements")

    @property
    def _states_bytes(self) -> Any:
        matrices, states = self._total("matrix_elements"), self.conventions.numerics.states
        shared = matrices * self._share // most(self._total("elements"), 1)
        return states.of_vectors(self._share, shared)

    @property
    def _offloads(self) -> bool:
        """Does the host update?"""
        return updates_on_host(self.structure)

    @property
    def _largest(self) -> Any:
        """Elements of one tensor."""
        found: Any = 0
        for part, times in self.chain.counted():
            for size in self.buffers[part].sizes:
                found = most(found, size * (times >= 1))
        return found

    def resident(self) -> list[Node]:
        if self._offloads:
            return [*self._weights(), *self._on_host()]
        return [*self._weights(), Held("optimizer_states", self._states_bytes, "masters and optimizer states")]

    def _on_host(self) -> list[Node]:
        n = self.conventions.numerics
        room = self._largest * self._grad  # there twice, on either side
        half = self._share * ITEMSIZE[n.param_dtype]
        return [
            OnHost(self._states_bytes, "masters and optimizer states"),
            OnHost(self._share * ITEMSIZE["fp32"], "fp32 gradients"),
            OnHost(half + room, "half-precision weights, and room for a gradient"),
            Held("buffers", room, "room for a gradient"),
        ]

    def _weights(self) -> list[Node]:
        params = self._total("elements") * ITEMSIZE[self.conventions.numerics.param_dtype]
        return [
            Held("params", params, "parameters"),
            Held("params", self._total("frozen_bytes"), "frozen parameters"),
        ]

    def forward(self, *, gathers: bool, first: bool) -> list[Node]:
        return self.chain.forward(lambda place: ([], []), [])

    # --- backward ---------------------------------------------------------------------------------------------------
    def backward(self, *, gathers: bool, first: bool, last: bool) -> list[Node]:
        zero = self.structure.zero
        reduces = zero == 2 or last
        at_the_end = self.structure.pipelined or not zero
        adds = not first and zero < 2  # into gradients that were kept whole

        def around(place: Place) -> tuple[list[Node], list[Node]]:
            b = self.buffers[place.part]
            leave: list[Node] = []
            if adds:
                leave += [copy("accumulate", "backward", b.transient_grads_bytes, self.conventions.numerics.grad_dtype)]
                leave += [Held("grads", -b.transient_grads_bytes)]
            if reduces and not at_the_end:
                leave += [*self._into_bucket(b), *(node for c in b.reduce for node in self._reduced(carried(c)))]
            return [], leave

        if not reduces:
            return self.chain.backward([], around)
        nodes = self.chain.backward([] if at_the_end else self._room(), around)
        if at_the_end:
            nodes += self._room()
            for part, count in self.chain.counted():
                b = self.buffers[part]
                moved = [node for c in b.reduce for node in self._reduced(carried(c))]
                nodes.append(Repeat(count, (*(self._into_bucket(b) if zero else ()), *moved)))
        for c in self.buffers.layers[0].reduce:
            nodes += self._reduced(counted(c, self._bucket_count()))
        if self.conventions.buckets.overlaps:
            nodes.append(Wait(DATA_STREAM, "reduce"))
        if self._offloads:
            return [*nodes, *self._down(first=first, last=last), *self._room_released(adds=False)]
        return [*nodes, *self._room_released(adds=zero == 2 and not first)]

    def _down(self, *, first: bool, last: bool) -> list[Node]:
        """A rank's share of the gradients to the host."""
        half, wide = self._share * self._grad, self._share * ITEMSIZE["fp32"]
        nodes: list[Node] = []
        if not first:
            nodes.append(self._copied(FROM_HOST, "grads", half))
            nodes.append(copy("accumulate", "backward", half, self.conventions.numerics.grad_dtype))
        if not (first and last):
            nodes.append(self._copied(TO_HOST, "grads", half))
            if first or self.structure.zero == 1:  # made once, and kept
                nodes.append(OnHost(half, "gradients that are added up"))
        if last:
            one = least(self._largest, self._share) * ITEMSIZE["fp32"]
            nodes += [Held("grads", one, "an fp32 gradient"), copy("to_float", "backward", wide, "fp32")]
            nodes += [self._copied(TO_HOST, "grads", wide, "fp32"), Held("grads", -one)]
        return nodes

    def _copied(self, kind: str, what: str, size: Any, dtype: str = "", phase: Phase = "backward") -> Collective:
        """The compute waits for it."""
        calls = tensors_updated(self.chain, [self.buffers])
        return host_copy(kind, phase, what, dtype or self.conventions.numerics.grad_dtype, calls, size)

    def _room(self) -> list[Node]:
        """Buckets, and room for what a rank keeps of the reduced gradients."""
        return [
            Held("buffers", self._bucket_bytes, "buckets of gradients"),
            Held("grads", self._kept_bytes, "a rank's share of the gradients"),
        ]

    def _room_released(self, *, adds: bool) -> list[Node]:
        """What a rank keeps is, `adds`, added into what it has."""
        nodes: list[Node] = []
        if adds:
            nodes = [copy("accumulate", "backward", self._kept_bytes, self.conventions.numerics.grad_dtype)]
            nodes.append(Held("grads", -self._kept_bytes))
        return [*nodes, Held("buffers", -self._bucket_bytes)]

    @property
    def _kept_bytes(self) -> Any:
        return self._share * self._grad if self.structure.zero and not self._offloads else 0

    @property
    def _bucket_bytes(self) -> Any:
        buckets = self.conventions.buckets
        if not self.structure.zero:  # flattened when it is reduced
            return least(self._total("elements"), buckets.reduce) * self._grad
        return buckets.reduce * self._grad * (1 + buckets.overlaps) * buckets.contiguous

    def _into_bucket(self, b: Buffer) -> list[Node]:
        size = b.transient_grads_bytes
        return [copy("copy_in", "backward", size, self.conventions.numerics.grad_dtype), Held("grads", -size)]

    def _reduced(self, c: Collective) -> list[Node]:
        overlaps = self.conventions.buckets.overlaps
        return [c.started("backward", DATA_STREAM, "reduce") if overlaps else replace(c, phase="backward")]

    def _bucket_count(self) -> Any:
        room = self.conventions.buckets.reduce
        return per_stage(self.chain, [self.buffers.map(lambda b: b.sizes)], (room,), closed_before)

    # --- optimizer --------------------------------------------------------------------------------------------------
    def optimizer(self) -> list[Node]:
        """The update of a rank's share; Muon's matrices are taken to be shared evenly."""
        n, zero, share = self.conventions.numerics, self.structure.zero, self._share
        if self._offloads:
            pending = self._total("tp_grads_elements")
            return [
                *sums_at_the_end(self.conventions, self.structure, [self.chain], pending),
                cpu_adam(self.conventions, share, self._states_bytes),
                replace(
                    self._copied(FROM_HOST, "params", share * ITEMSIZE[n.param_dtype], n.param_dtype, "optimizer"),
                    calls=1,
                ),
                *gather_updated(self.chain, self.buffers),
            ]
        whole = self._total("transient_grads_bytes")
        held = self._kept_bytes if zero else whole
        wide = ITEMSIZE["fp32"] * share * (n.grad_dtype != "fp32")
        moved = 2 * self._states_bytes + share * (ITEMSIZE["fp32"] + ITEMSIZE[n.param_dtype])
        gather = self.buffers.layers[0].gather
        owners = gather.group_size if gather else 1
        parts = [(self.buffers[part].matrices, count) for part, count in self.chain.counted()]
        flat = (held if zero else wide) * (n.grad_dtype != "fp32")  # a copy of all in one
        return [
            *sums_at_the_end(self.conventions, self.structure, [self.chain], self._total("tp_grads_elements")),
            *orthogonalized(n.states, parts, owners),
            Held("grads", flat, "flattened gradients"),
            Held("grads", wide, "fp32 gradients"),
            copy("to_float", "optimizer", wide, "fp32"),
            Held("grads", -flat - held),
            Compute("optimizer", "optimizer", 0.0, moved, "fp32"),
            Held("grads", -wide),
            *gather_updated(self.chain, self.buffers),
        ]

    def same_forward(self, *, gathers: bool, first: bool) -> tuple[Any, ...]:
        return ("F",)

    def same_backward(self, *, gathers: bool, first: bool, last: bool) -> tuple[Any, ...]:
        return "B", first, self.structure.zero == 2 or last, last and self._offloads


@lru_cache(maxsize=4096)
def closed_before(turns: tuple[Each[Sizes], ...], kinds: Kinds, given: tuple[int, ...]) -> int:
    """Buckets of `given[0]` elements: one closes before a gradient that would not fit, and one that alone is larger has
    its own (`reduce_independent_p_g_buckets_and_remove_grads`).
    """
    (room,) = given
    count = filled = 0
    for sizes in turns:
        layers = (tuple(reversed(sizes.layers[kind])) for kind in reversed(kinds))
        for size in (*reversed(sizes.head), *joined.from_iterable(layers), *reversed(sizes.embedding)):
            if filled and filled + size > room:
                count, filled = count + 1, 0
            filled += size
    return count + (filled > 0)
