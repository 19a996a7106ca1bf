"""The parts of one pipeline stage in order (embedding?, layers, head?), each with its place and its neighbours.

Layers repeat, but what crosses a border differs at the two ends, so the first and the last are peeled off. A stage of a
single layer is its last; its first and its middle then occur zero times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from nanum.arrays import most, take
from nanum.blocks.body import Body
from nanum.once import Once
from nanum.program import Compute, Held, Node, Phase, Repeat

Place = Literal["embedding", "first", "middle", "last", "head"]
Part = Literal["embedding", "layer", "head"]
Direction = Literal["forward", "backward"]
Half = Literal["whole", "input", "weight"]
Around = Callable[[Place], tuple[list[Node], list[Node]]]


def copy(name: str, phase: Phase, size: Any, dtype: str) -> Compute:
    """A memory-bound copy: `size` bytes are read, and as many written."""
    return Compute(name, phase, 0.0, 2 * size, dtype)


@dataclass(frozen=True, eq=False)
class Stage:
    """What one pipeline stage holds, or an array of the distinct ones; where it is in the pipeline is not its affair.

    `embeds` and `heads` are 0 or 1, `onward` is 1 where its output is sent on, and `back` where its input's gradient
    is. `at` takes an array over bodies to one over stages.
    """

    layers: Any
    embeds: Any
    heads: Any
    onward: Any
    back: Any
    at: np.ndarray | None = None
    hands_on: Any = 0  # 1 where the next stage is on the same rank, which is not sent to
    takes: Any = 0  # 1 where the stage before is

    def take(self, quantity: Any) -> Any:
        return take(quantity, self.at)


@dataclass(frozen=True, eq=False)
class Chain:
    stage: Stage
    embedding: Body
    layer: Body
    head: Body
    dtype: str  # of activations
    tp: Any  # ranks of the axis
    pp: Any
    input_bytes: Any  # token ids of one micro-batch
    frame_bytes: Any = 0  # what the model's frame holds from its embedding to the end of its forward pass
    tables_bytes: Any = 0  # of tables of positions that a stage has for the whole run
    tables_dtype: str = "fp32"
    tied_grad_bytes: Any = 0  # of the gradient that a head leaves for a table that it shares with the embedding
    tied_elements: Any = None  # of the table that embedding and head share, on one rank
    _next: dict[tuple[str, str], list[tuple[Part, Any]]] = field(default_factory=dict)  # answers, given again
    _held: Once[tuple[Held, Held]] = field(default_factory=Once)  # by the size that is held

    def count(self, place: Place) -> Any:
        s = self.stage
        if place == "embedding":
            return s.embeds
        if place == "head":
            return s.heads
        if place == "last":
            return (s.layers >= 1) * 1
        if place == "first":
            return (s.layers >= 2) * 1
        return most(s.layers - 2, 0)

    def body(self, place: Place) -> Body:
        return {"embedding": self.embedding, "head": self.head}.get(place, self.layer)

    def _run(
        self,
        places: tuple[Place, ...],
        direction: Direction,
        around: Around,
        half: Half = "whole",
        *,
        adding: bool = False,
    ) -> list[Node]:
        """Each part between what an engine does before and after it. What is handed from part to part is held
        meanwhile.
        """
        nodes: list[Node] = []
        for place in places:
            enter, leave = around(place)
            body = self.body(place)
            core, handed, output = body.forward, body.input_bytes, body.output_bytes
            if direction == "backward":
                core, handed, output = body.backward, output, handed
                if half == "input":
                    core = body.halves.input
                elif adding:
                    core = body.adding
            before = self._while_held(handed, enter)
            after = self._while_held(output, leave)
            nodes.append(Repeat(self.count(place), (*before, Repeat(1, core, self.stage.at), *after)))
        return nodes

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
        nodes = self._run(("embedding",), "forward", around)
        nodes.append(Held("activations", frame, "the model's frame"))
        nodes += self._run(("first", "middle", "last", "head"), "forward", around)
        return [
            *nodes,
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
            if adding and place == "head" and self.tied_elements is not None:  # no embedding is here to wait for
                leave = [Held("grads", -self.tied_grad_bytes * s.heads * (1 - s.embeds)), *leave]
            return enter, leave

        return [
            loss,
            *begin,
            *self._run(("head", "last", "middle", "first"), "backward", alone, adding=adding),
            *self._run(("embedding",), "backward", around, adding=adding),
            Held("grads", -shared),
        ]

    @property
    def keeps_input(self) -> int:
        """Is a stage's input among what is saved for its backward? 1 or 0; a stage begins with a layer, or an end."""
        return int(self.layer.keeps_input)

    def _inputs_half(self, begin: list[Node], around: Around) -> list[Node]:
        loss = Repeat(self.stage.heads, (Repeat(1, self.head.loss_backward_half, self.stage.at),))
        nodes = self._run(("head", "last", "middle", "first"), "backward", around, "input")
        graph = self.stage.take(self.head.halves.loss_bytes) * self.stage.heads
        return [loss, *begin, *nodes, Held("activations", -graph)]

    def _weights_half(self, begin: list[Node], around: Around) -> list[Node]:
        """Parts as in backward, though PyTorch goes by the order of the parameters: in passing it holds other bytes."""
        nodes = list(begin)
        places: tuple[Place, ...] = ("head", "last", "middle", "first")
        for place in places:
            enter, leave = around(place)
            core = Repeat(1, self.body(place).halves.weight, self.stage.at)
            nodes.append(Repeat(self.count(place), (*enter, core, *leave)))
        layer, head = (self.stage.take(body.halves.retained_bytes) for body in (self.layer, self.head))
        return [*nodes, Held("activations", -layer * self.stage.layers - head * self.stage.heads)]

    def total(self, field: str, embedding: object, layer: object, head: object) -> Any:
        """The sum over the stage's parts of a field that each part's weights have."""
        return self.stage.layers * getattr(layer, field) + getattr(embedding, field) + getattr(head, field)

    def largest(self, field: str, embedding: object, layer: object, head: object) -> Any:
        """The most of the stage's parts of a field that each part's weights have."""
        inner = (self.stage.layers >= 1) * getattr(layer, field)
        return most(most(getattr(embedding, field), getattr(head, field)), inner)

    def begins(self, direction: Direction) -> list[tuple[Part, Any]]:
        """The part that a direction begins with, as (part, 1 where it is so)."""
        key = "", direction
        if key not in self._next:
            self._next[key] = self._begins(direction)
        return self._next[key]

    def _begins(self, direction: Direction) -> list[tuple[Part, Any]]:
        s = self.stage
        here, other = ("embedding", s.embeds) if direction == "forward" else ("head", s.heads), self._inner(direction)
        return [here, *((part, (1 - here[1]) * presence) for part, presence in other)]  # type: ignore[list-item]

    def follows(self, place: Place, direction: Direction) -> list[tuple[Part, Any]]:
        """The part that comes after `place`, as (part, 1 where it is so); none after the last."""
        key = place, direction
        if key not in self._next:
            self._next[key] = self._follows(place, direction)
        return self._next[key]

    def _follows(self, place: Place, direction: Direction) -> list[tuple[Part, Any]]:
        inner: dict[tuple[Place, Direction], list[tuple[Part, Any]]] = {
            ("embedding", "forward"): self._inner("forward"),
            ("first", "forward"): [("layer", 1)],
            ("middle", "forward"): [("layer", 1)],
            ("last", "forward"): [("head", 1)],
            ("head", "backward"): self._inner("backward"),
            ("last", "backward"): [("layer", 1)],
            ("middle", "backward"): [("layer", 1)],
            ("first", "backward"): [("embedding", 1)],
        }
        found = inner.get((place, direction), [])
        if (place, direction) == ("last", "backward"):  # a stage's only layer is its last, and its first
            single = (self.stage.layers < 2) * 1
            return [("layer", 1 - single), ("embedding", single)]
        return found

    def _inner(self, direction: Direction) -> list[tuple[Part, Any]]:
        """What lies behind the end that a direction begins with: a layer, or without one the other end."""
        has = (self.stage.layers >= 1) * 1
        return [("layer", has), ("head" if direction == "forward" else "embedding", 1 - has)]

    @property
    def output_bytes(self) -> Any:
        """Bytes of the activations at a stage's border."""
        return self.stage.take(self.layer.output_bytes)
