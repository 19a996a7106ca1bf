"""Where the ranks of a group sit on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nanum.program import Quantity


@dataclass(frozen=True, eq=False)
class Placement:
    """Where a group sits: on `nodes` nodes, `members` of its ranks on each."""

    members: Quantity
    nodes: Quantity


def place(runs: Sequence[tuple[Quantity, Quantity]], gpus_per_node: int, world: Quantity) -> Placement:
    """Where the ranks 0 + sum of i * stride sit, for `runs` of (stride, size), outermost first.

    `members` counts exactly those that share a node with rank 0, whose node is never less full than another. A stride
    is at least the extent of the runs inside it, so offsets grow in the order of their coordinates, and the count is
    read off digit by digit. `nodes` is what a group spans if every node holds that many. Where groups fit a node but do
    not tile it, one of them straddles two; the slowest sets the pace, so all are taken to have one rank on each side.
    """
    size: Quantity = 1
    period: Quantity = 1
    for stride, count in runs:
        size = size * count
        period = np.maximum(period, stride * count * (count > 1))
    room: Quantity = gpus_per_node - 1
    inside, members, still = size, 0, 1  # `still` is 1 while the edge of the node cuts through the block being counted
    for stride, count in runs:
        inside = inside // count
        whole = room // stride
        members = members + still * inside * np.minimum(whole, count)
        room, still = room - whole * stride, still * (whole < count)
    members = members + still
    nodes = -(-size // members)
    straddles = (size > 1) & (nodes == 1) & (world > gpus_per_node) & (gpus_per_node % period != 0)
    return Placement(np.where(straddles, 1, members), np.where(straddles, 2, nodes))
