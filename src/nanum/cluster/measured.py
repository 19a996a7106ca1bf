"""What was measured of a cluster: seconds of kernels and exchanges over grids of sizes, and ratios beside them.

All of it may be missing. What is there stands above what a chip's and a link's few numbers would give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from nanum.cluster.quantity import Quantity, Tag


@dataclass(frozen=True)
class Grid:
    """Seconds at each point of a grid of sizes: the median of `repeats` samples, and their 10th and 90th percentile.

    Points are in row-major order: the last axis varies fastest.
    """

    axes: tuple[str, ...]
    sizes: tuple[tuple[float, ...], ...]  # of each axis, ascending
    seconds: tuple[float, ...]
    low_seconds: tuple[float, ...]
    high_seconds: tuple[float, ...]
    repeats: int
    tag: Tag
    source: str

    @property
    def points(self) -> int:
        return prod(map(len, self.sizes))


@dataclass(frozen=True)
class Sweep:
    """Seconds of an all-reduce of `ranks` devices inside a node, by `payload_bytes` of a call, ascending."""

    ranks: int
    payload_bytes: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Ramp(Sweep):
    """How exchanges fill a link inside a node (`account.ramps`): a sweep from a message that is all latency to one that
    is all bandwidth, and `finer` ones, maybe of other ranks, that stand above it between their sizes. `in_switch` are
    bus bandwidths of an all-reduce that the switch adds up over those of a ring, by ranks; empty where it does not.
    """

    finer: tuple[Sweep, ...]
    in_switch: tuple[tuple[int, float], ...]
    tag: Tag
    source: str

    @property
    def points(self) -> int:
        return sum(len(sweep.seconds) for sweep in (self, *self.finer))


@dataclass(frozen=True)
class Exchange:
    """One kind of exchange in a group of `ranks` on `nodes` nodes. The grid's axis is the payload of a call, in bytes
    by the convention of nccl-tests (`nanum.collectives`).
    """

    kind: str
    ranks: int
    nodes: int
    grid: Grid


@dataclass(frozen=True)
class Beside:
    """How much longer compute and exchanges of `ranks` devices take beside each other than alone (1: no longer)."""

    ranks: int
    compute: Quantity
    exchange: Quantity


@dataclass(frozen=True)
class Together:
    """How much longer each subject takes when `ranks` devices of a node are at it at once than when one is alone."""

    ranks: int
    ratios: Mapping[str, Quantity]  # by subject: matmul, kernel, attention, optimizer


@dataclass(frozen=True)
class Framework:
    """Seconds of the host's own work beside kernels and exchanges, which a device that is its own host waits for: what
    steps of a tiny model take beyond what is measured apart. None where it was not measured.
    """

    parameter: Quantity | None = None  # an optimizer's, for each parameter
    sharded_parameter: Quantity | None = None  # the same, for each DTensor
    unit: Quantity | None = None  # FSDP2's, for each gather or reduction of a unit
    bucket: Quantity | None = None  # DDP's, for each bucket
    redistribution: Quantity | None = None  # DTensor's, for each exchange of activations, and operations around it


@dataclass(frozen=True)
class Measured:
    matmul: Mapping[tuple[str, str], Grid] = field(default_factory=dict)  # by dtype and order of operands; m, n, k
    kernel: Mapping[tuple[str, str], Grid] = field(default_factory=dict)  # by dtype and name; bytes read and written
    attention: Mapping[tuple[str, str], Grid] = field(default_factory=dict)  # by dtype, direction; rows, seq_len, head
    optimizer: Mapping[str, Grid] = field(default_factory=dict)  # by its dtype; bytes read and written
    exchanges: tuple[Exchange, ...] = ()
    operation_seconds: Quantity | None = None  # no operation is shorter
    beside: Beside | None = None
    together: Together | None = None
    framework: Framework = field(default_factory=Framework)
    streams: bool = True  # has the device streams of its own, so that an engine's exchanges run beside its compute?

    @property
    def kernels(self) -> bool:
        """Was any kernel measured?"""
        return bool(self.matmul or self.kernel or self.attention or self.optimizer)

    def __bool__(self) -> bool:
        return self != Measured()
