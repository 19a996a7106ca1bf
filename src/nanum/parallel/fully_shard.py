"""FSDP2: weights stored as shards, gathered a unit at a time, and what its buffers hold meanwhile.

Conventions of `torch.distributed.fsdp.fully_shard` (PyTorch 2.13: `_fsdp_param_group.py`, `_fsdp_collectives.py`):
- a gather needs a cast of the shard, a flat output, and its copy-out, the parameters. The flat output lives until the
  next unit has copied out, so a unit is there twice, and for a moment three are there;
- in backward the next unit is gathered as soon as this one has copied out;
- after a unit's backward its parameters go, then the previous reduction's input, then this one's comes, then the
  unreduced gradients go (the last of them only after the reduction is issued) and the shard, which is `.grad`, comes;
- a unit whose input needs no gradient is resharded, and reduced, when all of backward has ended, after the root; one
  whose output needs none is gathered ahead all the same;
- without pipeline stages every micro-batch gathers and reduces. Under a pipeline (`stage.py` of
  torch.distributed.pipelining) only the last backward reduces and reshards, the others add into unsharded gradients in
  the reduce dtype.

With `CPUOffloadPolicy` shards, their gradients and the optimizer's states are in the host's memory: a shard is copied
to the device before each gather, on the gather's stream; a reduced gradient is copied to the host from where the
reduction left it, and the optimizer waits for all of them. Where a gradient is there already the host adds, and all
wait. (A copy starts here with its reduction, which it follows in truth. The fp32 copy of one shard, which is freed as
it is cast, is never more than the gathered unit.)

Weights that are gathered in fp8 (torchao, fsdp_utils.py: WeightWithDynamicFloat8CastTensor) are so as long as they are
gathered, and travel as bytes with the unit's others; their scales are worked out together after each update, by one
all-reduce of the largest entries (`precompute_float8_dynamic_scale_for_fsdp`).

On a GPU, gathers are issued one unit ahead on a stream of their own, and awaited where they are copied out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from nanum.arrays import most, where
from nanum.collectives import wire_bytes
from nanum.conventions import Conventions
from nanum.dtypes import ITEMSIZE
from nanum.layout import Structure
from nanum.once import Once
from nanum.parallel.chain import Chain, Each, Half, copy
from nanum.parallel.on_host import shard_grads_down, shard_up
from nanum.parallel.places import EMBEDDING, HEAD, Direction, Part, Place
from nanum.parallel.units import Unit, as_dtype, orthogonalized, scratch_bytes
from nanum.program import (
    DATA_STREAM,
    HOST_STREAM,
    Collective,
    Compute,
    Held,
    Node,
    OnHost,
    Phase,
    Repeat,
    Wait,
)


@dataclass(frozen=True, eq=False)
class FullyShard:
    """The ends are units where `conventions.units` is "ends"; where it is "root" they are one, of which the head's is
    empty.
    """

    chain: Chain
    conventions: Conventions
    structure: Structure
    units: Each[Unit]
    _made: Once[tuple[Node, ...]] = field(default_factory=Once)
    _sums: dict[tuple[Any, ...], Any] = field(default_factory=dict)  # of what is near a place, given again

    @property
    def _root(self) -> bool:
        return self.conventions.units == "root"

    def _is_root(self, place: Place) -> bool:
        return self._root and place in (EMBEDDING, HEAD)

    def _total(self, field: str) -> Any:
        return self.chain.total(field, self.units)

    def _near(self, place: Place, direction: Direction, what: str, of: Callable[[Part], Any]) -> Any:
        """A quantity, called `what`, of the part that a direction comes to after `place`."""
        key = place, direction, what
        if key not in self._sums:
            found = self.chain.follows(place, direction)
            alone = len(found) == 1 and isinstance(found[0][1], int)
            self._sums[key] = of(found[0][0]) if alone else sum(presence * of(part) for part, presence in found)
        return self._sums[key]

    # --- what is there for the whole run ----------------------------------------------------------------------------
    @property
    def _offloads(self) -> bool:
        """Are shards, and all that belongs to them, in the host's memory?"""
        return "params" in self.structure.offload

    def resident(self) -> list[Node]:
        if self._offloads:
            states = self._total("states_bytes") + self._total("counters_bytes")
            return [OnHost(self._total("stored_bytes"), "sharded parameters"), OnHost(states, "optimizer states")]
        return [
            Held("params", self._total("stored_bytes"), "sharded parameters"),
            Held(
                "optimizer_states",
                self._total("states_bytes") + self._total("counters_bytes"),
                "optimizer states",
            ),
        ]

    # --- gathering --------------------------------------------------------------------------------------------------
    def _once(self, made_of: tuple[Any, ...], make: Callable[[], Iterable[Node]]) -> tuple[Node, ...]:
        """The nodes that `make` gives, the same ones for the same `made_of`: they are made, and costed, once."""
        return self._made(made_of, lambda: tuple(make()))

    def apart(self) -> tuple[Any, Any]:
        """The most that the pools of two other streams have, which PyTorch's allocator does not share: that of gathers
        a flat buffer and the one before it, with casts of shards; that of reductions, whose output the sharded
        gradients are views of, all of these. And how much more where they are added up
        (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: `foreach_all_gather`, `foreach_reduce`).
        """
        every = self.chain.counted()
        layers = [(unit, count) for part, count in every if isinstance(part, int) for unit in self.units[part].in_turn]
        ends = [(self.units[part], count) for part, count in every if not isinstance(part, int)]
        layer, end = (self._most(units, "gather_bytes", self._cast) for units in (layers, ends))
        shard = self._most([*layers, *ends], "shard_bytes")
        if self._offloads:  # a reduction's output goes with its copy
            return most(layer, end) + layer + shard, 0
        return most(layer, end) + layer + self._total("shard_bytes"), shard * (self.structure.grad_sync == "each")

    @property
    def _cast(self) -> str:
        """The field of a unit that says what is sent of it besides where it is stored."""
        return "sent_bytes" if self._offloads else "cast_bytes"

    def ahead(self) -> Any:
        """Flat buffers of all units at once, as `gather_ahead` begins them."""
        return self._total("gather_bytes") + self._total(self._cast)

    @staticmethod
    def _most(units: list[tuple[Unit, Any]], *fields: str) -> Any:
        found: Any = 0
        for unit, count in units:
            found = most(found, (count >= 1) * sum(getattr(unit, field) for field in fields))
        return found

    def _start(self, unit: Unit, direction: Direction, presence: Any = 1, ticket: str = "gather") -> Iterable[Node]:
        """Start a unit's gather: its shard is copied into the flat buffer first, in the dtype that is sent."""
        if not unit.gathers:
            return ()
        made_of = "gather", unit, direction, presence, ticket
        dtype = self.conventions.numerics.compute_dtype
        size = where(unit.gather_bytes > 0, unit.gather_bytes // unit.gathers[0].group_size, 0) * presence

        def make() -> Iterable[Node]:
            if self._offloads:
                yield shard_up(unit, self.conventions, direction, presence, ticket)
            yield copy("copy", direction, size, dtype)
            for gather in unit.gathers:
                yield gather.started(direction, DATA_STREAM, ticket, presence)

        return self._once(made_of, make)

    def _reductions(self, unit: Unit) -> Iterable[Node]:
        return self._once(("reduce", unit), lambda: [c.started("backward", DATA_STREAM, "reduce") for c in unit.reduce])

    def _flat(self, unit: Unit, presence: Any = 1) -> Iterable[Node]:
        """The gather's buffers: the shard's cast while it is sent, and the flat output."""

        def make() -> Iterable[Node]:
            cast = where(unit.gather_bytes > 0, getattr(unit, self._cast), 0) * presence
            yield Held("buffers", cast, "cast of a shard", apart=True)
            yield Held("buffers", unit.gather_bytes * presence, "gathered flat buffer", apart=True)
            if self.conventions.gather_copies:
                yield Held("buffers", unit.gather_bytes * presence, "the library's copy")
                yield Held("buffers", -unit.gather_bytes * presence)
            yield Held("buffers", -cast, apart=True)

        return self._once(("flat", unit, presence), make)

    def _copy_out(self, unit: Unit, phase: Phase, released: Any, ticket: str = "gather") -> Iterable[Node]:
        def make() -> Iterable[Node]:
            yield Wait(DATA_STREAM, ticket)
            yield Held("params", unit.weights_bytes, "gathered parameters")
            yield copy("copy_out", phase, unit.weights_bytes, self.conventions.numerics.compute_dtype)
            yield Held("buffers", -released, apart=True)

        return self._once(("copy_out", unit, phase, released, ticket), make)

    def _units(self, parts: list[tuple[Part, Any]], *, heads: int = 1) -> list[tuple[Unit, Any]]:
        """Units of parts, each with its presence; a root is gathered apart, and `heads` is 0 where no head is."""
        ends = 0 if self._root else 1
        shares = {"embedding": ends, "head": ends * heads}
        return [(self.units[part], presence) for part, presence in parts if isinstance(part, int) or shares[part]]

    def _next(self, place: Place, direction: Direction, *, heads: int = 1) -> list[Node]:
        """The gather of the unit that follows `place`; `heads` is 0 where forward gathers no head."""
        found: list[Node] = []
        here = self.units[place.part]
        for unit, presence in self._units(self.chain.follows(place, direction), heads=heads):
            forward = [(group, 1) for group in unit.in_turn]
            for group, share in forward if direction == "forward" else self._early(here, unit):
                found += self._start(group, direction, presence * share)
        return found

    @property
    def _whole(self) -> list[tuple[Unit, Any]]:
        """All units of the stage."""
        return [(self.units[part], count) for part, count in self.chain.counted()]

    def gather_ahead(self, ticket: str) -> list[Node]:
        """Begin to gather all units of the stage before its forward pass, as a schedule of several chunks does."""
        return [Repeat(n, (*self._start(u, "forward", 1, ticket), *self._flat(u))) for u, n in self._whole]

    def arrive(self, ticket: str) -> list[Node]:
        """Wait for them, and copy them out."""
        return [Repeat(n, tuple(self._copy_out(u, "forward", u.gather_bytes, ticket))) for u, n in self._whole]

    def drop(self, *, layers: bool) -> list[Node]:
        """Free gathered weights: the layers' where they are there, and an end's, which forward may free with them."""
        nodes: list[Node] = []
        for part, count in self.chain.counted():
            if layers or (isinstance(part, str) and not self._freed(part)):
                nodes.append(Held("params", -self.units[part].weights_bytes * count))
        return nodes

    def forward(self, *, gathers: bool, first: bool) -> list[Node]:
        """One micro-batch forward; `gathers` is False where an earlier action left the weights gathered."""
        reshards = self.structure.reshard
        embedding, head = self.units.embedding, self.units.head
        # Under a pipeline an end that no forward frees is there until the last backward.
        ends = int(gathers and (first or not self.structure.pipelined or self._freed("head")))
        of_embedding = embedding.gather_bytes * (ends if self._root else 1)

        def flat(part: Part) -> Any:
            return of_embedding if part == "embedding" else self.units[part].in_turn[-1].gather_bytes

        def flat_before(place: Place) -> Any:
            return self._near(place, "backward", f"flat of {ends}", flat)

        def enter(place: Place) -> list[Node]:
            u = self.units[place.part]
            if place is EMBEDDING and not gathers and self._comes_again:
                return [*self._start(u, "forward"), *self._flat(u), *self._copy_out(u, "forward", u.gather_bytes)]
            if not gathers or (place is HEAD and (self._root or not ends)):
                return []
            next_gather = self._next(place, "forward", heads=ends)
            before, nodes = flat_before(place), list[Node]()
            for group in u.in_turn:
                nodes += [*self._flat(group), *self._copy_out(group, "forward", before)]
                before = group.gather_bytes
            return [*nodes, *next_gather]

        def leave(place: Place) -> list[Node]:
            u = self.units[place.part]
            if not (reshards if isinstance(place.part, int) else self._freed(place.part)):
                return []
            return [Held("params", -u.weights_bytes)]

        def around(place: Place) -> tuple[list[Node], list[Node]]:
            return ([], []) if self._is_root(place) else (enter(place), leave(place))

        begin: list[Node] = []
        if gathers:
            if ends or not self._root:
                begin += self._start(embedding, "forward")
            if not self._root:
                inner = self._units(self.chain.begins("forward")[1:], heads=ends)
                begin += [node for unit, presence in inner for node in self._start(unit, "forward", presence)]
            if self._root:
                begin += enter(EMBEDDING) if ends else self._next(EMBEDDING, "forward")
        finish: list[Node] = []
        if self._root and self._freed("embedding"):
            finish.append(Held("params", -embedding.weights_bytes))
        if gathers:
            last_flat = flat_before(HEAD)
            if not self._root:
                last_flat = where(self.chain.stage.heads * ends == 1, head.gather_bytes, last_flat)
            finish.append(Held("buffers", -last_flat, apart=True))
        return [*begin, *self.chain.forward(around, finish)]

    @property
    def _comes_again(self) -> bool:
        """Is an embedding gathered in every forward pass, since none is trained and no backward leaves it there?"""
        return self.structure.reshard and not self._root and not self.chain.bodies.embedding.needs_grad

    def _freed(self, end: Part) -> bool:
        """Does this end's unit reshard after forward? The root, or the head that backward needs first, if told to."""
        if end == "embedding" and not self._root:
            return self.structure.reshard
        return self.structure.reshard and self.conventions.root_reshards

    # --- backward ---------------------------------------------------------------------------------------------------
    @property
    def _defers(self) -> bool:
        """Are gradients reduced in the last backward only, and added up unsharded before it?"""
        return self.structure.pipelined or self.structure.grad_sync == "last" or self.conventions.syncs_last

    @property
    def _adds_in_place(self) -> bool:
        """Are later gradients added into unsharded ones by backward itself, both being in the dtype of the reduction?
        (`_fsdp_param.py`: `to_accumulated_grad_if_needed`.)
        """
        n = self.conventions.numerics
        return self._defers and n.compute_dtype == n.grad_dtype

    def backward(self, *, gathers: bool, first: bool, last: bool, half: Half = "whole") -> list[Node]:
        """One micro-batch backward. `first` and `last` of a step: where gradients are made, and where a pipeline
        reduces them. Of a backward in halves the first gathers, and the second leaves the gradients.
        """
        reduces = (last or not self._defers) and half != "input"
        gathers = gathers and self.structure.reshard and half != "weight"
        embedding = self.units.embedding

        def reduced_before(place: Place) -> Any:
            return self._near(place, "forward", "reduced", lambda part: self.units[part].reduce_bytes) if reduces else 0

        def enter(place: Place) -> list[Node]:
            u = self.units[place.part]
            if not gathers:
                return []
            own: Iterable[Node] = ()
            if place is not HEAD and not self._is_root(place):
                own = self._arrive(place)
            elif self._freed("head"):
                own = [*self._start(u, "backward"), *self._flat(u), *self._copy_out(u, "backward", u.gather_bytes)]
            at = HEAD if self._is_root(place) else place
            return [*own, *self._next(at, "backward"), *self._ahead(at)]

        def dropped(place: Place) -> list[Node]:
            """A unit that has no backward: its weights, where they were gathered ahead, are never copied out."""
            flat = Held("buffers", -self.units[place.part].gather_bytes, apart=True)
            ahead: tuple[Node, ...] = (Wait(DATA_STREAM, "gather"), flat) if gathers else ()
            return [*ahead, Held("buffers", -reduced_before(place))]

        def leave(place: Place) -> list[Node]:
            if half == "input":
                return []
            released = reduced_before(place)
            made_of = "finish", place, first, reduces, half

            def make() -> Iterable[Node]:
                last, *others = reversed(self.units[place.part].in_turn)  # it alone lets go of what was before
                yield from self._finish(last, released, first=first, reduces=reduces, half=half)
                for group in others:
                    yield from self._finish(group, None, first=first, reduces=reduces, half=half)

            return list(self._once(made_of, make))

        late = [kind for kind, body in enumerate(self.chain.bodies.layers) if not body.gives_grad]

        def around(place: Place) -> tuple[list[Node], list[Node]]:
            if self._is_root(place):
                return [], []
            if place is EMBEDDING and self._comes_again:
                return [], dropped(place)
            return enter(place), [] if place.part in late else leave(place)

        begin = enter(EMBEDDING) if self._root else self._borders(gathers)
        nodes = self.chain.backward(begin, around, half, adding=not first and self._adds_in_place)
        if self._root:
            nodes += leave(EMBEDDING)
        for kind in late:
            nodes += [Repeat(group.count, tuple(leave(place))) for group, place in self.chain.places(kind)]
        if reduces:
            tail = embedding.reduce_bytes
            if not self._root:
                tail = where(self.chain.stage.embeds == 1, tail, reduced_before(EMBEDDING))
            nodes += [Wait(DATA_STREAM, "reduce"), Held("buffers", -tail)]
            nodes += [Wait(HOST_STREAM, "grads")] if self._offloads else []
        return nodes

    def _arrive(self, place: Place) -> list[Node]:
        """Weights of each group, which were gathered ahead or must be gathered now."""
        u = self.units[place.part]
        if len(u.in_turn) == 1:
            return list(self._copy_out(u, "backward", u.gather_bytes))
        nodes: list[Node] = []
        before = self.chain.follows(place, "forward")
        shares = [(presence, self._early(self.units[part], u)) for part, presence in before]
        for i, group in enumerate(u.in_turn):
            late = 1 - sum(presence * early[i][1] for presence, early in shares)
            nodes += [*self._start(group, "backward", late), *self._flat(group, late)]
            nodes += self._copy_out(group, "backward", group.gather_bytes)
        return nodes

    def _early(self, at_work: Unit | None, u: Unit) -> list[tuple[Unit, Any]]:
        """Groups of `u`, and whether (1 or 0) each is gathered while `at_work` is, the unit before it in backward: all,
        or from the last on as many as that one has (`_fsdp_param_group.py`: a group gathers one that came before it in
        forward; one alone on its mesh gathers nothing, and is not gathered). Without a unit before it, the last.
        """
        groups = u.in_turn
        if len(groups) == 1 or self.conventions.prefetches_units:
            return [(group, 1) for group in groups]
        most_ahead: Any = 1 if at_work is None else sum(1 - group.alone for group in at_work.in_turn)
        found: list[tuple[Unit, Any]] = []
        after: Any = 0
        for group in reversed(groups):
            found.append((group, (after < most_ahead) * 1))
            after = after + 1 - group.alone
        return found[::-1]

    def _borders(self, gathers: bool) -> list[Node]:
        """A stage without a head has nothing before its last layer that would gather it ahead."""
        if not gathers:
            return []
        nodes: list[Node] = []
        for unit, presence in self._units(self.chain.begins("backward")[1:]):
            for group, share in self._early(None, unit):
                nodes += [*self._start(group, "backward", presence * share), *self._flat(group, presence * share)]
        return nodes

    def _ahead(self, place: Place) -> list[Node]:
        """Buffers of the unit that is gathered while this one is at work."""
        here, following = self.units[place.part], self._units(self.chain.follows(place, "backward"))
        early = [(group, presence * share) for unit, presence in following for group, share in self._early(here, unit)]
        return [node for group, presence in early for node in self._flat(group, presence)]

    def _finish(self, u: Unit, released: Any, *, first: bool, reduces: bool, half: Half) -> list[Node]:
        n = self.conventions.numerics
        grad = ITEMSIZE[n.grad_dtype]
        added = self._adds_in_place and not first
        sums = u.grads_bytes // ITEMSIZE[n.compute_dtype] * grad  # all that gradients are views into is made wider
        nodes: list[Node] = []
        if reduces or not self.structure.pipelined:
            nodes.append(Held("params", -u.weights_bytes))  # resharded
        if not reduces:
            nodes.append(copy("accumulate", "backward", u.elements * grad, n.grad_dtype))
            if self._adds_in_place:
                return [*nodes, Held("grads", -u.grads_bytes)] if added and half == "weight" else nodes
            if first:  # one after the other is made wider: the last one is there beside all of them
                nodes.append(Held("grads", sums + u.last_grad_bytes - u.grads_bytes, "unsharded sums"))
            return [*nodes, Held("grads", -(u.last_grad_bytes if first else u.grads_bytes))]
        if released is not None:
            nodes += [Wait(DATA_STREAM, "reduce"), Held("buffers", -released)]
        gradients, last = u.grads_bytes, u.last_grad_bytes
        if added:
            nodes.append(copy("accumulate", "backward", u.elements * grad, n.grad_dtype))
            nodes += [Held("grads", -gradients)] if half == "weight" else []
        elif self._defers and not first:  # the unsharded sums are what is reduced
            nodes += [copy("accumulate", "backward", u.elements * grad, n.grad_dtype), Held("grads", -gradients)]
            gradients, last = sums, u.last_grad_bytes * 0
        if u.tp_sum is not None:  # of what backward left or, in the dtype of the reduction, of what was added up
            nodes.append(as_dtype(u.tp_sum, n.compute_dtype) if first else u.tp_sum)
        nodes += [
            Held("buffers", u.reduce_bytes, "input of the reduction"),
            Compute("copy_in", "backward", 0.0, gradients + u.reduce_bytes, n.grad_dtype),
            Held("grads", last - gradients),
        ]
        nodes.append(Held("grads", u.shard_bytes, "sharded gradients", apart=True))
        if self.conventions.reduce_copies:
            nodes.append(Held("buffers", u.reduce_bytes, "gloo's copy"))
        nodes += self._reductions(u)
        nodes.append(Held("grads", -last))
        if self.conventions.reduce_copies:
            nodes.append(Held("buffers", -u.reduce_bytes))
        if self._offloads:
            nodes += shard_grads_down(u, self.conventions, adds=not first and not self._defers)
        elif not first and not self._defers:  # added into the shard that is there
            nodes += [
                copy("accumulate", "backward", u.shard_bytes, n.grad_dtype),
                Held("grads", -u.shard_bytes, apart=True),
            ]
        return nodes

    def optimizer(self) -> list[Node]:
        n = self.conventions.numerics
        own = self._total("own_elements")
        moved = own * 3 * ITEMSIZE[n.param_dtype] + 2 * self._total("states_bytes")
        largest, in_turn = (self.chain.largest(f"{what}_elements", self.units) for what in ("largest", "in_turn"))
        copies = scratch_bytes(self.conventions, own, largest, in_turn)
        if self._offloads:  # tensor by tensor, as PyTorch does on a CPU
            copies = scratch_bytes(replace(self.conventions, optimizer_at_once=False), own, largest, in_turn)
            return [
                OnHost(copies, "the optimizer's scratch"),
                Compute("optimizer", "optimizer", 0.0, moved, "fp32", on_host=True),
                OnHost(-copies),
                OnHost(-self._total("shard_bytes")),
                *self._scales(),
            ]
        return [
            *self._orthogonalized(),
            Held("buffers", copies, "the optimizer's scratch"),
            Compute("optimizer", "optimizer", 0.0, moved, "fp32", tensors=self._total("tensors"), sharded=True),
            Held("buffers", -copies),
            Held("grads", -self._total("shard_bytes"), apart=True),
            *self._scales(),
        ]

    def _scales(self) -> list[Node]:
        """What tells the scales of weights that are gathered in fp8: over each axis that cuts them, in turn."""
        gathers = self.units.layers[0].in_turn[0].gathers
        if not self.conventions.fp8_gather or not gathers:
            return []
        size, nodes = self._total("fp8_tensors") * ITEMSIZE["fp32"], list[Node]()
        groups = [(gathers[0].axes, gathers[0].group_size)]
        groups += [(("tp",), self.chain.tp)] if self.structure.tensor != "none" else []
        for axes, ranks in groups:
            there = (ranks > 1) * (size > 0)
            payload = size * there
            wire = wire_bytes("all_reduce", payload, ranks)
            nodes.append(Collective("all_reduce", axes, "optimizer", "scales", "fp32", ranks, 1 * there, payload, wire))
        return nodes

    def _orthogonalized(self) -> list[Node]:
        """Muon's matrices come whole to ranks that own them, and go back as shards: two exchanges of fp32 for each
        layer (torchtitan b5bcd76, distributed/flex_shard: DistMuon).
        """
        states = self.conventions.numerics.states
        nodes: list[Node] = []
        for part, count in self.chain.counted() if states.optimizer == "muon" else ():
            for u in self.units[part].in_turn:
                if not (u.gathers and u.matrices):
                    continue
                axes, ranks = u.gathers[0].axes, u.gathers[0].group_size
                several = (ranks > 1) * 1
                elements = sum(alike * rows * columns for alike, rows, columns in u.matrices)
                shard = ITEMSIZE["fp32"] * elements // ranks * several
                wire = wire_bytes("all_to_all", shard, ranks)
                there = Collective("all_to_all", axes, "optimizer", "grads", "fp32", ranks, several, shard, wire)
                nodes.append(Repeat(count, (there,)))
                nodes += orthogonalized(states, [(u.matrices, count)], ranks)
                nodes.append(Repeat(count, (replace(there, what="params"),)))
        return nodes

    def same_forward(self, *, gathers: bool, first: bool) -> tuple[Any, ...]:
        return ("F", gathers, first and not self._freed("head"))

    def same_backward(self, *, gathers: bool, first: bool, last: bool) -> tuple[Any, ...]:
        return ("B", gathers and self.structure.reshard, first, last or not self._defers)
