"""The parts of one pipeline stage in order (embedding?, layers, head?), each with its place and its neighbours.

Layers repeat, but what crosses a border differs at the two ends, so the first and the last are peeled off. A stage of a single
layer is its last; its first and its middle then occur zero times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nanum.blocks.body import Body
from nanum.program import Held, Node, Repeat

Place = Literal["embedding", "first", "middle", "last", "head"]


def where(condition: Any, yes: Any, no: Any) -> Any:
    """`yes if condition else no`, for one layout or for many."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def least(a: Any, b: Any) -> Any:
    return where(a < b, a, b)


def most(a: Any, b: Any) -> Any:
    return where(a > b, a, b)


@dataclass(frozen=True, eq=False)
class Stage:
    """What one pipeline stage holds. `embeds` and `heads` are 0 or 1; `at` takes an array over bodies to one over stages."""

    layers: Any
    embeds: Any
    heads: Any
    stage: Any
    pp: Any
    num_microbatches: Any
    at: np.ndarray | None = None

    def take(self, quantity: Any) -> Any:
        if self.at is None or not isinstance(quantity, np.ndarray) or quantity.ndim == 0:
            return quantity
        return quantity[self.at]


@dataclass(frozen=True, eq=False)
class Chain:
    stage: Stage
    embedding: Body
    layer: Body
    head: Body
    dtype: str  # of activations
    layer_tp: Any  # ranks of the tp axis
    input_bytes: Any  # token ids of one micro-batch
    frame_bytes: Any = 0  # what the model's frame holds from its embedding to the end of its forward pass
    tied_elements: Any = None  # of the table that embedding and head share, on one rank

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
        self, places: tuple[Place, ...], core: Callable[[Body], tuple[Node, ...]], around: Callable[[Place], tuple[list[Node], list[Node]]]
    ) -> list[Node]:
        nodes: list[Node] = []
        for place in places:
            enter, leave = around(place)
            body = core(self.body(place))
            if body or enter or leave:
                nodes.append(Repeat(self.count(place), (*enter, Repeat(1, body, self.stage.at), *leave)))
        return nodes

    def forward(self, around: Callable[[Place], tuple[list[Node], list[Node]]], finish: list[Node]) -> list[Node]:
        """Forward through the parts; `around(place)` gives what an engine does before and after one, `finish` what it does before
        the loss."""
        frame = self.frame_bytes * self.stage.embeds
        nodes = self._run(("embedding",), lambda b: b.forward, around)
        nodes.append(Held("activations", frame, "the model's frame"))
        nodes += self._run(("first", "middle", "last", "head"), lambda b: b.forward, around)
        return [*nodes, Held("activations", -frame), *finish, Repeat(self.stage.heads, (Repeat(1, self.head.loss, self.stage.at),))]

    def backward(self, begin: list[Node], around: Callable[[Place], tuple[list[Node], list[Node]]]) -> list[Node]:
        """Backward through the parts; `begin` is what an engine does once the loss's gradient is there."""
        loss = Repeat(self.stage.heads, (Repeat(1, self.head.loss_backward, self.stage.at),))
        return [loss, *begin, *self._run(("head", "last", "middle", "first", "embedding"), lambda b: b.backward, around)]

    @property
    def output_bytes(self) -> Any:
        """Bytes of the activations at a stage's border."""
        return self.stage.take(self.layer.output_bytes)
