"""A layout: how many ways each mesh axis divides the work, in which rank order, and what is done about memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first: the default rank order (the last one varies fastest, so its ranks are neighbours)."""

Schedule = Literal["gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zbv", "dualpipev"]
ONE_CHUNK: tuple[Schedule, ...] = ("gpipe", "1f1b")
"""Schedules of which a rank holds one stage; of all others it holds several, its virtual stages."""
V_SHAPED: tuple[Schedule, ...] = ("zbv", "dualpipev")
"""Schedules of two stages a rank, of which the second go back up the ranks: the first rank holds both ends."""
Recompute = Literal["none", "selective", "full"]
TensorParallel = Literal["none", "tensor", "sequence"]
ContextParallel = Literal["none", "ring", "allgather", "ulysses"]
GradSync = Literal["each", "last"]


@dataclass(frozen=True)
class Structure:
    """What an emitter may branch on. Layouts of one structure are emitted and read together, as arrays."""

    zero: int = 3
    reshard: bool = True
    tensor: TensorParallel = "none"  # tp = 1; tp > 1 without, and with sequence parallel
    recompute: Recompute = "none"
    schedule: Schedule = "1f1b"
    pipelined: bool = False  # pp > 1
    attention: Literal["flash", "eager"] = "flash"
    compile: bool = False
    virtual_stages: int = 1  # chunks of one pipeline rank
    cp_kind: ContextParallel = "none"  # none where cp = 1
    grad_sync: GradSync = "each"  # gradients are reduced over data ranks in each micro-batch, or in the last alone


@dataclass(frozen=True)
class Layout:
    """One layout. A size is an int; `plan` holds the same fields as arrays over many layouts of one structure."""

    dp_replicate: Any = 1
    dp_shard: Any = 1
    cp: Any = 1
    tp: Any = 1
    pp: Any = 1
    micro_batch_size: Any = 1
    structure: Structure = field(default_factory=Structure)
    rank_order: tuple[str, ...] = AXES

    @property
    def sizes(self) -> dict[str, Any]:
        return {axis: getattr(self, axis) for axis in self.rank_order}

    def place(self, rank: int) -> dict[str, int]:
        """A rank's index along each axis, of one layout."""
        found, stride = {}, self.world
        for axis, size in self.sizes.items():
            stride //= size
            found[axis] = rank // stride % size
        return found

    @property
    def world(self) -> Any:
        return prod(self.sizes.values())

    @property
    def data_ranks(self) -> Any:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard
