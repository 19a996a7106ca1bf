"""Seconds of an exchange: latency and bandwidth by tier, put right by what was measured of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from nanum.account import ramps
from nanum.cluster import Cluster, Link, Ramp
from nanum.cluster import Quantity as Stated
from nanum.cluster.measured import Exchange, Grid
from nanum.collectives import node_steps, ring_steps, wire_bytes
from nanum.program import Quantity

NEIGHBOUR = ("send", "permute")
"""Kinds that go from one rank to the next, over one link; in a group on several nodes, some next rank is elsewhere."""

MEASURED_AS: Mapping[str, str] = {"permute": "send"}
"""Kinds that are measured under another's name."""

TREE_OVER_RING = Stated(
    0.62,
    "derived",
    "2 nodes of 8 A100 with 50 GB/s each reached bus bandwidths of 53.95 and 57.06 GB/s (NCCL 2.9.9 and 2.10.3; "
    "github.com/NVIDIA/nccl/issues/837), of which a tree sends 8/15 out of each node: 0.575 and 0.609 of 50 GB/s; "
    "rings, 0.955 (aws-p6-b200-32)",
)
"""What leaves a node in a second through a tree of nodes, over what does around a ring."""


def modelled(
    cluster: Cluster, kind: str, payload: Quantity, calls: Quantity, members: Quantity, nodes: Quantity, size: Quantity
) -> Quantity:
    """Seconds of `calls` exchanges that carry `payload` bytes together, in a group of `size` ranks, `members` of them
    on each of `nodes` nodes.

    Alpha-beta by tier. Each of a node's k ranks carries 1/k of what leaves the node, while the inner link carries its
    own; both run at once (NCCL's channels do). Collectives go round one ring of all ranks, however these sit: each link
    passes on all but one rank's part, so that nccl-tests' bus bandwidth is the slowest link's (its PERFORMANCE.md). An
    all-reduce across nodes may go through a tree of nodes instead, which is faster where messages are small, or nodes
    are two (NCCL's graph/tuning.cc; github.com/NVIDIA/nccl/issues/946): the faster of both. An all-to-all sends each
    piece straight to its rank. Inside a node a switch that adds makes an all-reduce faster than its ring.

    Raises:
        ValueError: the kind is unknown.
    """
    within, between = wire_bytes(kind, payload, size), _leaving(kind, payload, members, nodes, size)
    hops_between = node_steps(kind, nodes)
    hops_within = ring_steps(kind, size) - ring_steps(kind, nodes)
    if kind == "all_to_all":
        hops_within, within = ring_steps(kind, members), payload * (members - 1) / size
    elif kind in NEIGHBOUR:
        within = within * (nodes == 1)
    elif kind == "all_reduce":
        if (ramp := cluster.intra_node.ramp) and ramp.in_switch:
            within = within / np.where(nodes == 1, in_switch(ramp, size), 1.0)
        ring = _seconds(cluster, calls, (hops_within, ring_steps(kind, nodes)), (within, between))
        hops_within, within = ring_steps(kind, members), wire_bytes(kind, payload, members)
        tree = _seconds(cluster, calls, (hops_within, hops_between), (within, _of_tree(payload, members, nodes)))
        return np.where(nodes > 1, np.minimum(ring, tree), ring)
    return _seconds(cluster, calls, (hops_within, hops_between), (within, between))


def _leaving(kind: str, payload: Quantity, members: Quantity, nodes: Quantity, size: Quantity) -> Quantity:
    """Bytes that leave a node by the link of each of its `members` ranks, around a ring of all; none of one node."""
    if kind == "all_to_all":
        return payload * (size - members) / size
    return wire_bytes(kind, payload, size) * (nodes > 1) / (1 if kind in NEIGHBOUR else members)


def _of_tree(payload: Quantity, members: Quantity, nodes: Quantity) -> Quantity:
    """Bytes that a ring would send in the time of a tree, of an all-reduce."""
    return wire_bytes("all_reduce", payload, nodes) / members / TREE_OVER_RING.value


def _seconds(
    cluster: Cluster, calls: Quantity, hops: tuple[Quantity, Quantity], wire: tuple[Quantity, Quantity]
) -> Quantity:
    """Of hops that follow one another in each call, and of bytes on a rank's wire: within a node, and between nodes."""
    inner, outer = cluster.intra_node, cluster.inter_node
    latency = hops[0] * inner.latency_seconds.value + hops[1] * outer.latency_seconds.value
    return calls * latency + np.maximum(wire[0] / _bandwidth(inner), wire[1] / _bandwidth(outer))


def _bandwidth(link: Link) -> float:
    return link.bytes_per_second.value * link.efficiency.value


def in_switch(ramp: Ramp, size: Quantity) -> Quantity:
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
    _curves: dict[int, ramps.Curve] = field(default_factory=dict)  # by identity of an exchange
    _ramps: dict[int, Mapping[int, ramps.Curve]] = field(default_factory=dict)  # and of a ramp

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
        return np.where(nodes > 1, outside, inside * self._excess(kind, bytes_of_call, size))

    def _excess(self, kind: str, bytes_of_call: Quantity, size: Quantity) -> Quantity:
        """Of a call inside a node, over `modelled`: by the ramp of its link."""
        ramp = self.cluster.intra_node.ramp
        if ramp is None or kind in NEIGHBOUR:
            return 1.0
        if id(ramp) not in self._ramps:
            self._ramps[id(ramp)] = ramps.excess(ramp)
        return ramps.at(self._ramps[id(ramp)], bytes_of_call, size)

    def _over_ranks(self, measured: list[Exchange], bytes_of_call: Quantity, size: Quantity) -> Quantity:
        by_ranks = {e.ranks: e for e in sorted(measured, key=lambda e: (e.ranks, -e.nodes))}
        return ramps.at({ranks: self._curve(e) for ranks, e in by_ranks.items()}, bytes_of_call, size)

    def _curve(self, exchange: Exchange) -> ramps.Curve:
        grid = exchange.grid
        self.used[f"{exchange.kind}, {exchange.ranks} ranks on {exchange.nodes} nodes"] = grid
        if id(exchange) not in self._curves:
            sizes = np.array(grid.sizes[0])
            nodes, ranks = exchange.nodes, exchange.ranks
            expected = modelled(self.cluster, exchange.kind, sizes, 1, -(-ranks // nodes), nodes, ranks)
            if nodes == 1:
                expected = expected * self._excess(exchange.kind, sizes, ranks)
            self._curves[id(exchange)] = np.log(sizes), np.log(np.array(grid.seconds) / expected)
        return self._curves[id(exchange)]
