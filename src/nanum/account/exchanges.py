"""Seconds of an exchange: latency and bandwidth by tier, put right by what was measured of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from nanum.cluster import Cluster, Link, Ramp
from nanum.cluster.measured import Exchange, Grid
from nanum.collectives import node_steps, ring_steps, wire_bytes
from nanum.program import Quantity

NEIGHBOUR = ("send", "permute")
"""Kinds that go from one rank to the next, over one link; in a group on several nodes, some next rank is elsewhere."""

RINGS = ("all_gather", "reduce_scatter", "broadcast")
"""Kinds that go round one ring of all ranks in NCCL, however these sit: each link passes on all but one rank's part, so
that nccl-tests' bus bandwidth is the slowest link's (its PERFORMANCE.md); trees across nodes are an all-reduce's
(graph/tuning.cc)."""

MEASURED_AS: Mapping[str, str] = {"permute": "send"}
"""Kinds that are measured under another's name."""


def modelled(
    cluster: Cluster, kind: str, payload: Quantity, calls: Quantity, members: Quantity, nodes: Quantity, size: Quantity
) -> Quantity:
    """Seconds of `calls` exchanges that carry `payload` bytes together, in a group of `size` ranks, `members` of them
    on each of `nodes` nodes.

    Alpha-beta by tier. Each of a node's k ranks carries 1/k of what leaves the node, while the ranks of the node share
    theirs over the inner link; both run at once (NCCL's channels do). An all-reduce across nodes is hierarchical: sums
    of a node leave it once; its small messages go round the ring of a node and through a tree of nodes. A gather or a
    scatter is one ring of all ranks (`RINGS`). An all-to-all sends each piece straight to its rank. Inside a node a
    switch that adds makes an all-reduce faster than its ring.

    Raises:
        ValueError: the kind is unknown.
    """
    inner, outer = cluster.intra_node, cluster.inter_node
    hops_within, hops_between = ring_steps(kind, members), node_steps(kind, nodes)
    within, between = wire_bytes(kind, payload, members), wire_bytes(kind, payload, nodes)
    if kind == "all_to_all":
        within, between = payload * (members - 1) / size, payload * (size - members) / size
    elif kind in NEIGHBOUR:
        within, hops_within = within * (nodes == 1), hops_within * (nodes == 1)
    elif kind in RINGS:
        between = wire_bytes(kind, payload, size) * (nodes > 1) / members
        hops_within = size - nodes
    else:
        between = between / members
    if kind == "all_reduce" and inner.ramp and inner.ramp.in_switch:
        within = within / np.where(nodes == 1, _in_switch(inner.ramp, size), 1.0)
    one_way = np.maximum(within / _bandwidth(inner), between / _bandwidth(outer))
    latency = hops_within * inner.latency_seconds.value + hops_between * outer.latency_seconds.value
    return calls * latency + one_way


def _bandwidth(link: Link) -> float:
    return link.bytes_per_second.value * link.efficiency.value


def _in_switch(ramp: Ramp, size: Quantity) -> Quantity:
    """Bus bandwidth of an all-reduce over a ring's, between the sizes of groups that were measured, and as at the
    nearest of them beyond; the smallest is a ring's.
    """
    ranks, faster = np.array(ramp.in_switch).T
    return np.interp(size, ranks, faster)


@dataclass(frozen=True, eq=False)
class Corrections:
    """By how much exchanges take longer than `modelled` says.

    Inside a node by the ramp of its link, which is an all-reduce's and taken for that of other collectives. Where
    exchanges of a kind were measured on the cluster, by those beside: the logarithm of that ratio is linear in the
    logarithms of a call's bytes and of the ranks, between what was measured inside a node, and between what was
    measured across nodes; beyond it, the ratio at its edge holds. So a measured point is met exactly, and what lies
    outside follows the model from the nearest one.
    """

    cluster: Cluster
    used: dict[str, Grid] = field(default_factory=dict)  # by what a person calls it
    _ratios: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def factor(
        self, kind: str, bytes_of_call: Quantity, size: Quantity, nodes: Quantity, inside: Quantity, outside: Quantity
    ) -> Quantity:
        """What `modelled` is to be multiplied by: `inside` a node, and by how its link is filled, or across nodes
        (`outside`), where nothing of the kind was measured.
        """
        here = [e for e in self.cluster.measured.exchanges if e.kind == MEASURED_AS.get(kind, kind)]
        if (within := [e for e in here if e.nodes == 1]) and np.any(nodes == 1):
            inside = self._over_ranks(within, bytes_of_call, size)
        if (across := [e for e in here if e.nodes > 1]) and np.any(nodes > 1):
            outside = self._over_ranks(across, bytes_of_call, size)
        return np.where(nodes > 1, outside, inside * self._excess(kind, bytes_of_call))

    def _excess(self, kind: str, bytes_of_call: Quantity) -> Quantity:
        """Of a call inside a node, over `modelled`: by the ramp of its link."""
        ramp = self.cluster.intra_node.ramp
        if ramp is None or kind in NEIGHBOUR:
            return 1.0
        if id(ramp) not in self._ratios:
            self._ratios[id(ramp)] = np.log(ramp.payload_bytes), np.array(ramp.excess)
        return np.interp(np.log(np.maximum(bytes_of_call, 1)), *self._ratios[id(ramp)])

    def _over_ranks(self, measured: list[Exchange], bytes_of_call: Quantity, size: Quantity) -> Quantity:
        by_ranks = {e.ranks: e for e in sorted(measured, key=lambda e: (e.ranks, -e.nodes))}
        logs = {ranks: self._log_ratio(e, bytes_of_call) for ranks, e in by_ranks.items()}
        smallest, *others = by_ranks
        total, below = logs[smallest], smallest
        for ranks in others:
            share = np.clip(np.log(np.maximum(size, 1) / below) / np.log(ranks / below), 0.0, 1.0)
            total = total + share * (logs[ranks] - logs[below])
            below = ranks
        return np.exp(total)

    def _log_ratio(self, exchange: Exchange, bytes_of_call: Quantity) -> Quantity:
        grid = exchange.grid
        self.used[f"{exchange.kind}, {exchange.ranks} ranks on {exchange.nodes} nodes"] = grid
        if id(exchange) not in self._ratios:
            sizes = np.array(grid.sizes[0])
            nodes, ranks = exchange.nodes, exchange.ranks
            expected = modelled(self.cluster, exchange.kind, sizes, 1, -(-ranks // nodes), nodes, ranks)
            if nodes == 1:
                expected = expected * self._excess(exchange.kind, sizes)
            self._ratios[id(exchange)] = np.log(sizes), np.log(np.array(grid.seconds) / expected)
        return np.interp(np.log(np.maximum(bytes_of_call, 1)), *self._ratios[id(exchange)])
