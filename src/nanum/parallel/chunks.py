"""A pipeline rank that holds several stages: their passes in the order of a schedule, one rank's program.

The state of each stage's weights (gathered or not) is walked along with the order, so what is gathered when follows
from it, as it does for one stage. PyTorch's schedules of several chunks gather a stage's weights ahead of its first
pass (`schedule.ahead`); a backward in halves is done whole, in the second, on the stage that has no input to give a
gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from nanum.layout import Structure
from nanum.parallel.pipeline import Step
from nanum.program import Compute, Node, Repeat
from nanum.schedule import Action, ahead, placed


@runtime_checkable
class Gathers(Protocol):
    """A data-parallel engine whose weights are not there until they are gathered."""

    def gather_ahead(self) -> list[Node]: ...
    def drop(self, *, layers: bool) -> list[Node]: ...


@dataclass(frozen=True, eq=False)
class RankStep:
    """One step of one rank. `chunks` are its stages, `order` what it does."""

    chunks: tuple[Step, ...]
    order: tuple[Action, ...]
    structure: Structure
    gathers_ahead: bool = True  # of several chunks' weights, as PyTorch's schedules do

    @cached_property
    def passes(self) -> tuple[tuple[Action | None, tuple[Node, ...]], ...]:
        """What is done, in order; None stands for what happens to weights between two passes."""
        return tuple(self._passes())

    @cached_property
    def program(self) -> tuple[Node, ...]:
        """All of it, in order. One optimizer steps for all chunks: what it makes for one is there for all."""
        ends = [_updated(chunk.optimizer) for chunk in self.chunks]
        return (
            *self.before_update,
            *(node for chunk in self.chunks for node in chunk.released),
            *(node for before, _ in ends for node in before),
            *(node for _, after in ends for node in after),
        )

    @cached_property
    def before_update(self) -> tuple[Node, ...]:
        """All of it but the optimizer."""
        return (*self.at_rest, *(Repeat(1, nodes) for _, nodes in self.passes))

    @property
    def at_rest(self) -> tuple[Node, ...]:
        """What is held before a step, and after it. Tokens that two stages read are there once."""
        read = max(self.chunks, key=lambda chunk: int(chunk.ids.bytes))
        batch = Repeat(read.position.num_microbatches, (read.ids, *(chunk.received for chunk in self.chunks)))
        return (*(node for chunk in self.chunks for node in chunk.resident), batch)

    def _passes(self) -> Iterator[tuple[Action | None, tuple[Node, ...]]]:
        there = dict.fromkeys(range(len(self.chunks)), False)
        places = placed(self.order)
        last = {action.chunk: i for i, action in enumerate(self.order)}
        made: dict[Any, tuple[Node, ...]] = {}
        for i, ((action, kind), weights) in enumerate(zip(places, ahead(self.order), strict=True)):
            chunk = action.chunk
            if self.gathers_ahead:
                for c in weights.dropped:
                    data = self.chunks[c].actions.data
                    if isinstance(data, Gathers) and last[c] > i:  # a last backward has freed them
                        yield None, made.setdefault(("drop", c, there[c]), tuple(data.drop(layers=there[c])))
                    there[c] = False
                for c in weights.gathered:
                    data = self.chunks[c].actions.data
                    if isinstance(data, Gathers):
                        yield None, made.setdefault(("gather", c), tuple(data.gather_ahead()))
                    there[c] = True
            step = self.chunks[chunk]
            given = step.position.stage != 0  # is there an input that a half could give a gradient to?
            gathers = not there[chunk]
            if action.kind == "F":
                yield action, step.actions.forward(gathers=gathers, first=kind.first)
                there[chunk] = not self.structure.reshard
            elif action.kind == "I":
                how = {"gathers": gathers, "first": False, "last": False}
                yield action, step.actions.backward(**how, half="input") if given else ()
                there[chunk] = there[chunk] or given
            else:
                half: Any = "weight" if action.kind == "W" and given else "whole"
                how = {"gathers": gathers, "first": kind.first, "last": kind.last}
                yield action, step.actions.backward(**how, half=half)
                there[chunk] = True
                lingers, output = step.lingers
                if kind.first and lingers:
                    yield None, (output,)


def _updated(nodes: tuple[Node, ...]) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """An optimizer's nodes up to its last kernel, and what follows."""
    stop = max(i for i, node in enumerate(nodes) if isinstance(node, Compute)) + 1
    return nodes[:stop], nodes[stop:]
