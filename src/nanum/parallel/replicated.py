"""Weights that every data rank has whole: a plain module, DDP around it, and ZeRO-1's optimizer around that.

Conventions of PyTorch 2.13:
- a gradient is what backward leaves: the first micro-batch's is kept as `.grad`, later ones are added into it as they
  arrive (`accumulate_grad.h`);
- DDP (`reducer.cpp`) copies each gradient, as it becomes ready, into a bucket, all-reduces full buckets, and copies
  them back: buckets of the size of all gradients live from the wrapping on. Without `no_sync` it does so in each
  backward; a pipeline's stages (`stage.py`) do it in the last. This is the steady state: the first step has one bucket,
  and the second begins with two broadcasts of what the buckets are;
- under tensor parallelism DDP sees the local part of a DTensor (`tensor/parallel/ddp.py`): those parameters have their
  gradients at the very end of backward, after those of modules that tp does not divide, and with theirs the sums over
  tp that a plain module leaves to the optimizer are carried out;
- a module's buffers (tables of positions) are broadcast before the forward pass that follows a backward with an
  exchange (`distributed.py`: `require_forward_param_sync`); pipelining's forward passes are all under `no_sync`;
- ZeroRedundancyOptimizer updates its own parameters and then broadcasts them, one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from nanum.collectives import wire_bytes
from nanum.conventions import Conventions
from nanum.dtypes import ITEMSIZE
from nanum.layout import Structure
from nanum.parallel.buckets import Sizes, bucket_count, carried, counted
from nanum.parallel.chain import Chain, Each, Half, Stage, copy
from nanum.parallel.owners import Share, owned
from nanum.parallel.places import Place
from nanum.parallel.units import Unit, orthogonalized, scratch_bytes
from nanum.program import REDUCER_STREAM, Collective, Compute, Held, Node, Repeat, Wait
from nanum.sharding import BATCH_AXES, ZERO_AXES, Shapes


@dataclass(frozen=True, eq=False)
class DataRanks:
    """How many ranks add their gradients, and of how many (and which of them) the optimizer's states are split."""

    all: Any
    owners: Any
    index: int

    @classmethod
    def of(cls, shapes: Shapes, stage: Stage) -> DataRanks:
        axes = dict.fromkeys((*BATCH_AXES, *ZERO_AXES))
        owners = stage.take(shapes.ranks(ZERO_AXES))
        return cls(stage.take(shapes.ranks(axes)), owners, shapes.index(ZERO_AXES))


@dataclass(frozen=True, eq=False)
class Replicated:
    chain: Chain
    conventions: Conventions
    structure: Structure
    units: Each[Unit]
    ranks: DataRanks

    def _total(self, field: str) -> Any:
        return self.chain.total(field, self.units)

    def _parts(self) -> list[tuple[Unit, Any]]:
        return [(self.units[part], count) for part, count in self.chain.counted()]

    @property
    def _ddp(self) -> Any:
        """1 where there is another data rank, else 0."""
        return (self.ranks.all > 1) * 1

    def _owned(self) -> Share:
        """What this rank's optimizer updates."""
        if not self.structure.zero:
            largest, in_turn = (self.chain.largest(f"{what}_elements", self.units) for what in ("largest", "in_turn"))
            states, counters = self._total("states_bytes"), self._total("counters_bytes")
            return Share(self._total("elements"), self._total("tensors"), states, counters, largest, in_turn)
        states, counters = self.units.map(lambda u: u.states), self.units.map(lambda u: u.counters)
        sizes = self._sizes(lambda divided: True)
        return owned(self.chain, sizes, states, counters, self.ranks.owners, self.ranks.index)

    def _sizes(self, which: Callable[[bool], bool]) -> Each[Sizes]:
        def of(u: Unit) -> tuple[Any, ...]:
            return tuple(size * which(divided) for size, divided in zip(u.sizes, u.divided, strict=True))

        return self.units.map(of)

    def resident(self) -> list[Node]:
        n, elements = self.conventions.numerics, self._total("elements")
        mine = self._owned()
        return [
            Held("params", self._total("whole_bytes"), "parameters"),
            Held("optimizer_states", mine.states_bytes + mine.counters_bytes, "optimizer states"),
            Held("buffers", elements * ITEMSIZE[n.grad_dtype] * self._ddp, "DDP's buckets"),
        ]

    def forward(self, *, gathers: bool, first: bool) -> list[Node]:
        begin = [self._buffers(c) for c in self.units.layers[0].reduce] if self._after_exchange(first=first) else []
        return [*begin, *self.chain.forward(lambda place: ([], []), [])]

    def _after_exchange(self, *, first: bool) -> bool:
        return not self.structure.pipelined and (first or self.structure.grad_sync == "each")

    def _buffers(self, c: Collective) -> Collective:
        """One broadcast of all that the module has, among the ranks that `c` reduces over."""
        size = self.chain.tables_bytes * self._ddp
        wire = wire_bytes("broadcast", size, c.group_size)
        dtype, calls = self.chain.tables_dtype, (size > 0) * 1
        return Collective("broadcast", c.axes, "forward", "buffers", dtype, c.group_size, calls, size, wire)

    # --- backward ---------------------------------------------------------------------------------------------------
    def backward(self, *, gathers: bool, first: bool, last: bool, half: Half = "whole") -> list[Node]:
        adds, syncs = not first and half != "input", self._syncs(last=last) and half != "input"
        at_the_end = self.structure.tensor != "none"

        def around(place: Place) -> tuple[list[Node], list[Node]]:
            u = self.units[place.part]
            leave: list[Node] = []
            if adds:
                leave.append(copy("accumulate", "backward", u.grads_bytes, self.conventions.numerics.grad_dtype))
            if adds and half == "weight":
                leave.append(Held("grads", -u.grads_bytes))
            elif first and half != "input":
                leave.append(Held("grads", -self._beyond(u) * self._ddp))
            if u.tp_sum is not None and half != "input":
                leave.append(u.tp_sum.times(self._ddp))
            if syncs and not at_the_end:
                leave += [carried(self._reduce(c)) for c in u.reduce]
            return [], leave

        nodes = self.chain.backward([], around, half, adding=adds)
        if syncs:
            if at_the_end:
                nodes += [
                    Repeat(times, tuple(carried(self._reduce(c)) for c in u.reduce)) for u, times in self._parts()
                ]
            nodes += [counted(self._reduce(c), self._buckets()) for c in self.units.layers[0].reduce]
            nodes.append(Wait(REDUCER_STREAM, "reduce"))
        return nodes

    def _beyond(self, u: Unit) -> Any:
        """Bytes of gradients that are views into more: DDP's local parameters get a copy of what is theirs."""
        return u.grads_bytes - u.elements * ITEMSIZE[self.conventions.numerics.grad_dtype]

    def _syncs(self, *, last: bool) -> bool:
        return last or not (self.structure.pipelined or self.structure.grad_sync == "last")

    def _reduce(self, c: Collective) -> Collective:
        return c.started("backward", REDUCER_STREAM, "reduce")

    def _buckets(self) -> Any:
        n = self.conventions.numerics
        first, later = (-(-size // ITEMSIZE[n.grad_dtype]) for size in self.conventions.bucket_bytes)
        turns = [self._sizes(lambda divided: True)]
        if self.structure.tensor == "tensor":
            turns = [self._sizes(lambda divided: not divided), self._sizes(lambda divided: divided)]
        return bucket_count(self.chain, turns, first, later)

    # --- optimizer --------------------------------------------------------------------------------------------------
    def optimizer(self) -> list[Node]:
        n, mine = self.conventions.numerics, self._owned()
        beyond = sum(self._beyond(u) * times for u, times in self._parts()) * self._ddp
        grads = self._total("grads_bytes") - beyond
        copies = scratch_bytes(self.conventions, mine.elements, mine.largest_elements, mine.in_turn_elements)
        sums = [
            Repeat(count * self.conventions.optimizer_sums * (1 - self._ddp), (replace(u.tp_sum, phase="optimizer"),))
            for u, count in self._parts()
            if u.tp_sum is not None
        ]
        moved = mine.elements * (2 * ITEMSIZE[n.param_dtype] + ITEMSIZE[n.grad_dtype]) + 2 * mine.states_bytes
        return [
            *sums,
            *orthogonalized(n.states, ((u.matrices, times) for u, times in self._parts())),
            Held("buffers", copies, "the optimizer's scratch"),
            Compute(
                "optimizer",
                "optimizer",
                0.0,
                moved,
                n.param_dtype,
                tensors=mine.tensors,
                sharded=self.structure.tensor != "none",
            ),
            Held("buffers", -copies),
            *([self._broadcasts()] if self.structure.zero else []),
            Held("grads", -grads),
        ]

    def _broadcasts(self) -> Collective:
        """Each parameter from its owner."""
        n, ranks = self.conventions.numerics, self.ranks.owners
        several = (ranks > 1) * 1
        size = self._total("elements") * ITEMSIZE[n.param_dtype] * several
        wire = wire_bytes("broadcast", size, ranks)
        calls = self._total("tensors") * several
        return Collective("broadcast", ZERO_AXES, "optimizer", "params", n.param_dtype, ranks, calls, size, wire)

    def same_forward(self, *, gathers: bool, first: bool) -> tuple[Any, ...]:
        return "F", self._after_exchange(first=first)

    def same_backward(self, *, gathers: bool, first: bool, last: bool) -> tuple[Any, ...]:
        return "B", first, self._syncs(last=last)
