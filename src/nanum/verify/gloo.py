"""Bytes that gloo's own algorithms bring to a rank, which are not always those of an ideal ring.

Read at PyTorch 2.13 (ProcessGroupGloo.cpp) and the gloo that it carries: an all-reduce and an all-gather go round a
ring; a reduce-scatter is an all-reduce of the whole input, of which each rank keeps its part; a broadcast goes down a
binomial tree. A group of one rank sends nothing.
"""

from __future__ import annotations

from nanum.collectives import wire_bytes

ALGORITHM = "gloo: ring all-reduce and all-gather, a reduce-scatter is an all-reduce, binomial broadcast"
HEADER_BYTES = 128
"""More than what gloo adds to a message: its own header and TCP's acknowledgements of connections."""


def received_bytes(kind: str, payload_bytes: int, group_size: int) -> float:
    """Bytes of `payload_bytes` in all calls that a rank receives, averaged over the group where ranks differ."""
    if kind == "reduce_scatter":
        kind = "all_reduce"
    if kind == "broadcast":  # all but the root
        return payload_bytes * (group_size - 1) / group_size
    return float(wire_bytes(kind, payload_bytes, group_size))


def messages(kind: str, calls: int, group_size: int) -> int:
    """Messages that `calls` exchanges bring to a rank: a ring cuts each block in two, and goes round twice where it
    adds up; what is received is announced to the sender, and so a message too.
    """
    blocks = {"send": 1, "permute": 1, "broadcast": 1, "all_to_all": group_size - 1}
    return 2 * calls * blocks.get(kind, 2 * (group_size - 1))
