"""From what PyTorch allocates to what the driver sees: the allocator's reserve, the CUDA context, and communicators'
buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from nanum.units import GIB, MB

RESERVED_PERCENT = 104
"""Median of 22 published runs that state both (SimuMax's B200 runs; 1.03 to 1.09)."""
CONTEXT_BYTES = int(0.55 * GIB)
"""A CUDA context (ml-engineering, training/performance: about 0.5 GiB of an A100)."""
COMMUNICATOR_BYTES = {2: 544 * MB, 3: 688 * MB}
"""One NCCL communicator of two ranks, and of more, on 4 A100 (NCCL issue 964)."""


@dataclass(frozen=True)
class Assumed:
    what: str
    value: float
    unit: str
    source: str


ASSUMED = (
    Assumed(
        "reserved over allocated memory",
        RESERVED_PERCENT / 100,
        "ratio",
        "median of SimuMax's published B200 runs, 1.03 to 1.09",
    ),
    Assumed("CUDA context", CONTEXT_BYTES, "bytes", "ml-engineering, training/performance/README.md"),
    Assumed("NCCL communicator of 2 ranks", COMMUNICATOR_BYTES[2], "bytes", "NCCL issue 964, 4 A100"),
    Assumed("NCCL communicator of more ranks", COMMUNICATOR_BYTES[3], "bytes", "NCCL issue 964, 4 A100"),
)


def reserved_bytes(allocated_bytes: Any) -> Any:
    """What the caching allocator holds of the device, ints or arrays."""
    return allocated_bytes * RESERVED_PERCENT // 100


def context_bytes(axes: Iterable[tuple[str, ...]], sizes: Mapping[str, Any]) -> Any:
    """The context, and a communicator for each group of more than one rank that exchanges something over these axes.

    `sizes` of the mesh axes are ints or arrays.
    """
    total: Any = CONTEXT_BYTES
    for n in (prod(sizes[a] for a in group) for group in sorted(axes)):
        total = total + (n == 2) * COMMUNICATOR_BYTES[2] + (n > 2) * COMMUNICATOR_BYTES[3]
    return total
