"""The collectives, and what a ring costs in bytes and in steps. Sizes are ints, or int64 arrays over many layouts.

A payload is counted by the convention of nccl-tests (doc/PERFORMANCE.md): the whole buffer of a gather or a scatter,
one rank's buffer of everything else. A ring of n ranks cuts it into n pieces: a reduce-scatter or an all-gather passes
n-1 of them on, an all-reduce is one after the other (Patarasuk and Yuan, 2009).
"""

from __future__ import annotations

from typing import Any

import numpy as np

Size = Any  # int, or np.ndarray of int64

PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""How often the pieces of a buffer travel round the ring."""

WHOLE = ("send", "permute", "broadcast")
"""Kinds by which a rank passes its whole buffer on."""

KINDS = (*PASSES, *WHOLE)


def wire_bytes(kind: str, payload_bytes: Size, group_size: Size) -> Size:
    """Bytes that one rank sends, rounded down where the group does not divide the payload; none in a group of one.

    Raises:
        ValueError: the kind is not one of `KINDS`.
    """
    if kind in PASSES:
        return payload_bytes * (PASSES[kind] * (group_size - 1)) // group_size
    if kind in WHOLE:
        return payload_bytes * (group_size > 1)
    raise ValueError(f"{kind} is not a collective: {', '.join(KINDS)}")


def ring_steps(kind: str, group_size: Size) -> Size:
    """Hops that follow one another, each of which pays a link's latency once; none in a group of one.

    Raises:
        ValueError: the kind is not one of `KINDS`.
    """
    if kind in PASSES:
        return PASSES[kind] * (group_size - 1)
    if kind == "broadcast":
        return group_size - 1
    if kind in WHOLE:
        return 1 * (group_size > 1)
    raise ValueError(f"{kind} is not a collective: {', '.join(KINDS)}")


def node_steps(kind: str, nodes: Size) -> Size:
    """Hops between nodes that follow one another: of an all-reduce the depth of a tree, once up and once down, of
    gathers and scatters all nodes of a ring.

    NCCL has trees for all-reduce (since 2.4), and for gathers and scatters only where each node has one rank (PAT,
    since 2.23). An all-to-all's messages go straight, and are many; it is taken to pay for as many as a tree is deep.

    Raises:
        ValueError: the kind is not one of `KINDS`.
    """
    if kind in ("send", "permute"):
        return 1 * (nodes > 1)
    if kind in ("all_gather", "reduce_scatter", "broadcast"):
        return nodes - 1
    if kind in KINDS:
        return PASSES.get(kind, 1) * np.ceil(np.log2(nodes)).astype(int)
    raise ValueError(f"{kind} is not a collective: {', '.join(KINDS)}")
