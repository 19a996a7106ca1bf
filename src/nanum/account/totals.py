"""Seconds that a Program's nodes keep each stream busy, whatever waits for whatever: sums, cheap enough for a million
layouts.

No action ends before its compute stream has done all its kernels and blocking exchanges, nor before a stream that it
awaits has done all of its own: the larger of the two is a bound below its exact time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from nanum.account.cost import Cost
from nanum.arrays import most, take
from nanum.once import Once
from nanum.program import AWAITED_STREAMS, CONTEXT_STREAM, EXPERTS_STREAM, Collective, Compute, Node, Repeat


@dataclass(frozen=True, eq=False)
class Totals:
    compute: Any = 0.0  # kernels, what streams steal of their time, and exchanges that the compute waits for at once
    streamed: Any = 0.0  # exchanges on the stream that is awaited, but for a ring's
    host: Any = 0.0  # of the host, to launch the kernels

    @property
    def least(self) -> Any:
        """No action is done before, whatever streams do."""
        return most(self.compute, self.host)

    @property
    def bound(self) -> Any:
        return most(self.least, self.streamed)


def totals(nodes: tuple[Node, ...], cost: Cost, bodies: Cost, known: Once[Totals]) -> Totals:
    """Sums over nodes, repeats counted. `bodies` is the cost inside repeats whose body is in a space of its own;
    `known` remembers the bodies that programs of one cost share.
    """
    return known((nodes, cost), partial(_totals, nodes, cost, bodies, known))


def _totals(nodes: tuple[Node, ...], cost: Cost, bodies: Cost, known: Once[Totals]) -> Totals:
    compute: Any = 0.0
    streamed: Any = 0.0
    host: Any = 0.0
    for node in nodes:
        if isinstance(node, Compute):
            compute = compute + cost.compute_seconds(node)
            host = host + cost.host_seconds(node)
        elif isinstance(node, Collective):
            stream = cost.stream(node)
            if stream is None:
                compute = compute + cost.blocking_seconds(node)
            elif stream in AWAITED_STREAMS:
                if stream not in (CONTEXT_STREAM, EXPERTS_STREAM):  # beside the others: their sum would be no bound
                    streamed = streamed + cost.streamed_seconds(node)
                compute = compute + cost.stolen_seconds(node)
        elif isinstance(node, Repeat):
            body = _round(node, cost, bodies, known)
            compute = compute + node.count * body.compute
            streamed = streamed + node.count * body.streamed
            host = host + node.count * body.host
    return Totals(compute, streamed, host)


def _round(node: Repeat, cost: Cost, bodies: Cost, known: Once[Totals]) -> Totals:
    """One round of a repeat, in the space of `cost`."""
    if node.at is None:
        return totals(node.body, cost, bodies, known)
    body = totals(node.body, bodies, bodies, known)
    parts = (body.compute, body.streamed, body.host)
    return known((body, node.at), lambda: Totals(*(take(q, node.at) for q in parts)))
