"""From what PyTorch allocates to what the driver sees: workspaces and the allocator's reserve, the CUDA context, and
communicators' buffers.

Each is a term with what is expected and the least and the most that was seen, so that a device's total has a range.
PyTorch counts workspaces among what is allocated; here, where that is tensors alone, they are with what is reserved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from nanum.account.traffic import Groups
from nanum.arrays import least
from nanum.units import GIB, MB, MIB

Level = Literal["low", "value", "high"]


@dataclass(frozen=True)
class Term:
    """What is added beyond tensors: the number expected, and the least and the most seen."""

    what: str
    low: float
    value: float
    high: float
    unit: str
    source: str

    def at(self, level: Level) -> float:
        return {"low": self.low, "value": self.value, "high": self.high}[level]


RESERVED = Term(
    "reserved over allocated memory", 1.03, 1.04, 1.09, "ratio",
    "SimuMax's published B200 runs: the median, least and most of 22 (FSDP1 had up to 1.5)",
)  # fmt: skip
WORKSPACES = Term(
    "matmul workspaces", 8_519_680, 64 * MIB, 128 * MIB, "bytes",
    "PyTorch's CublasHandlePool.cpp: 8.1 MiB for a handle and a stream, from Hopper on 32 MiB; forward and backward "
    "have a handle each, and at the most cuBLASLt as much again",
)  # fmt: skip
CONTEXT = Term(
    "CUDA context", 484 * MIB, int(0.55 * GIB), int(1.06e9), "bytes",
    "ml-engineering, training/performance/README.md: about 0.5 GiB of an A100; least: a process with a communicator of "
    "its own on an RTX 3090 (NCCL pull 2366); most: 8 H100 with one made (NCCL issue 1685)",
)  # fmt: skip
_COMMUNICATORS = "NCCL issue 964, 4 A100; least: what issue 1685 leaves beside a context; most: about 2 GB (issue 864)"
COMMUNICATOR = {
    2: Term("NCCL communicator of 2 ranks", 470 * MB, 544 * MB, 2000 * MB, "bytes", _COMMUNICATORS),
    3: Term("NCCL communicator of more ranks", 470 * MB, 688 * MB, 2000 * MB, "bytes", _COMMUNICATORS),
}
ALL_TO_ALL_RANKS = 8
ALL_TO_ALL = Term(
    f"NCCL's buffers of an all-to-all among {ALL_TO_ALL_RANKS} ranks or more", 0, 3280 * MB, 3280 * MB, "bytes",
    "NCCL issue 1685, 8 H100: 32 channels to each other rank, in proportion among fewer",
)  # fmt: skip


def terms(groups: Groups, sizes: Mapping[str, int]) -> list[Term]:
    """The terms that one layout's total rests on."""
    ranks = [(prod(sizes[a] for a in axes), swaps) for axes, swaps in groups]
    pairs, more = (any(low <= n <= high for n, _ in ranks) for low, high in ((2, 2), (3, float("inf"))))
    swaps = any(n > 1 and swaps for n, swaps in ranks)
    used = ((COMMUNICATOR[2], pairs), (COMMUNICATOR[3], more), (ALL_TO_ALL, swaps))
    return [RESERVED, WORKSPACES, CONTEXT, *(term for term, there in used if there)]


def reserved_bytes(allocated_bytes: Any, level: Level = "value") -> Any:
    """What the caching allocator holds of the device, ints or arrays."""
    return (allocated_bytes + int(WORKSPACES.at(level))) * round(100 * RESERVED.at(level)) // 100


def communicator_bytes(groups: Groups, sizes: Mapping[str, Any], level: Level = "value") -> Any:
    """A communicator for each group of more than one rank that exchanges something over these axes, and what it has
    beside where it swaps with all others. `sizes` of the mesh axes are ints or arrays.
    """
    total: Any = 0
    for axes, swaps in sorted(groups):
        n = prod(sizes[a] for a in axes)
        if not swaps:
            total = total + (n == 2) * int(COMMUNICATOR[2].at(level)) + (n > 2) * int(COMMUNICATOR[3].at(level))
        else:
            peers = least(n, ALL_TO_ALL_RANKS) - 1
            total = total + int(ALL_TO_ALL.at(level)) * peers // (ALL_TO_ALL_RANKS - 1)
    return total


def context_bytes(groups: Groups, sizes: Mapping[str, Any], level: Level = "value") -> Any:
    """What lies outside the allocator."""
    return int(CONTEXT.at(level)) + communicator_bytes(groups, sizes, level)
