"""Half-precision weights with fp32 gradients added up beside them: nanotron's data parallelism and its ZeRO-1.

Conventions of nanotron 0.4 (optim/gradient_accumulator.py, optim/zero.py, trainer.py; 2411b02):
- a backward leaves gradients in the weights' dtype; when it has ended they are added into one fp32 buffer, and go;
- plain data parallelism is DDP whose buckets, in the last backward, all-reduce that buffer beside it. DDP has buckets
  of its own, in the weights' dtype;
- ZeRO-1 all-reduces the buffer in one call after the last backward (reduce-scatter is written and not used), updates
  its share of each parameter's fp32 copy, and gathers the weights in one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanum.conventions import Conventions
from nanum.dtypes import ITEMSIZE
from nanum.layout import Structure
from nanum.parallel.buckets import bucket_count, carried, counted
from nanum.parallel.buffer import Buffer, gather_updated
from nanum.parallel.chain import Chain, Each
from nanum.parallel.late_sums import sums_at_the_end
from nanum.parallel.places import Place
from nanum.program import REDUCER_STREAM, Compute, Held, Node, Repeat, Wait


@dataclass(frozen=True, eq=False)
class Accumulated:
    chain: Chain
    conventions: Conventions
    structure: Structure
    buffers: Each[Buffer]

    def _total(self, field: str) -> Any:
        return self.chain.total(field, self.buffers)

    @property
    def _states_bytes(self) -> Any:
        share = self._total("shard_elements" if self.structure.zero else "elements")
        return share * self.conventions.numerics.states.each()

    def resident(self) -> list[Node]:
        n, elements = self.conventions.numerics, self._total("elements")
        (reduce, *_) = self.buffers.layers[0].reduce
        ddp = (reduce.group_size > 1) * (not self.structure.zero)
        return [
            Held("params", elements * ITEMSIZE[n.param_dtype], "parameters"),
            Held("params", self._total("frozen_bytes"), "frozen parameters"),
            Held("grads", elements * ITEMSIZE[n.grad_dtype], "gradient buffer"),
            Held("optimizer_states", self._states_bytes, "masters and optimizer states"),
            Held("buffers", elements * ITEMSIZE[n.param_dtype] * ddp, "DDP's buckets"),
        ]

    def forward(self, *, gathers: bool, first: bool) -> list[Node]:
        return self.chain.forward(lambda place: ([], []), [])

    def backward(self, *, gathers: bool, first: bool, last: bool) -> list[Node]:
        n = self.conventions.numerics
        beside = last and not self.structure.zero

        def around(place: Place) -> tuple[list[Node], list[Node]]:
            reduce = self.buffers[place.part].reduce if beside else ()
            return [], [carried(c.started("backward", REDUCER_STREAM, "reduce")) for c in reduce]

        new, elements = self._total("transient_grads_bytes"), self._total("elements")
        nodes = [
            *self.chain.backward([], around),
            Compute("accumulate", "backward", 0.0, new + 2 * elements * ITEMSIZE[n.grad_dtype], n.grad_dtype),
            Held("grads", -new),
        ]
        (template, *_) = self.buffers.layers[0].reduce
        if beside:
            nodes.append(counted(template.started("backward", REDUCER_STREAM, "reduce"), self._bucket_count()))
            nodes.append(Wait(REDUCER_STREAM, "reduce"))
        elif last:
            for part, count in self.chain.counted():
                nodes.append(Repeat(count, tuple(carried(c) for c in self.buffers[part].reduce)))
            nodes.append(counted(template, 1))
        return nodes

    def _bucket_count(self) -> Any:
        sizes = self.buffers.map(lambda b: b.sizes)
        first, later = (-(-q // ITEMSIZE[self.conventions.numerics.param_dtype]) for q in self.conventions.bucket_bytes)
        return bucket_count(self.chain, [sizes], first, later)

    def optimizer(self) -> list[Node]:
        n, zero = self.conventions.numerics, self.structure.zero
        share = self._total("shard_elements" if zero else "elements")
        moved = 2 * self._states_bytes + share * (ITEMSIZE[n.grad_dtype] + ITEMSIZE[n.param_dtype])
        return [
            *sums_at_the_end(self.conventions, self.structure, [self.chain], self._total("tp_grads_elements")),
            Compute("optimizer", "optimizer", 0.0, moved, "fp32"),
            *gather_updated(self.chain, self.buffers),
        ]

    def same_forward(self, *, gathers: bool, first: bool) -> tuple[Any, ...]:
        return ("F",)

    def same_backward(self, *, gathers: bool, first: bool, last: bool) -> tuple[Any, ...]:
        return "B", last
