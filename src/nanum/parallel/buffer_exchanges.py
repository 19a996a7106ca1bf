"""Exchanges of a stage's flat buffers: part by part as each is ready, or all of a stage at once.

Buckets do not end where parts do. Where there are buckets, the parts (or the whole stage) carry the bytes, and the
calls are counted apart (`parallel.buckets`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from nanum.arrays import most, where
from nanum.conventions import Conventions
from nanum.parallel.buckets import bucket_count, carried, counted
from nanum.parallel.buffer import Buffer
from nanum.parallel.chain import Chain, Each
from nanum.program import DATA_STREAM, Collective, Node, Phase


@dataclass(frozen=True, eq=False)
class BufferExchanges:
    """Of `buffers`, of what lies on one mesh each. A `share` is 0 or 1: whether a stage has the exchange."""

    chain: Chain
    conventions: Conventions
    zero: int
    buffers: tuple[Each[Buffer], ...]
    data_ranks: Any

    @property
    def bucketed(self) -> bool:
        return bool(self.conventions.bucket_elements) and self.zero < 2

    @property
    def by_parts(self) -> Any:
        """1 where buckets follow one another; only the first stage has several (distributed_data_parallel.py)."""
        return self.chain.stage.embeds if self.bucketed else 1

    def of_part(self, c: Collective | None, ticket: str, phase: Phase, share: Any = 1) -> list[Node]:
        """Start an exchange, or that `share` of it: of buckets its bytes alone."""
        if c is None:
            return []
        started = c.started(phase, DATA_STREAM, ticket, share)
        return [carried(started) if self.bucketed else started]

    def of_stage(
        self, each: Each[Buffer], which: Callable[[Buffer], Collective | None], ticket: str, phase: Phase, share: Any
    ) -> list[Node]:
        """One exchange of all that a stage has."""
        found = [(which(each[part]), times) for part, times in self.chain.counted()]
        template = found[1][0]
        if template is None or (isinstance(share, int) and not share):
            return []
        payload = sum(c.payload_bytes * times for c, times in found if c)
        wire = sum(c.wire_bytes * times for c, times in found if c)
        return self.of_part(replace(template, payload_bytes=payload, wire_bytes=wire), ticket, phase, share)

    def calls(
        self, each: Each[Buffer], template: Collective | None, ticket: str, phase: Phase, share: Any = 1
    ) -> list[Node]:
        """The calls of a whole stage's buckets, without bytes: they went with the parts."""
        if template is None or not self.bucketed or (isinstance(share, int) and not share):
            return []
        return [counted(template.started(phase, DATA_STREAM, ticket), self._bucket_count(each) * share)]

    def gather_all(self, ticket: str, phase: Phase, share: Any = 1) -> list[Node]:
        """Begin to gather all parameters of a stage."""
        nodes: list[Node] = []
        for each in self.buffers:
            nodes += self.of_stage(each, lambda b: b.gather, ticket, phase, share)
            nodes += self.calls(each, each.layers[0].gather, ticket, phase, share)
        return nodes

    def reduce_part(self, buffers: Iterable[Buffer], share: Any = 1) -> list[Node]:
        """Begin to reduce the gradients of one part."""
        exchanges = [c for b in buffers for c in b.reduce]
        return [node for c in exchanges for node in self.of_part(c, "reduce", "backward", share)]

    def reduce_all(self, share: Any = 1) -> list[Node]:
        """Begin to reduce all gradients of a stage, or that `share`, where its parts have not: the calls of buckets are
        these in either case.
        """
        nodes: list[Node] = []
        for each in self.buffers:
            for i, c in enumerate(each.layers[0].reduce):
                nodes += self.of_stage(each, lambda b, i=i: b.reduce[i], "reduce", "backward", share)  # type: ignore[misc]
                nodes += self.calls(each, c, "reduce", "backward")
        return nodes

    def _bucket_count(self, each: Each[Buffer]) -> Any:
        """Buckets of at least max(`bucket_elements`, 1e6 x data ranks) elements (Megatron's default); one bucket on a
        stage that is not the first.
        """
        stage = self.chain.stage
        least = most(self.conventions.bucket_elements, 1_000_000 * stage.take(self.data_ranks))
        least = where(stage.embeds > 0, least, 2**40)
        return bucket_count(self.chain, [each.map(lambda b: b.sizes)], least, least)
