"""A cluster's links as exchanges that were measured have them: the efficiency and the latency by which the model of
exchanges (`account.exchanges.modelled`) gives what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from nanum.account.exchanges import in_switch, modelled
from nanum.cluster import Cluster, Link, Quantity
from nanum.cluster.measured import Exchange
from nanum.cluster.presets import load
from nanum.cluster.tables import MOST_EFFICIENCY, chip_names
from nanum.errors import Refused
from nanum.units import MIB, format_rate

Tier = Literal["intra_node", "inter_node"]
TIERS: tuple[Tier, ...] = get_args(Tier)
DIGITS = 4
"""Of a number that was measured: the rest is noise."""
TELLING = ("all_gather", "reduce_scatter", "all_reduce")
"""Kinds that tell of a link, the best first: an all-reduce may be done by a switch."""
FILLS_BYTES = 32 * MIB
"""Smaller payloads need not fill a link; nccl-tests sends this where no size is said (its README)."""
MOSTLY_WAITS = 0.5
"""Of an exchange's seconds, the most that its bytes take where it tells a latency."""


def rounded(value: float) -> float:
    """To the digits that were measured."""
    return float(f"{value:.{DIGITS}g}")


def told(cluster: Cluster, exchanges: Sequence[Exchange]) -> Cluster:
    """The cluster with the efficiency and the latency of each link that `exchanges` tell: those that fill it, and those
    so small that they hardly do but wait. What none of them tells stays as it was.

    Raises Refused where an exchange was faster than a link could be.
    """
    inside = _told(cluster, "intra_node", "inter_node", [e for e in exchanges if e.nodes == 1])
    return _told(inside, "inter_node", "intra_node", [e for e in exchanges if e.nodes > 1])


def _told(cluster: Cluster, tier: Tier, other: Tier, exchanges: Iterable[Exchange]) -> Cluster:
    best = sorted((e for e in exchanges if e.kind in TELLING), key=lambda e: (TELLING.index(e.kind), -e.ranks))
    link, beside = getattr(cluster, tier), getattr(cluster, other)
    for e in [e for e in best if e.grid.sizes[0][-1] >= FILLS_BYTES][:1]:
        full = _waiting(replace(link, efficiency=replace(link.efficiency, value=1.0)), 0.0)
        at_line_rate = _seconds(cluster, e, e.grid.sizes[0][-1], {tier: full, other: _free(beside)})
        reached = at_line_rate / e.grid.seconds[-1]
        if reached > MOST_EFFICIENCY:
            raise Refused([_faster_than_can_be(link, tier, e, reached)])
        link = replace(link, efficiency=_efficiency(cluster, e, reached), group_size=e.ranks)
    at_once = _waiting(link, 0.0)
    for e in best:
        payload, seconds = e.grid.sizes[0][0], e.grid.seconds[0]
        sends = _seconds(cluster, e, payload, {tier: at_once, other: _waiting(beside, 0.0)})
        waits = seconds - _seconds(cluster, e, payload, {tier: at_once})
        if sends <= MOSTLY_WAITS * seconds and waits > 0:
            hops = _seconds(cluster, e, 0.0, {tier: _waiting(link, 1.0), other: _free(beside)})
            link = replace(link, latency_seconds=Quantity(rounded(waits / hops), "derived", _source("smallest", e)))
            break
    return _with(cluster, {tier: link})


def _faster_than_can_be(link: Link, tier: Tier, e: Exchange, reached: float) -> str:
    rate = f"the {format_rate(link.bytes_per_second.value)} that {link.name} is taken to have for a GPU"
    return (
        f"the {_source('largest', e)} went at {reached:.3g} times {rate}: "
        f"say what it has, as bandwidth in [{tier}] of a file for --cluster, or look whether the log is of such nodes"
    )


def _efficiency(cluster: Cluster, e: Exchange, reached: float) -> Quantity:
    """Of a link of which an exchange, if it goes round a ring, reached this share. What a switch adds of an all-reduce
    inside a node is no ring's, nor any other collective's: where the shipped table of the chip knows it, an all-reduce
    nearer to the switch's than to the ring's is taken for the switch's; and where it does not, no ring goes beyond the
    line rate.
    """
    source = _source("largest", e)
    if e.kind != "all_reduce" or e.nodes > 1:
        return Quantity(rounded(reached), "measured", source)
    ring, faster = _ring_and_switch(cluster, e.ranks)
    if reached > ring * math.sqrt(faster) and faster > 1:
        source = f"{source}, over {faster:g}: the switch added (as of the chip's own table), and a ring has the rest"
        return Quantity(rounded(min(reached / faster, 1.0)), "derived", source)
    if reached > 1:
        return Quantity(1.0, "derived", f"{source}: the switch added, and a ring has the line rate at most")
    return Quantity(rounded(reached), "measured", source)


def _ring_and_switch(cluster: Cluster, ranks: int) -> tuple[float, float]:
    """The efficiency of a chip's own link around a ring, and by how much its switch makes an all-reduce faster, as the
    shipped table has them; of another link 1 and 1.
    """
    if cluster.chip.name not in chip_names():
        return 1.0, 1.0
    shipped, own = load(f"1x1x{cluster.chip.name}").intra_node, cluster.intra_node
    if (
        shipped.ramp is None
        or not shipped.ramp.in_switch
        or shipped.bytes_per_second.value != own.bytes_per_second.value
    ):
        return 1.0, 1.0
    return shipped.efficiency.value, float(in_switch(shipped.ramp, np.float64(ranks)))


def _seconds(cluster: Cluster, e: Exchange, payload: float, links: Mapping[Tier, Link]) -> float:
    """What the model says of such an exchange, with these links in place of the cluster's. What a switch adds is left
    out: whether it did is not known.
    """
    asked = _with(cluster, links)
    asked = _with(asked, {tier: replace(getattr(asked, tier), ramp=None) for tier in TIERS})
    members = -(-e.ranks // e.nodes)
    return float(modelled(asked, e.kind, np.float64(payload), 1, members, e.nodes, e.ranks))


def _with(cluster: Cluster, links: Mapping[Tier, Link]) -> Cluster:
    intra_node, inter_node = (links.get(tier, getattr(cluster, tier)) for tier in TIERS)
    return replace(cluster, intra_node=intra_node, inter_node=inter_node)


def _waiting(link: Link, hop_seconds: float) -> Link:
    return replace(link, latency_seconds=replace(link.latency_seconds, value=hop_seconds))


def _free(link: Link) -> Link:
    return replace(_waiting(link, 0.0), bytes_per_second=replace(link.bytes_per_second, value=math.inf))


def _source(which: str, e: Exchange) -> str:
    return f"{which} {e.kind} of {e.grid.source}"
