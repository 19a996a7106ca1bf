"""What the weights of the parts exchange, by the way in which an engine stores them: as units or in flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from nanum.blocks.body import Body
from nanum.conventions import Conventions
from nanum.engines.engine import Engine
from nanum.layout import Structure
from nanum.parallel.buffer import Buffer, buffer
from nanum.parallel.chain import Chain, Each
from nanum.parallel.units import Unit, unit
from nanum.sharding import Shapes, Tensor

T = TypeVar("T")
W = TypeVar("W", Unit, Buffer)
Exchanged = Each[Unit] | tuple[Each[Buffer], ...]
"""Units, or the buffers of each mesh."""


def replicates(structure: Structure, engine: Engine) -> bool:
    """Do ranks store weights whole, as a plain module or under DDP?"""
    return engine.data_parallel == "plain_or_fully_shard" and structure.zero < 3


def flattens(structure: Structure, engine: Engine) -> bool:
    """Do weights or their gradients lie in flat buffers, which are cut anywhere?"""
    return engine.data_parallel in ("flat_buffers", "accumulated") or (
        engine.data_parallel == "partitioned" and structure.zero < 3
    )


@dataclass(frozen=True, eq=False)
class Weights:
    """What the weights of the parts exchange, and those of the head without its table (which is the embedding's, where
    the two are tied and on one stage).
    """

    shapes: Each[Shapes]
    conventions: Conventions
    zero: int
    whole: bool  # each rank stores them whole
    own_experts: bool  # do experts lie on a mesh of their own?
    bodies: Each[Body]

    @cached_property
    def units(self) -> tuple[Each[Unit], Unit]:
        return self._made(
            lambda shapes, weights, grads: unit(shapes, weights, grads, self.conventions, whole=self.whole)
        )

    @cached_property
    def buffers(self) -> list[tuple[Each[Buffer], Buffer]]:
        """Of each mesh, beginning with the one that all but experts lie on, and of what is stored in fp8 there."""

        def on(mesh: bool, fp8: bool) -> tuple[Each[Buffer], Buffer]:
            given = self.conventions, self.zero
            return self._made(
                lambda shapes, weights, grads: buffer(shapes, weights, grads, *given, experts=mesh, fp8=fp8)
            )

        meshes = (False, True)[: 1 + self.own_experts]
        return [*(on(mesh, False) for mesh in meshes), *([on(False, True)] if self.conventions.fp8_gather else [])]

    def _made(self, make: Callable[[Shapes, tuple[Tensor, ...], Mapping[Tensor, Tensor]], T]) -> tuple[Each[T], T]:
        head = self.bodies.head
        without = tuple(w for w in head.weights if w.name not in head.shared)
        each = self.shapes.zip(self.bodies).map(lambda both: make(both[0], both[1].weights, both[1].weight_grads))
        return each, make(self.shapes.head, without, head.weight_grads)


def exchanged(chain: Chain, weights: Weights, structure: Structure, engine: Engine) -> Exchanged:
    """Units or buffers of the parts, on each distinct stage."""
    if flattens(structure, engine):
        return tuple(_on_stages(chain, *made) for made in weights.buffers)
    units = _on_stages(chain, *weights.units)
    if weights.conventions.units == "root" and not replicates(structure, engine):
        return Each(units.embedding + units.head, units.layers, units.head.times(0, lambda q: q))
    return units


def _on_stages(chain: Chain, each: Each[W], rest: W) -> Each[W]:
    """A table that embedding and head share is the embedding's, where both are; `rest` is the head without it."""
    s = chain.stage
    shares = s.embeds * s.heads * (chain.tied_elements is not None)
    head = each.head.times(s.heads - shares, s.take) + rest.times(shares, s.take)
    layers = tuple(layer.times(1, s.take) for layer in each.layers)
    return Each(each.embedding.times(s.embeds, s.take), layers, head)
