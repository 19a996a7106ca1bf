"""A pipeline rank that holds several stages: their passes in the order of a schedule, one rank's program.

The state of each stage's weights (gathered or not) is walked along with the order, so what is gathered when follows
from it, as it does for one stage. Schedules of several chunks gather a stage's weights ahead of its first pass
(`schedule.turns`); a backward in halves is done whole, in the second, on the stage that has no input to give a
gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from nanum.layout import Structure
from nanum.parallel.chain import Half
from nanum.parallel.pipeline import OtherStreams, Step
from nanum.program import Collective, Compute, Node, Repeat
from nanum.schedule import Action, ActionKind, Turn, Weights, placed, turns


@runtime_checkable
class Gathers(Protocol):
    """A data-parallel engine whose weights are not there until they are gathered."""

    def gather_ahead(self, ticket: str) -> list[Node]: ...
    def arrive(self, ticket: str) -> list[Node]: ...


@runtime_checkable
class Drops(Protocol):
    """One that can free gathered weights between passes."""

    def drop(self, *, layers: bool) -> list[Node]: ...


@runtime_checkable
class Together(Protocol):
    """One that reduces the gradients of a chunk apart from its last backward, and updates all chunks at once; what it
    holds `once` is the rank's.
    """

    def once(self, chunks: Sequence[Any]) -> list[Node]: ...
    def reduce(self) -> list[Node]: ...
    def update(self, chunks: Sequence[Any]) -> list[Node]: ...


@dataclass(frozen=True, eq=False)
class RankStep:
    """One step of one rank. `chunks` are its stages, `order` what it does."""

    chunks: tuple[Step, ...]
    order: tuple[Action, ...]
    structure: Structure
    weights: Weights
    rank: int = 0

    @cached_property
    def passes(self) -> tuple[tuple[Action | None, tuple[Node, ...]], ...]:
        """What is done but for the update, in order; None stands for what happens to weights between two passes."""
        return tuple((turn.action, nodes) for turn, nodes in self._walk())

    @property
    def turns(self) -> tuple[tuple[Node, ...], ...]:
        """All of it in `schedule.turns`; those that do alike are the same nodes."""
        return (*(nodes for _, nodes in self.passes), self.optimizer)

    @property
    def send(self) -> Collective:
        """Across a border, one way, of one micro-batch."""
        return self.chunks[0].send

    @cached_property
    def program(self) -> tuple[Node, ...]:
        """All of it, in order."""
        return (*self.before_update, *(node for chunk in self.chunks for node in chunk.released), *self.optimizer)

    @property
    def apart_bytes(self) -> int:
        """The most that pools of other streams have. All of one chunk may be gathered at once, ahead of its passes."""
        held = [chunk.actions.data for chunk in self.chunks if isinstance(chunk.actions.data, OtherStreams)]
        return int(sum(size + added + data.ahead() for data in held for size, added in (data.apart(),)))

    @cached_property
    def counted(self) -> tuple[Node, ...]:
        """All of it in no order, what is done alike together: for sums."""
        alike: dict[int, list[tuple[Node, ...]]] = {}
        for _, nodes in self.passes:
            alike.setdefault(id(nodes), []).append(nodes)
        repeated = (Repeat(len(each), each[0]) for each in alike.values())
        return (*self.at_rest, *repeated, *self.optimizer)

    @cached_property
    def before_update(self) -> tuple[Node, ...]:
        """All of it but the optimizer."""
        return (*self.at_rest, *(Repeat(1, nodes) for _, nodes in self.passes))

    @cached_property
    def optimizer(self) -> tuple[Node, ...]:
        """One optimizer steps for all chunks: what it makes for one is there for all."""
        data = [chunk.actions.data for chunk in self.chunks]
        if isinstance(data[0], Together):
            return tuple(data[0].update(data))
        ends = [_updated(chunk.optimizer) for chunk in self.chunks]
        return (*(node for before, _ in ends for node in before), *(node for _, after in ends for node in after))

    @property
    def at_rest(self) -> tuple[Node, ...]:
        """What is held before a step, and after it. Tokens that two stages read are there once."""
        read = max(self.chunks, key=lambda chunk: int(chunk.ids.bytes))
        batch = Repeat(read.position.num_microbatches, (read.ids, *(chunk.received for chunk in self.chunks)))
        data = [chunk.actions.data for chunk in self.chunks]
        shared = data[0].once(data) if isinstance(data[0], Together) else []
        return (*(node for chunk in self.chunks for node in chunk.resident), *shared, batch)

    def _walk(self) -> Iterator[tuple[Turn, tuple[Node, ...]]]:
        there = dict.fromkeys(range(len(self.chunks)), False)
        places = iter(placed(self.order))
        left = Counter(action.chunk for action in self.order)  # passes that are still to come
        made: dict[Any, tuple[Node, ...]] = {}
        for turn in turns(self.order, self.weights, self.rank):
            c = turn.chunk
            if turn.does == "pass":
                left[c] -= 1
                _, kind = next(places)
                yield turn, self._pass(c, kind, there, made)
            elif turn.does != "update":
                # Between passes; a chunk's last backward has freed its weights.
                key = (turn.does, c, there[c] and left[c] > 0, left[c] > 0)
                if key not in made:
                    made[key] = self._between(turn, here=there[c], needed=left[c] > 0)
                yield turn, made[key]
                there[c] = there[c] if turn.does == "reduce" else turn.does != "drop"

    def _between(self, turn: Turn, *, here: bool, needed: bool) -> tuple[Node, ...]:
        """What happens to a chunk's weights; `here` where its layers' are gathered, `needed` where passes are left."""
        data, ticket = self.chunks[turn.chunk].actions.data, f"gather of chunk {turn.chunk}"
        if turn.does == "reduce" and isinstance(data, Together):
            return tuple(data.reduce())
        if turn.does == "drop" and isinstance(data, Drops):
            return tuple(data.drop(layers=here)) if needed else ()
        if turn.does == "gather" and isinstance(data, Gathers):
            return tuple(data.gather_ahead(ticket))
        if turn.does == "await" and isinstance(data, Gathers):
            return tuple(data.arrive(ticket))
        return ()

    def _pass(
        self, chunk: int, kind: ActionKind, there: dict[int, bool], made: dict[Any, tuple[Node, ...]]
    ) -> tuple[Node, ...]:
        """A pass of a chunk; `there` says of each whether its weights are gathered, before it and after."""
        step = self.chunks[chunk]
        given = step.position.stage != 0  # is there an input that a half could give a gradient to?
        gathers = not there[chunk]
        if kind.direction == "forward":
            there[chunk] = not self.structure.reshard
            return step.actions.forward(gathers=gathers, first=kind.first)
        if kind.direction == "input":
            there[chunk] = there[chunk] or given
            return step.actions.backward(gathers=gathers, first=False, last=False, half="input") if given else ()
        there[chunk] = True
        half: Half = "weight" if kind.direction == "weight" and given else "whole"
        nodes = step.actions.backward(gathers=gathers, first=kind.first, last=kind.last, half=half)
        lingers, output = step.lingers
        if not (kind.first and lingers):
            return nodes
        return made.setdefault(("lingers", chunk), (Repeat(1, nodes), Repeat(1, (output,))))


def _updated(nodes: tuple[Node, ...]) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """An optimizer's nodes up to its last kernel, and what follows."""
    stop = max(i for i, node in enumerate(nodes) if isinstance(node, Compute)) + 1
    return nodes[:stop], nodes[stop:]
