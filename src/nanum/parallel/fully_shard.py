"""FSDP2: weights stored as shards, gathered a unit at a time, and what its buffers hold meanwhile.

Conventions of `torch.distributed.fsdp.fully_shard` (PyTorch 2.13: `_fsdp_param_group.py`, `_fsdp_collectives.py`):
- the flat output of a gather lives until the next unit has copied out, so a unit is there twice, and for a moment three
  are there (`unit_gather`);
- in backward the next unit is gathered as soon as this one has copied out;
- after a unit's backward its parameters go, and its gradients are reduced, or added up (`unit_reduce`);
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
gathered, and travel as bytes with the unit's others; their scales are worked out after each update (`shard_update`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nanum.arrays import most, where
from nanum.conventions import Conventions
from nanum.layout import Structure
from nanum.once import Once
from nanum.parallel.chain import Chain, Each, Half
from nanum.parallel.places import EMBEDDING, HEAD, Direction, Part, Place
from nanum.parallel.shard_update import shard_update
from nanum.parallel.unit_gather import UnitGather
from nanum.parallel.unit_reduce import UnitReduce
from nanum.parallel.units import Unit
from nanum.program import DATA_STREAM, HOST_STREAM, Held, Node, OnHost, Repeat, Wait


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

    @cached_property
    def _gather(self) -> UnitGather:
        return UnitGather(self.conventions, self._offloads, self._made)

    @cached_property
    def _reduce(self) -> UnitReduce:
        return UnitReduce(self.conventions, self.structure, self._offloads, self._made)

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
    def apart(self) -> tuple[Any, Any]:
        """The most that the pools of two other streams have, which PyTorch's allocator does not share: that of gathers
        a flat buffer and the one before it, with casts of shards; that of reductions, whose output the sharded
        gradients are views of, all of these. And how much more where they are added up
        (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: `foreach_all_gather`, `foreach_reduce`).
        """
        every = self.chain.counted()
        layers = [(unit, count) for part, count in every if isinstance(part, int) for unit in self.units[part].in_turn]
        ends = [(self.units[part], count) for part, count in every if not isinstance(part, int)]
        layer, end = (self._most(units, "gather_bytes", self._gather.cast) for units in (layers, ends))
        shard = self._most([*layers, *ends], "shard_bytes")
        if self._offloads:  # a reduction's output goes with its copy
            return most(layer, end) + layer + shard, 0
        return most(layer, end) + layer + self._total("shard_bytes"), shard * (self.structure.grad_sync == "each")

    def ahead(self) -> Any:
        """Flat buffers of all units at once, as `gather_ahead` begins them."""
        return self._total("gather_bytes") + self._total(self._gather.cast)

    @staticmethod
    def _most(units: list[tuple[Unit, Any]], *fields: str) -> Any:
        found: Any = 0
        for unit, count in units:
            found = most(found, (count >= 1) * sum(getattr(unit, field) for field in fields))
        return found

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
            for group, share in forward if direction == "forward" else self._gather.early(here, unit):
                found += self._gather.start(group, direction, presence * share)
        return found

    @property
    def _whole(self) -> list[tuple[Unit, Any]]:
        """All units of the stage."""
        return [(self.units[part], count) for part, count in self.chain.counted()]

    def gather_ahead(self, ticket: str) -> list[Node]:
        """Begin to gather all units of the stage before its forward pass, as a schedule of several chunks does."""
        return [Repeat(n, tuple(self._gather.begin(u, "forward", 1, ticket))) for u, n in self._whole]

    def arrive(self, ticket: str) -> list[Node]:
        """Wait for them, and copy them out."""
        return [Repeat(n, tuple(self._gather.copy_out(u, "forward", u.gather_bytes, ticket))) for u, n in self._whole]

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
                return self._gather.now(u, "forward")
            if not gathers or (place is HEAD and (self._root or not ends)):
                return []
            next_gather = self._next(place, "forward", heads=ends)
            before, nodes = flat_before(place), list[Node]()
            for group in u.in_turn:
                nodes += [*self._gather.flat(group), *self._gather.copy_out(group, "forward", before)]
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
                begin += self._gather.start(embedding, "forward")
            if not self._root:
                inner = self._units(self.chain.begins("forward")[1:], heads=ends)
                begin += [node for unit, presence in inner for node in self._gather.start(unit, "forward", presence)]
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
    def backward(self, *, gathers: bool, first: bool, last: bool, half: Half = "whole") -> list[Node]:
        """One micro-batch backward. `first` and `last` of a step: where gradients are made, and where a pipeline
        reduces them. Of a backward in halves the first gathers, and the second leaves the gradients.
        """
        reduces = (last or not self._reduce.defers) and half != "input"
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
                own = self._gather.now(u, "backward")
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
                yield from self._reduce.after_backward(last, released, first=first, reduces=reduces, half=half)
                for group in others:
                    yield from self._reduce.after_backward(group, None, first=first, reduces=reduces, half=half)

            return list(self._made(made_of, lambda: tuple(make())))

        late = [kind for kind, body in enumerate(self.chain.bodies.layers) if not body.gives_grad]

        def around(place: Place) -> tuple[list[Node], list[Node]]:
            if self._is_root(place):
                return [], []
            if place is EMBEDDING and self._comes_again:
                return [], dropped(place)
            return enter(place), [] if place.part in late else leave(place)

        begin = enter(EMBEDDING) if self._root else self._borders(gathers)
        nodes = self.chain.backward(begin, around, half, adding=not first and self._reduce.adds_in_place)
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
            return list(self._gather.copy_out(u, "backward", u.gather_bytes))
        nodes: list[Node] = []
        before = self.chain.follows(place, "forward")
        shares = [(presence, self._gather.early(self.units[part], u)) for part, presence in before]
        for i, group in enumerate(u.in_turn):
            late = 1 - sum(presence * early[i][1] for presence, early in shares)
            nodes += self._gather.begin(group, "backward", late)
            nodes += self._gather.copy_out(group, "backward", group.gather_bytes)
        return nodes

    def _borders(self, gathers: bool) -> list[Node]:
        """A stage without a head has nothing before its last layer that would gather it ahead."""
        if not gathers:
            return []
        nodes: list[Node] = []
        for unit, presence in self._units(self.chain.begins("backward")[1:]):
            for group, share in self._gather.early(None, unit):
                nodes += self._gather.begin(group, "backward", presence * share)
        return nodes

    def _ahead(self, place: Place) -> list[Node]:
        """Buffers of the unit that is gathered while this one is at work."""
        here, following = self.units[place.part], self._units(self.chain.follows(place, "backward"))
        nodes: list[Node] = []
        for unit, presence in following:
            for group, share in self._gather.early(here, unit):
                nodes += self._gather.flat(group, presence * share)
        return nodes

    # --- the update -------------------------------------------------------------------------------------------------
    def optimizer(self) -> list[Node]:
        over_tp = self.structure.tensor != "none"
        return shard_update(self.chain, self.units, self.conventions, over_tp=over_tp, offloads=self._offloads)

    def same_forward(self, *, gathers: bool, first: bool) -> tuple[Any, ...]:
        return ("F", gathers, first and not self._freed("head"))

    def same_backward(self, *, gathers: bool, first: bool, last: bool) -> tuple[Any, ...]:
        return ("B", gathers and self.structure.reshard, first, last or not self._reduce.defers)
