"""Weights as shards of each tensor that are gathered as modules come to them, and live on while they are soon used
again: DeepSpeed's ZeRO-3.

Conventions of DeepSpeed 0.19.6 (runtime/zero/stage3.py, partitioned_param_coordinator.py, partition_parameters.py;
sizes in elements, of `conventions.Buckets`):
- a tensor of at most `persist` elements stays whole, and is gathered after each update;
- others are gathered a module at a time, up to `prefetch` of them ahead, in one call for so many; a flat buffer
  receives them, out of which each tensor is copied;
- after a module its weights go, unless they are used again within `reuse` elements of others: from forward to backward
  that is what has less than half as many elements after it. What lives on is not gathered again;
- gradients go through one bucket of `reduce` elements that is there for the whole run: full ones are put in the order
  of the ranks, in a copy, and reduce-scattered beside backward, in each micro-batch. Shares stay in one buffer;
- each rank updates its shares in fp32, `update` elements at a time.
- with `offload_param` shares are in the host's memory, and copied to the device before each gather, on its stream; a
  rank alone copies them too. With `offload_optimizer` so are masters, states, and gradients in half precision and in
  fp32: a reduced share is copied to the host and back, for what is done with it, in each micro-batch, and in the last
  once more in fp32, beside backward; the host updates, and the weights come up in half precision.

Where shards are of a group (MiCS, runtime/zero/mics.py), shares of the gradients are added among the groups in the last
micro-batch. In hpZ (`zero_hpz_partition_size`; ZeRO++, arXiv 2306.10209, section 4.2) they are of all data ranks, and
what was gathered from all of them in the step's first forward pass leaves a second share, of a group, when it goes
(`_partition_param_sec`): what is gathered later is gathered from these, which go when the step ends.
Layers are taken to weigh what they do on average where it is asked how many live on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nanum.arrays import least, most
from nanum.collectives import wire_bytes
from nanum.conventions import Conventions
from nanum.dtypes import ITEMSIZE
from nanum.layout import Structure
from nanum.parallel.buckets import carried, counted, per_stage
from nanum.parallel.chain import Chain, Each, copy
from nanum.parallel.on_host import cpu_adam, updates_on_host
from nanum.parallel.partitioned import closed_before
from nanum.parallel.places import EMBEDDING, HEAD, Direction, Part, Place
from nanum.parallel.units import Unit
from nanum.program import (
    DATA_STREAM,
    FROM_HOST,
    HOST_STREAM,
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
from nanum.sharding import ZERO_AXES


@dataclass(frozen=True, eq=False)
class LiveShards:
    chain: Chain
    conventions: Conventions
    structure: Structure
    units: Each[Unit]
    group_ranks: Any  # of dp_shard and cp, on each stage

    def _total(self, field: str) -> Any:
        return self.chain.total(field, self.units)

    @property
    def _size(self) -> int:
        return ITEMSIZE[self.conventions.numerics.param_dtype]

    @property
    def _states_bytes(self) -> Any:
        return self.conventions.numerics.states.of_vectors(self._total("stored_elements"), 0)

    def resident(self) -> list[Node]:
        shares, grad = self._total("stored_elements"), ITEMSIZE[self.conventions.numerics.grad_dtype]
        persisting = self._size * sum(self._persisting(part) * count for part, count in self.chain.counted())
        params, states, grads = shares * self._size, self._states_bytes, shares * grad
        nodes: list[Node] = [
            Held("params", persisting, "tensors that are not split"),
            Held("buffers", self.conventions.buckets.reduce * grad, "bucket of gradients"),
        ]
        if self._params_on_host:
            nodes.append(OnHost(params, "shares of the parameters"))
        else:
            nodes.append(Held("params", params, "shares of the parameters"))
        if self._updates_on_host:
            on_host = states + grads + shares * ITEMSIZE["fp32"]
            return [*nodes, OnHost(on_host, "masters, optimizer states, and gradients in both precisions")]
        return [
            *nodes,
            Held("optimizer_states", states, "masters and optimizer states"),
            Held("grads", grads, "shares of the gradients"),
        ]

    @property
    def _params_on_host(self) -> bool:
        return "params" in self.structure.offload

    @property
    def _updates_on_host(self) -> bool:
        return updates_on_host(self.structure)

    # --- gathering --------------------------------------------------------------------------------------------------
    @property
    def _several(self) -> Any:
        """1 where there is another rank to gather from, or the host; without, a share is the whole."""
        return 1 if self._params_on_host else (self._template.group_size > 1) * 1

    @property
    def _template(self) -> Collective:
        """A gather of weights that are stored split; experts of their own mesh are refused."""
        return self.units.layers[0].gathers[0]

    def _source(self, *, first: bool) -> Collective:
        """A gather from the shares of all, or of a group: as in the `first` forward of a step, or later."""
        if first or not self.structure.hpz:
            return self._template
        return replace(self._template, axes=ZERO_AXES, group_size=self.group_ranks)

    def _second_shares(self, part: Part, share: tuple[Any, Any]) -> list[Node]:
        """Left by that share of a part's weights, the first time that they go."""
        if not self.structure.hpz:
            return []
        some, of = share
        size = self._gathered_bytes(part) // self.group_ranks * some // of
        dtype = self.conventions.numerics.compute_dtype
        return [Held("params", size, "second shares"), copy("second_share", "forward", size, dtype)]

    def _persisting(self, part: Part) -> Any:
        """Elements of small tensors, which are there whole beside their shares."""
        return self._several * sum(size * (size <= self.conventions.buckets.persist) for size in self.units[part].sizes)

    def _gathered_bytes(self, part: Part) -> Any:
        return self.units[part].weights_bytes * self._several - self._persisting(part) * self._size

    def _living(self) -> tuple[Any, Any]:
        """Of layers: those that live on from forward to backward, and all."""
        layers = sum(count for part, count in self.chain.counted() if isinstance(part, int))
        elements = sum(self.units[part].elements * n for part, n in self.chain.counted() if isinstance(part, int))
        near = most(self.conventions.buckets.reuse // 2 - self.units.head.elements, 0)
        return least(-(-near * layers // most(elements, 1)), layers), layers

    def _live(self, place: Place) -> tuple[Any, Any]:
        """The share, as a fraction, of such a part's weights that live on from forward to backward."""
        if place is HEAD:
            return 1, 1
        living, layers = self._living()
        if place is EMBEDDING:
            after = self._total("elements") - self.units.embedding.elements
            return (2 * after < self.conventions.buckets.reuse) * 1, 1
        return living, most(layers, 1)

    def _gather(
        self, part: Part, direction: Direction, presence: Any, share: tuple[Any, Any], source: Collective
    ) -> list[Node]:
        """Of that share of it, with room for what is received."""
        some, of = share
        payload = self._gathered_bytes(part) * presence * some // of
        ranks, dtype = source.group_size, self.conventions.numerics.param_dtype
        there = (ranks > 1) * 1
        tensors = len(self.units[part].sizes)  # one of which is never gathered in parts
        calls = least(-(-payload // (self._size * self.conventions.buckets.prefetch)), tensors) * there
        wire = wire_bytes("all_gather", payload, ranks)
        started = replace(source, calls=calls, payload_bytes=payload * there, wire_bytes=wire)
        if self.conventions.reduces_beside:
            started = started.started(direction, DATA_STREAM, "gather")
        nodes: list[Node] = [Held("buffers", payload, "received shares")]
        if self._params_on_host:
            mine = payload // ranks
            copies = self.units[part].tensors * (mine > 0)
            nodes.append(host_copy(FROM_HOST, direction, "params", dtype, copies, mine, DATA_STREAM, "gather"))
        return [*nodes, replace(started, phase=direction)]

    def _copied_out(self, part: Part, direction: Direction, share: tuple[Any, Any]) -> list[Node]:
        some, of = share
        size = self._gathered_bytes(part) * some // of
        return [
            Wait(DATA_STREAM, "gather"),
            Held("params", size, "gathered parameters"),
            *self._listed(part, direction, size),
            copy("copy_out", direction, size, self.conventions.numerics.compute_dtype),
            Held("buffers", -size),
        ]

    def _listed(self, part: Part, phase: Phase, size: Any) -> list[Node]:
        """Of each tensor a piece of every rank is copied by a kernel (PyTorch, ProcessGroupNCCL.cpp: `allgather` and
        `reduce_scatter` of lists of tensors).
        """
        if not self.conventions.gathers_to_lists:
            return []
        tensors = sum((elements > self.conventions.buckets.persist) * 1 for elements in self.units[part].sizes)
        pieces = tensors * self.group_ranks * (size > 0)
        each = 2 * size // most(pieces, 1)
        dtype = self.conventions.numerics.compute_dtype
        return [Repeat(pieces, (Compute("copy_piece", phase, 0.0, each, dtype, calls=0),))]

    def _share(self, part: Part, direction: Direction) -> tuple[Any, Any]:
        """What is gathered of a part: all, or in backward what does not live on."""
        if direction == "forward":
            return 1, 1
        some, of = self._live_part(part)
        return of - some, of

    def _live_part(self, part: Part) -> tuple[Any, Any]:
        """As `_live`, of a part."""
        place = {"embedding": EMBEDDING, "head": HEAD}.get(part) if isinstance(part, str) else None
        some, of = self._live(place) if place else self._living()
        return some, most(of, 1)

    def _ahead(self, parts: list[tuple[Part, Any]], direction: Direction, source: Collective) -> list[Node]:
        return [
            node
            for part, presence in parts
            for node in self._gather(part, direction, presence, self._share(part, direction), source)
        ]

    def forward(self, *, gathers: bool, first: bool) -> list[Node]:
        source = self._source(first=first)

        def around(place: Place) -> tuple[list[Node], list[Node]]:
            ahead = self._ahead(self.chain.follows(place, "forward"), "forward", source)
            some, of = self._live(place)
            leave = self._second_shares(place.part, (of - some, of)) if first else []
            return [*self._copied_out(place.part, "forward", (1, 1)), *ahead], [*leave, *self._let_go(place)]

        return [*self._ahead(self.chain.begins("forward"), "forward", source), *self.chain.forward(around, [])]

    def _let_go(self, place: Place) -> list[Node]:
        """After forward: all but what lives on."""
        some, of = self._live(place)
        size = self._gathered_bytes(place.part)
        return [Held("params", size * some // of - size)]

    # --- backward ---------------------------------------------------------------------------------------------------
    def backward(self, *, gathers: bool, first: bool, last: bool) -> list[Node]:
        n = self.conventions.numerics
        bucket = least(self.conventions.buckets.reduce, self._total("elements")) * ITEMSIZE[n.grad_dtype]
        source = self._source(first=False)

        def reductions(u: Unit) -> list[Collective]:
            return [c for c in u.reduce if last or c.kind != "all_reduce"]

        def around(place: Place) -> tuple[list[Node], list[Node]]:
            part, u = place.part, self.units[place.part]
            ahead = self._ahead(self.chain.follows(place, "backward"), "backward", source)
            enter = [*self._copied_out(part, "backward", self._share(part, "backward")), *ahead]
            leave: list[Node] = [
                copy("copy_in", "backward", u.grads_bytes, n.grad_dtype),
                *self._listed(part, "backward", u.grads_bytes),
                Held("grads", -u.grads_bytes),
                *(carried(self._reduced(c)) for c in reductions(u)),
                *(self._down(u, last=last) if self._updates_on_host else ()),
                *(self._second_shares(part, self._live(place)) if first else []),
                Held("params", -self._gathered_bytes(part)),
            ]
            return enter, leave

        back = bucket // self._template.group_size if self._updates_on_host else 0

        begin = [
            Held("buffers", bucket + back, "a bucket in the order of the ranks"),
            *self._ahead(self.chain.begins("backward"), "backward", source),
        ]
        room = self.conventions.buckets.reduce
        buckets = per_stage(self.chain, [self.units.map(lambda u: u.sizes)], (room,), closed_before)
        return [
            *self.chain.backward(begin, around),
            *(counted(self._reduced(c), buckets) for c in reductions(self.units.layers[0])),
            Wait(DATA_STREAM, "reduce"),
            *([Wait(HOST_STREAM, "grads")] if self._updates_on_host else []),
            Held("buffers", -bucket - back),
        ]

    def _down(self, u: Unit, *, last: bool) -> list[Node]:
        """Shares of a unit's reduced gradients to the host: what was there comes up and is added to, or what went down
        comes back.
        """
        half, wide = self.conventions.numerics.grad_dtype, "fp32"
        moves = [(TO_HOST, half), (FROM_HOST, half), *([(TO_HOST, wide)] if last else [])]
        return [
            host_copy(
                kind, "backward", "grads", dtype, u.tensors, u.stored_elements * ITEMSIZE[dtype], HOST_STREAM, "grads"
            )
            for kind, dtype in moves
        ]

    def _reduced(self, c: Collective) -> Collective:
        beside = self.conventions.reduces_beside
        return c.started("backward", DATA_STREAM, "reduce") if beside else replace(c, phase="backward")

    # --- optimizer --------------------------------------------------------------------------------------------------
    def optimizer(self) -> list[Node]:
        n, shares = self.conventions.numerics, self._total("stored_elements")
        wide = least(shares, self.conventions.buckets.update) * ITEMSIZE["fp32"]
        moved = 2 * self._states_bytes + shares * (ITEMSIZE["fp32"] + ITEMSIZE[n.param_dtype])
        across = host_copy(
            FROM_HOST if self._updates_on_host else TO_HOST, "optimizer", "params", n.param_dtype,
            -(-shares // self.conventions.buckets.update), shares * self._size,
        )  # fmt: skip
        crosses = self._updates_on_host != self._params_on_host
        if self._updates_on_host:
            update = cpu_adam(self.conventions, shares, self._states_bytes)
            return [update, *([across] if crosses else []), *self._persistent_again()]
        return [
            Held("grads", wide, "fp32 gradients"),
            copy("to_float", "optimizer", shares * ITEMSIZE["fp32"], "fp32"),
            Compute("optimizer", "optimizer", 0.0, moved, "fp32"),
            Held("grads", -wide),
            *([across] if crosses else []),
            *self._persistent_again(),
            Held("params", -self._second_bytes),
        ]

    @property
    def _second_bytes(self) -> Any:
        """Of all second shares, as they were left part by part."""
        parts = self.chain.counted() if self.structure.hpz else []
        total: Any = 0
        for part, count in parts:
            whole = self._gathered_bytes(part) // self.group_ranks
            some, of = self._live_part(part)
            total = total + count * ((whole * (of - some)) // of + (whole * some) // of)
        return total

    def _persistent_again(self) -> list[Node]:
        """One gather of all tensors that stay whole."""
        size = self._size * sum(self._persisting(part) * count for part, count in self.chain.counted())
        size = size * (self._template.group_size > 1)
        wire, calls = wire_bytes("all_gather", size, self._template.group_size), (size > 0) * 1
        return [replace(self._template, phase="optimizer", calls=calls, payload_bytes=size, wire_bytes=wire)]

    def same_forward(self, *, gathers: bool, first: bool) -> tuple[Any, ...]:
        return ("F", first and self.structure.hpz)

    def same_backward(self, *, gathers: bool, first: bool, last: bool) -> tuple[Any, ...]:
        return "B", last, first and self.structure.hpz
