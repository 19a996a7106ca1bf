"""The same machine with more or fewer GPUs, and what becomes of a layout and of a batch there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from nanum.cluster import Cluster
from nanum.errors import Refused
from nanum.job import Job
from nanum.layout import AXES, Layout
from nanum.units import LARGEST

Grows = Literal["dp_replicate", "dp_shard"]
"""The axis of data parallelism that takes the GPUs that are added."""
Form = Literal["strong", "weak"]
"""The same batch for any number of GPUs, or one that grows with them."""
NOT_NODES = "the GPUs are not whole nodes"
FORMS: tuple[Form, ...] = ("strong", "weak")


def cluster_of(cluster: Cluster, gpus: int) -> Cluster:
    """The same machine with so many GPUs: a part of one node, or whole nodes, be they more than it has.

    Raises Refused where they are neither.
    """
    per_node = cluster.gpus_per_node
    if gpus <= per_node:
        return replace(cluster, nodes=1, gpus_per_node=gpus)
    if gpus % per_node:
        raise Refused(f"{NOT_NODES} of {per_node}")
    return replace(cluster, nodes=gpus // per_node)


def doubling(cluster: Cluster, held: int) -> tuple[int, ...]:
    """Counts of GPUs up to the cluster's, ascending: each the largest of at most half the next that is whole nodes, or
    a part of one, and a multiple of `held` ranks.
    """
    counts = [cluster.gpus]
    while half := _largest(cluster.gpus_per_node, held, counts[-1] // 2):
        counts.append(half)
    return tuple(reversed(counts))


def _largest(per_node: int, held: int, most: int) -> int:
    """The largest such count of at most `most`; 0 where there is none."""
    for gpus in range(most // held * held, 0, -held):
        if gpus <= per_node or gpus % per_node == 0:
            return gpus
    return 0


@dataclass(frozen=True)
class Growth:
    """A layout of which one axis of data parallelism grows and all else is held. `held` has 1 for the axis that grows;
    its other sizes must be whole numbers of at least 1.
    """

    held: Layout
    axis: Grows

    @classmethod
    def of(cls, layout: Layout, axis: Grows | None = None) -> Growth:
        """By default the copies grow where there are several or nothing is sharded, else the ranks that shard."""
        copies = layout.dp_replicate > 1 or layout.structure.zero == 0
        axis = axis or ("dp_replicate" if copies else "dp_shard")
        held = replace(layout, dp_replicate=1) if axis == "dp_replicate" else replace(layout, dp_shard=1)
        return cls(held, axis)

    def on(self, gpus: int) -> Layout:
        """The layout on so many GPUs. Raises Refused where the axes that are held do not divide them."""
        ranks, left = divmod(gpus, int(self.held.world))
        if left:
            sizes = [(name, getattr(self.held, name)) for name in AXES if getattr(self.held, name) > 1]
            product = " · ".join(f"{name} {size}" for name, size in sizes)
            whole = f" = {self.held.world}" if len(sizes) > 1 else ""
            raise Refused(f"{product}{whole} ranks do not divide the GPUs")
        if self.axis == "dp_replicate":
            return replace(self.held, dp_replicate=ranks)
        return replace(self.held, dp_shard=ranks)

    def most_gpus(self, global_batch_size: int) -> int:
        """How many GPUs a batch can be divided among: each data-parallel rank has one micro-batch then."""
        alike = int(self.held.dp_replicate * self.held.dp_shard)  # of the axis of both that does not grow
        return int(self.held.world) * (global_batch_size // int(self.held.micro_batch_size) // alike)


def job_of(job: Job, cluster: Cluster, gpus: int, form: Form) -> Job:
    """The job on so many GPUs: the same or, in the weak form, with as many sequences a GPU as on the whole cluster.

    Raises Refused where that is no whole number of sequences, or one beyond any job.
    """
    if form == "strong":
        return job
    batch, rest = divmod(job.global_batch_size * gpus, cluster.gpus)
    as_many = f"as many a GPU as {job.global_batch_size:,} sequences on {cluster.gpus:,} GPUs are"
    if rest:
        raise Refused(f"{as_many} no whole number")
    if batch > LARGEST:
        raise Refused(f"{as_many} more than {LARGEST:,}")
    return replace(job, global_batch_size=batch)
