"""How FSDP2 gathers a unit: the exchange, the copies around it, and what its buffers hold meanwhile.

A gather needs a cast of the shard, a flat output, and its copy-out, the parameters (PyTorch 2.13,
`_fsdp_collectives.py`: `foreach_all_gather`). On a GPU it is issued one unit ahead on a stream of its own, and awaited
where it is copied out; which unit is gathered while another is at work is `fully_shard`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nanum.arrays import where
from nanum.conventions import Conventions
from nanum.once import Once
from nanum.parallel.chain import copy
from nanum.parallel.on_host import shard_up
from nanum.parallel.places import Direction
from nanum.parallel.units import Unit
from nanum.program import DATA_STREAM, Held, Node, Phase, Wait


@dataclass(frozen=True, eq=False)
class UnitGather:
    """Gathers of units whose shards are on the device or, if one `offloads`, in the host's memory."""

    conventions: Conventions
    offloads: bool
    made: Once[tuple[Node, ...]]

    def _once(self, made_of: tuple[Any, ...], make: Callable[[], Iterable[Node]]) -> tuple[Node, ...]:
        """The nodes that `make` gives, the same ones for the same `made_of`: they are made, and costed, once."""
        return self.made(made_of, lambda: tuple(make()))

    @property
    def cast(self) -> str:
        """The field of a unit that says what is sent of it besides where it is stored."""
        return "sent_bytes" if self.offloads else "cast_bytes"

    def start(self, unit: Unit, direction: Direction, presence: Any = 1, ticket: str = "gather") -> Iterable[Node]:
        """Start a unit's gather: its shard is copied into the flat buffer first, in the dtype that is sent."""
        if not unit.gathers:
            return ()
        made_of = "gather", unit, direction, presence, ticket
        dtype = self.conventions.numerics.compute_dtype
        size = where(unit.gather_bytes > 0, unit.gather_bytes // unit.gathers[0].group_size, 0) * presence

        def make() -> Iterable[Node]:
            if self.offloads:
                yield shard_up(unit, self.conventions, direction, presence, ticket)
            yield copy("copy", direction, size, dtype)
            for gather in unit.gathers:
                yield gather.started(direction, DATA_STREAM, ticket, presence)

        return self._once(made_of, make)

    def flat(self, unit: Unit, presence: Any = 1) -> Iterable[Node]:
        """The gather's buffers: the shard's cast while it is sent, and the flat output."""

        def make() -> Iterable[Node]:
            cast = where(unit.gather_bytes > 0, getattr(unit, self.cast), 0) * presence
            yield Held("buffers", cast, "cast of a shard", apart=True)
            yield Held("buffers", unit.gather_bytes * presence, "gathered flat buffer", apart=True)
            if self.conventions.gather_copies:
                yield Held("buffers", unit.gather_bytes * presence, "the library's copy")
                yield Held("buffers", -unit.gather_bytes * presence)
            yield Held("buffers", -cast, apart=True)

        return self._once(("flat", unit, presence), make)

    def copy_out(self, unit: Unit, phase: Phase, released: Any, ticket: str = "gather") -> Iterable[Node]:
        """Wait for a gather, and copy its parameters out; `released` are bytes of the flat buffer before, which goes
        then.
        """

        def make() -> Iterable[Node]:
            yield Wait(DATA_STREAM, ticket)
            yield Held("params", unit.weights_bytes, "gathered parameters")
            yield copy("copy_out", phase, unit.weights_bytes, self.conventions.numerics.compute_dtype)
            yield Held("buffers", -released, apart=True)

        return self._once(("copy_out", unit, phase, released, ticket), make)

    def begin(self, unit: Unit, direction: Direction, presence: Any = 1, ticket: str = "gather") -> list[Node]:
        """Start a gather, with its buffers."""
        return [*self.start(unit, direction, presence, ticket), *self.flat(unit, presence)]

    def now(self, unit: Unit, direction: Direction) -> list[Node]:
        """All of a gather that was not begun ahead."""
        return [*self.begin(unit, direction), *self.copy_out(unit, direction, unit.gather_bytes)]

    def early(self, at_work: Unit | None, unit: Unit) -> list[tuple[Unit, Any]]:
        """Groups of `unit`, and whether (1 or 0) each is gathered while `at_work` is, the unit before it in backward:
        all, or from the last on as many as that one has (`_fsdp_param_group.py`: a group gathers one that came before
        it in forward; one alone on its mesh gathers nothing, and is not gathered). Without a unit before it, the last.
        """
        groups = unit.in_turn
        if len(groups) == 1 or self.conventions.prefetches_units:
            return [(group, 1) for group in groups]
        most_ahead: Any = 1 if at_work is None else sum(1 - group.alone for group in at_work.in_turn)
        found: list[tuple[Unit, Any]] = []
        after: Any = 0
        for group in reversed(groups):
            found.append((group, (after < most_ahead) * 1))
            after = after + 1 - group.alone
        return found[::-1]
