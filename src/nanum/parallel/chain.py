"""The parts of one pipeline stage in order (embedding?, layers, head?), each with its place and its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from nanum.arrays import most, take
from nanum.blocks.body import Body
from nanum.once import Once
from nanum.parallel.parked import Parks, parked, saved_bytes
from nanum.parallel.places import EMBEDDING, HEAD, Direction, Group, Part, Place, Sequence
from nanum.program import Compute, Held, Node, Phase, Repeat

Half = Literal["whole", "input", "weight"]
Around = Callable[[Place], tuple[list[Node], list[Node]]]
T = TypeVar("T")
U = TypeVar("U")


def copy(name: str, phase: Phase, size: Any, dtype: str) -> Compute:
    """A memory-bound copy: `size` bytes are read, and as many written."""
    return Compute(name, phase, 0.0, 2 * size, dtype)


@dataclass(frozen=True)
class Each(Generic[T]):
    """One of each part of a model; of layers by their kind."""

    embedding: T
    layers: tuple[T, ...]
    head: T

    def __getitem__(self, part: Part) -> T:
        if isinstance(part, int):
            return self.layers[part]
        return self.embedding if part == "embedding" else self.head

    def map(self, change: Callable[[T], U]) -> Each[U]:
        return Each(change(self.embedding), tuple(map(change, self.layers)), change(self.head))

    def zip(self, other: Each[U]) -> Each[tuple[T, U]]:
        layers = tuple(zip(self.layers, other.layers, strict=True))
        return Each((self.embedding, other.embedding), layers, (self.head, other.head))


@dataclass(frozen=True, eq=False)
class Stage:
    """What one pipeline stage holds, or an array of the distinct ones; where it is in the pipeline is not its affair.

    `embeds` and `heads` are 0 or 1, `onward` is 1 where its output is sent on, and `back` where its input's gradient
    is. `at` takes an array over bodies to one over stages.
    """

    groups: tuple[Group, ...]
    embeds: Any
    heads: Any
    onward: Any
    back: Any
    at: np.ndarray | None = None
    hands_on: Any = 0  # 1 where the next stage is on the same rank, which is not sent to
    takes: Any = 0  # 1 where the stage before is

    def take(self, quantity: Any) -> Any:
        return take(quantity, self.at)

    def layers(self, kind: int) -> Any:
        """How many layers of a kind there are."""
        return sum(g.count * sum(place.part == kind for place in g.places) for g in self.groups)

    @cached_property
    def sequence(self) -> Sequence:
        return Sequence(self.groups, self.embeds, self.heads)


@dataclass(frozen=True)
class Beside:
    """What is done at each layer of a kind, whatever the engine: before it runs forward, and when it has; before it
    runs backward, and when it has; and at the end, when the engine has done its part (or where gradients are added).
    """

    forward: tuple[Node, ...] = ()
    made: tuple[Node, ...] = ()
    backward: tuple[Node, ...] = ()
    left: tuple[Node, ...] = ()
    end: tuple[Node, ...] = ()
    end_adding: tuple[Node, ...] = ()

    def plus(self, **more: tuple[Node, ...]) -> Beside:
        """With more of each that is named, after what is there."""
        return replace(self, **{name: (*getattr(self, name), *nodes) for name, nodes in more.items()})


NOTHING_BESIDE = Beside()


@dataclass(frozen=True, eq=False)
class Chain:
    stage: Stage
    bodies: Each[Body]
    dtype: str  # of activations
    tp: Any  # ranks of the axis
    pp: Any
    input_bytes: Any  # token ids of one micro-batch
    target_bytes: Any = None  # what its loss is given; None where it is the same tensor
    frame_bytes: Any = 0  # what the model's frame holds from its embedding to the end of its forward pass
    tables_bytes: Any = 0  # of tables of positions that a stage has for the whole run
    tables_dtype: str = "fp32"
    tied_grad_bytes: Any = 0  # of the gradient that a head leaves for a table that it shares with the embedding
    tied_elements: Any = None  # of the table that embedding and head share, on one rank
    table_trained: bool = True
    parks: Parks = "none"  # what layers save for backward, in the host's memory
    beside: Mapping[int, Beside] = field(default_factory=dict)  # by the kind of layer
    _next: dict[tuple[Any, str], list[tuple[Part, Any]]] = field(default_factory=dict)  # answers, given again
    _held: Once[tuple[Held, Held]] = field(default_factory=Once)  # by the size that is held

    @property
    def head(self) -> Body:
        return self.bodies.head

    def counted(self) -> list[tuple[Part, Any]]:
        """Each part, and how often a stage that has the ends has it."""
        kinds = range(len(self.bodies.layers))
        return [("embedding", 1), *((kind, self.stage.layers(kind)) for kind in kinds), ("head", 1)]

    def _layers(self, direction: Direction, visit: Callable[[Place], list[Node]]) -> list[Node]:
        """What is done at each layer, in order."""
        groups = self.stage.sequence.in_order(direction)
        return [Repeat(g.count, tuple(node for place in places for node in visit(place))) for g, places in groups]

    def _visit(
        self,
        place: Place,
        direction: Direction,
        around: Around,
        half: Half = "whole",
        *,
        adding: bool = False,
    ) -> list[Node]:
        """A part between what an engine does before and after it. What is handed on from part to part is held then."""
        enter, leave = around(place)
        body = self.bodies[place.part]
        core, handed, output = body.forward, body.input_bytes, body.output_bytes
        if direction == "backward":
            core, handed, output = body.backward, body.output_grad_bytes, body.input_grad_bytes
            if half == "input":
                core = body.halves.input
            elif adding:
                core = body.adding
        beside = self.beside.get(place.part, NOTHING_BESIDE) if isinstance(place.part, int) else NOTHING_BESIDE
        before, after = self._while_held(handed, enter), self._while_held(output, leave)
        begin, end = parked(self.parks, place, direction, self.follows, self._saved, self.dtype)
        here = Repeat(1, core, self.stage.at)
        if direction == "forward":
            return [*begin, *beside.forward, *before, here, *beside.made, *after, *end]
        let_go = beside.end_adding if adding else beside.end
        return [*begin, *before, *beside.backward, here, *beside.left, *after, *end, *let_go]

    def _saved(self, kind: int) -> Any:
        return self.stage.take(saved_bytes(self.bodies.layers[kind]))

    def _while_held(self, size: Any, nodes: list[Node]) -> list[Node]:
        if not nodes:
            return []
        held, released = self._held((size,), partial(self._holds, size))
        return [held, *nodes, released]

    def _holds(self, size: Any) -> tuple[Held, Held]:
        taken = self.stage.take(size)
        return Held("activations", taken, "handed on"), Held("activations", -taken)

    def forward(self, around: Around, finish: list[Node]) -> list[Node]:
        """Forward through the parts; `around(place)` gives what an engine does before and after one, `finish` what it
        does before the loss.
        """
        frame = self.frame_bytes * self.stage.embeds

        def visit(place: Place) -> list[Node]:
            return self._visit(place, "forward", around)

        return [
            Repeat(self.stage.embeds, tuple(visit(EMBEDDING))),
            Held("activations", frame, "the model's frame"),
            *self._layers("forward", visit),
            Repeat(self.stage.heads, tuple(visit(HEAD))),
            Held("activations", -frame),
            *finish,
            Repeat(self.stage.heads, (Repeat(1, self.head.loss, self.stage.at),)),
        ]

    def backward(self, begin: list[Node], around: Around, half: Half = "whole", *, adding: bool = False) -> list[Node]:
        """Backward through the parts; `begin` is what an engine does once the loss's gradient is there. Gradients of
        weights stay held for the engine or, `adding`, are gone into those of an earlier backward. One half of it alone,
        where a schedule splits it.
        """
        if half == "input":
            return self._inputs_half(begin, around)
        if half == "weight":
            return self._weights_half(begin, around)
        loss = Repeat(self.stage.heads, (Repeat(1, self.head.loss_backward, self.stage.at),))
        s = self.stage
        shared = self.tied_grad_bytes * s.embeds * s.heads

        def alone(place: Place) -> tuple[list[Node], list[Node]]:
            enter, leave = around(place)
            if adding and place is HEAD and self.tied_elements is not None:  # no embedding is here to wait for
                leave = [Held("grads", -self.tied_grad_bytes * s.heads * (1 - s.embeds)), *leave]
            return enter, leave

        def visit(place: Place) -> list[Node]:
            return self._visit(place, "backward", alone, adding=adding)

        return [
            loss,
            *begin,
            Repeat(s.heads, tuple(visit(HEAD))),
            *self._layers("backward", visit),
            Repeat(s.embeds, tuple(visit(EMBEDDING))),
            Held("grads", -shared),
        ]

    @property
    def keeps_input(self) -> Any:
        """Is a stage's input among what is saved for its backward? 1 or 0, as the part has it that the stage begins
        with.
        """
        return sum(int(self.bodies[part].keeps_input) * presence for part, presence in self.begins("forward"))

    def _inputs_half(self, begin: list[Node], around: Around) -> list[Node]:
        s = self.stage
        loss = Repeat(s.heads, (Repeat(1, self.head.loss_backward_half, s.at),))

        def visit(place: Place) -> list[Node]:
            return self._visit(place, "backward", around, "input")

        nodes = [Repeat(s.heads, tuple(visit(HEAD))), *self._layers("backward", visit)]
        graph = s.take(self.head.halves.loss_bytes) * s.heads
        return [loss, *begin, *nodes, Held("activations", -graph)]

    def _weights_half(self, begin: list[Node], around: Around) -> list[Node]:
        """Parts as in backward, though PyTorch goes by the order of the parameters: in passing it holds other bytes."""
        s = self.stage

        def visit(place: Place) -> list[Node]:
            enter, leave = around(place)
            return [*enter, Repeat(1, self.bodies[place.part].halves.weight, s.at), *leave]

        retained = sum(
            s.take(body.halves.retained_bytes) * s.layers(kind) for kind, body in enumerate(self.bodies.layers)
        )
        retained = retained + s.take(self.head.halves.retained_bytes) * s.heads
        return [
            *begin,
            Repeat(s.heads, tuple(visit(HEAD))),
            *self._layers("backward", visit),
            Held("activations", -retained),
        ]

    def places(self, kind: int) -> list[tuple[Group, Place]]:
        """Where layers of a kind are, each with its group."""
        return [(g, place) for g in self.stage.groups for place in g.places if place.part == kind]

    def total(self, field: str, each: Each[Any]) -> Any:
        """The sum over the stage's parts of a field that each part's weights have."""
        return sum(getattr(each[part], field) * count for part, count in self.counted())

    def largest(self, field: str, each: Each[Any]) -> Any:
        """The most of the stage's parts of a field that each part's weights have."""
        found: Any = 0
        for part, count in self.counted():
            found = most(found, (count >= 1) * getattr(each[part], field))
        return found

    def begins(self, direction: Direction) -> list[tuple[Part, Any]]:
        """The part that a direction begins with, as (part, 1 where it is so)."""
        key = None, direction
        if key not in self._next:
            self._next[key] = self.stage.sequence.begins(direction)
        return self._next[key]

    def follows(self, place: Place, direction: Direction) -> list[tuple[Part, Any]]:
        """The part that comes after `place`, as (part, 1 where it is so); none after the last."""
        key = place, direction
        if key not in self._next:
            self._next[key] = self.stage.sequence.follows(place, direction)
        return self._next[key]

    @property
    def output_bytes(self) -> Any:
        """Bytes of the activations at a stage's border."""
        return self.stage.take(self.bodies.layers[0].output_bytes)
