"""A cluster: chips, and links in tiers. Every number is a `Quantity`: a value, whence it is, and how it is known."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanum.cluster.in_a_step import InAStep
from nanum.cluster.measured import Measured, Ramp
from nanum.cluster.quantity import Quantity, Tag

__all__ = ["Chip", "Cluster", "Host", "InAStep", "Link", "Measured", "Quantity", "Ramp", "Tag", "load"]


@dataclass(frozen=True)
class Chip:
    name: str
    peak_flops_per_second: dict[str, Quantity]  # dense, by dtype: fp32, bf16, fp16, fp8
    best_flops_per_second: dict[str, Quantity]  # the best measured matmul, by dtype, where one is known
    memory_bytes: Quantity  # what the driver reports, not the number on the box
    memory_bytes_per_second: Quantity
    multiprocessors: Quantity


@dataclass(frozen=True)
class Link:
    """One tier. `bytes_per_second` is of one direction of one GPU (its NVLink; its share of the node's NICs).

    `efficiency` is measured bus bandwidth over line rate for large messages; `group_size` the ranks it was measured at.
    """

    name: str
    bytes_per_second: Quantity
    efficiency: Quantity
    latency_seconds: Quantity  # of one hop of a ring step
    group_size: int
    ramp: Ramp | None = None  # of a link inside a node; None where no table is at hand


@dataclass(frozen=True)
class Host:
    """What a GPU has beside it: the link to its host's memory, and its share of the bytes a second that the host's
    processors read and write there, which is what an optimizer on the host is bound by.
    """

    link: Link
    memory_bytes_per_second: Quantity


@dataclass(frozen=True)
class Cluster:
    """`nodes` x `gpus_per_node` GPUs; `gpus_per_node` is one NVLink domain."""

    name: str
    nodes: int
    gpus_per_node: int
    chip: Chip
    intra_node: Link
    inter_node: Link
    assumptions: tuple[tuple[str, Quantity], ...] = field(default=())
    measured: Measured = field(default_factory=Measured)
    host: Host | None = None  # every cluster that is read has one
    launch_blocking: bool = False  # CUDA_LAUNCH_BLOCKING=1: a kernel is launched when the one before it is done
    in_a_step: InAStep | None = None  # coefficients of its own, where steps were observed on it

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why some step that was observed on it may not be what it is said to be."""
        seen = self.in_a_step.observations if self.in_a_step else ()
        return tuple(f"its step of {each.model} on {each.layout}: {doubt}" for each in seen for doubt in each.doubts)


def load(word: str) -> Cluster:
    """The cluster that `word` names: `NODESxGPUSxCHIP`, a preset, or a TOML file.

    Raises `Refused` with every reason.
    """
    from nanum.cluster import presets  # the files are read only when a cluster is asked for

    return presets.load(word)
