"""Seconds of one kernel or one exchange on a cluster. Sizes are ints, or arrays over many layouts of one structure.

What was measured on the cluster itself is read off its grids (`account.grids`). For the rest, a matmul is a roofline
whose rate depends on its shape; anything else is bound by memory, save attention; no kernel is shorter than a launch.
An exchange pays a latency for each hop and its bytes at the bandwidth of the link, inside the node, between nodes, or
both; where such exchanges were measured, that is put right by how far it was off there. The coefficients are in
`data/measured/cost.toml`, each with its source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from nanum.account import ramps
from nanum.account.coefficients import Coefficients, coefficients, on
from nanum.account.exchanges import TREE_OVER_RING, Corrections, modelled
from nanum.account.grids import Grids, said_of
from nanum.account.host import copy_seconds, host_assumptions, update_seconds
from nanum.account.placement import Placement, place
from nanum.cluster import Cluster, Link
from nanum.cluster import Quantity as Stated
from nanum.layout import EXPERT_AXES, Layout
from nanum.program import (
    AWAITED_STREAMS,
    CONTEXT_STREAM,
    DATA_STREAM,
    EXPERTS_STREAM,
    FROM_HOST,
    REDUCER_STREAM,
    TO_HOST,
    Collective,
    Compute,
    Quantity,
)
from nanum.units import MIB

TILE_AREA = 128 * 256  # the output tile that `matmul.tile` was fitted with


ALIGNED = 8
"""Elements of half precision in the 16 bytes that tensor cores want operands aligned to (NVIDIA, Matrix Multiplication
Background: Requirements To Use Tensor Cores). Batches that are not are taken to run without them, as BLOOM's candidates
do; cuBLAS 11 and later say that they only prefer it."""
BUCKET_BYTES = 25 * MIB
"""Of the call that bytes without one of their own go along with: PyTorch's DDP closes a bucket there."""


def _host_work(node: Collective) -> str:
    """What the host does around an exchange besides: `cluster.measured.Framework` has its seconds."""
    if node.stream is None:
        return "redistribution" if "tp" in node.axes else ""
    return {DATA_STREAM: "unit", REDUCER_STREAM: "bucket"}.get(node.stream, "")


class Rates(NamedTuple):
    """FLOPs a second of a dtype on the slowest GPU: the chip's peak (or its best matmul), and an endless matmul's in a
    step.
    """

    peak: float
    matmul: Quantity


@dataclass(frozen=True, eq=False)
class Cost:
    """What nodes of a Program cost on a cluster, for one layout or for many at once (sizes of `layout` as arrays)."""

    cluster: Cluster
    layout: Layout
    coefficients: Coefficients = field(default_factory=coefficients)
    _parent: tuple[Cost, np.ndarray, np.ndarray] | None = field(default=None, repr=False)
    _seconds: dict[Compute | Collective, Quantity] = field(default_factory=dict, repr=False)
    _smaller: dict[tuple[int, int], Cost] = field(default_factory=dict, repr=False)
    _placements: dict[tuple[str, ...], Placement] = field(default_factory=dict, repr=False)
    _rates: dict[str, Rates] = field(default_factory=dict, repr=False)
    _stood_in: set[str] = field(default_factory=set, repr=False)  # subjects of kernels that were not measured
    _grids: Grids = field(init=False, repr=False)
    _corrections: Corrections = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefficients", on(self.cluster, self.coefficients))
        above = self._parent[0] if self._parent else None
        grids = above._grids if above else Grids(self.cluster.measured)
        corrections = above._corrections if above else Corrections(self.cluster)
        if above:  # what has been asked is one list
            object.__setattr__(self, "_rates", above._rates)
            object.__setattr__(self, "_stood_in", above._stood_in)
        object.__setattr__(self, "_grids", grids)
        object.__setattr__(self, "_corrections", corrections)

    def over(self, at: np.ndarray, size: int) -> Cost:
        """The cost in the smaller space of a repeat's body, of `size` places, of which `at[i]` is layout i's."""
        if (id(at), size) not in self._smaller:
            first = np.zeros(size, dtype=np.int64)  # a layout at each place
            first[at[::-1]] = np.arange(len(at))[::-1]
            smaller = Cost(self.cluster, self.layout, self.coefficients, (self, at, first))
            self._smaller[id(at), size] = smaller  # keeps `at` alive, and so its id its own
        return self._smaller[id(at), size]

    # Kernels.

    def compute_seconds(self, node: Compute) -> Quantity:
        """Seconds of one kernel; 0 where it does nothing.

        A matmul of m n k = flops / 2 (a batch of them counts all its tiles) takes flops / sustained
        * (1 + tile * launches * multiprocessors * TILE_AREA * 2k / flops), and the `unhidden` part of the time to write
        its result; or its memory time if that is longer.
        A flash attention kernel counts causal FLOPs. A kernel that was measured on the cluster takes what it took.

        Raises:
            ValueError: the chip states no rate for the node's dtype.
        """
        if node not in self._seconds:
            self._seconds[node] = self._compute_seconds(node)
        return self._seconds[node]

    def _compute_seconds(self, node: Compute) -> Quantity:
        if node.on_host:
            self._stood_in.add("host memory")
            return update_seconds(self.cluster, node)
        works = (node.flops > 0) | (node.bytes_moved > 0)
        measured = self._grids.kernel_seconds(node, self.cluster.gpus_per_node)
        host = self._grids.host_seconds("sharded_parameter" if node.sharded else "parameter")
        seconds = (self._modelled_seconds(node) if measured is None else measured) * works + node.tensors * host
        return seconds + self.host_seconds(node) if self.cluster.launch_blocking else seconds

    def _modelled_seconds(self, node: Compute) -> Quantity:
        known, chip = self.coefficients, self.cluster.chip
        of = ["attention", node.attention] if node.attention else ["matmul"] if node.shape else []
        self._stood_in.update(("memory", *of))
        bandwidth = chip.memory_bytes_per_second.value * known.fitted.memory.value
        seconds = node.bytes_moved / bandwidth
        if node.attention:
            way = node.attention, "backward" if node.phase == "backward" else "forward"
            share = known.family(chip.name).attention[way].value * known.fitted.attention.value
            seconds = np.maximum(node.flops / (self._rates_of(node.dtype).peak * share), seconds)
        elif node.shape:
            k = node.shape[2]
            unfilled = 2 * known.matmul_tile.value * chip.multiprocessors.value * TILE_AREA * k * node.launches
            written = node.element_bytes * node.flops / (2 * k)  # bytes
            unhidden = written * known.matmul_unhidden.value / bandwidth
            seconds = np.maximum((node.flops + unfilled) / self._matmul_rate(node) + unhidden, seconds)
        return np.maximum(seconds, known.launch_seconds.value)

    def _matmul_rate(self, node: Compute) -> Quantity:
        """FLOPs a second of an endless matmul. A batch of products of half precision, one of whose sizes is no multiple
        of `ALIGNED`, has kernels without tensor cores: the rate of fp32's. Those of fp8 with many `scales` are others.
        """
        rate = self._rates_of(node.dtype).matmul
        if node.scales != "tensor":
            self._stood_in.add(node.scales)
            return rate * self.coefficients.matmul_by[node.scales].value
        if node.dtype not in ("bf16", "fp16") or "fp32" not in self.cluster.chip.peak_flops_per_second:
            return rate
        m, n, k = node.shape
        odd = ((m // node.products) % ALIGNED > 0) | (n % ALIGNED > 0) | (k % ALIGNED > 0)
        return np.where((node.products > 1) & odd, self._rates_of("fp32").matmul, rate) if np.any(odd) else rate

    def _rates_of(self, dtype: str) -> Rates:
        """The chip's for this dtype. Raises ValueError where it states none."""
        if dtype not in self._rates:
            known, chip = self.coefficients, self.cluster.chip
            peak, best = chip.peak_flops_per_second.get(dtype), chip.best_flops_per_second.get(dtype)
            if best is None and peak is None:
                raise ValueError(f"chip {chip.name} states no FLOPs a second for {dtype}")
            top = best.value if best else peak.value * known.matmul_best_fraction.value  # type: ignore[union-attr]
            typical = known.family(chip.name).matmul or known.fitted.matmul_untabled
            own = known.fitted.matmul_fp8.value if dtype == "fp8" else 1.0
            slowest = known.slowest(self.cluster.gpus)
            matmul = top * typical.value * known.fitted.matmul.value * own
            self._rates[dtype] = Rates((peak.value if peak else top) / slowest, matmul / slowest)
        return self._rates[dtype]

    def host_seconds(self, node: Compute) -> Quantity:
        """Seconds of the host to launch an operation's kernels, and from within it further ones; a device that is its
        own host has them in the kernel's.
        """
        if not self.cluster.measured.streams:
            return 0.0
        if node.expert_by_expert:
            self._stood_in.add("slots")
        further = (node.launches - 1) * self.coefficients.launch_seconds.value
        fitted = self.coefficients.fitted
        each = node.calls * (fitted.expert_seconds if node.expert_by_expert else fitted.host_seconds).value
        launched = ((node.flops > 0) | (node.bytes_moved > 0)) & (node.calls > 0)  # not by a CUDA graph
        return launched * (each + further)

    # Exchanges.

    def placement(self, axes: tuple[str, ...]) -> Placement:
        """Where the groups of these mesh axes sit.

        Raises:
            ValueError: an axis is not in the rank order, or layouts that share a place in a repeat's body place a group
                differently.
        """
        if axes not in self._placements:
            self._placements[axes] = self._inherited(axes) if self._parent else self._placed(axes)
        return self._placements[axes]

    def _placed(self, axes: tuple[str, ...]) -> Placement:
        own = any(axis in EXPERT_AXES for axis in axes)
        sizes = self.layout.expert_sizes if own else self.layout.sizes
        if unknown := [axis for axis in axes if axis not in sizes]:
            raise ValueError(f"no mesh axis {', '.join(unknown)} among {', '.join(sizes)}")
        stride: Quantity = 1
        runs = []
        for axis, size in reversed(sizes.items()):
            if axis in axes:
                runs.append((stride, size))
            stride = stride * size
        return place(runs[::-1], self.cluster.gpus_per_node, stride)

    def _inherited(self, axes: tuple[str, ...]) -> Placement:
        assert self._parent is not None
        parent, at, first = self._parent
        members, nodes = (
            (whole, whole if np.ndim(whole) == 0 else whole[first])
            for whole in (parent.placement(axes).members, parent.placement(axes).nodes)
        )
        for whole, small in (members, nodes):
            if np.ndim(whole) and not np.array_equal(small[at], whole):
                raise ValueError(f"layouts that share a repeat's body place the groups of {'+'.join(axes)} differently")
        return Placement(members[1], nodes[1])

    def tier(self, axes: tuple[str, ...]) -> Quantity:
        """1 where a group of these axes reaches beyond its node, else 0."""
        return 1 * (self.placement(axes).nodes > 1)

    def link(self, axes: tuple[str, ...]) -> Any:
        """Name of the slowest link that a group of these axes crosses: a str, or an array of them over layouts."""
        if not axes and self.cluster.host is not None:
            return self.cluster.host.link.name
        names = np.where(self.tier(axes), self.cluster.inter_node.name, self.cluster.intra_node.name)
        return names if names.ndim else str(names)

    def collective_seconds(self, node: Collective) -> Quantity:
        """Seconds of an exchange: `calls`, each of which pays the latency, and `payload_bytes` in all of them.

        As `exchanges.modelled`, put right by what was measured of its kind on this cluster.

        Raises:
            ValueError: the kind or an axis is unknown.
        """
        if node not in self._seconds:
            self._seconds[node] = self._collective_seconds(node)
        return self._seconds[node]

    def _collective_seconds(self, node: Collective) -> Quantity:
        if node.kind in (TO_HOST, FROM_HOST):
            self._stood_in.add("host link")
            return copy_seconds(self.cluster, node)
        where, size = self.placement(node.axes), node.group_size
        # Some groups are a part of their axes (the two ends of a pipeline), so the placement is cut to the group.
        nodes = np.minimum(where.nodes, size)
        members = np.minimum(where.members, -(-size // nodes))
        seconds = modelled(self.cluster, node.kind, node.payload_bytes, node.calls, members, nodes, size)
        fitted = self.coefficients.fitted
        usual = 1 / fitted.intra_node.value, 1 / fitted.inter_node.value
        bucket = (node.calls == 0) * (node.payload_bytes > 0)
        of_call = np.where(bucket, BUCKET_BYTES, node.payload_bytes / np.maximum(node.calls, 1))
        host = self._grids.host_seconds(_host_work(node))
        return seconds * self._corrections.factor(node.kind, of_call, size, nodes, *usual) + node.calls * host

    # Beside each other.

    def blocking_seconds(self, node: Collective) -> Quantity:
        """Of an exchange that the compute waits for at once, the seconds that it really waits: all, or the first piece
        of as many as there are ranks, and what compute loses beside the rest.
        """
        seconds = self.collective_seconds(node)
        if not node.behind:
            return seconds
        seen = 1 / np.maximum(node.group_size, 1)
        return seconds * (seen + (1 - seen) * self.coefficients.fitted.beside.value)

    def stream(self, node: Collective) -> str | None:
        """The stream that an exchange runs on here. A device without streams of its own waits for what an engine puts
        on one; what threads of the host carry out (DDP's buckets, sends between stages) still runs beside it.
        """
        on_device = node.stream in (DATA_STREAM, CONTEXT_STREAM, EXPERTS_STREAM)
        return None if on_device and not self.cluster.measured.streams else node.stream

    def streamed_seconds(self, node: Collective) -> Quantity:
        """Seconds of an exchange on a stream, with compute beside it."""
        beside = self.cluster.measured.beside
        seconds = self.collective_seconds(node)
        return seconds if beside is None else seconds * beside.exchange.value

    def stolen_seconds(self, node: Collective) -> Quantity:
        """What compute loses while such an exchange runs: it does the work of 1/c seconds in one, where it takes c
        times as long beside an exchange. Exchanges that were timed alone, as nccl-tests does, do not say.
        """
        beside = self.cluster.measured.beside
        if node.stream not in AWAITED_STREAMS:
            return 0.0
        if beside is None:
            share = self.coefficients.fitted.beside.value if self.cluster.measured.streams else 0.0
            return self.streamed_seconds(node) * share
        return self.streamed_seconds(node) * max(0.0, 1.0 - 1.0 / beside.compute.value)

    # What it rests on.

    def assumptions(self) -> list[dict[str, Any]]:
        """Every number that costs rested on so far: what, its value and unit, how it is known (tag) and its source.
        Coefficients are listed whole, but on a cluster with measured grids only those that stood in for one.
        """
        chip = self.cluster.chip
        stated = [
            (f"{chip.name} memory bandwidth", chip.memory_bytes_per_second, "bytes_per_second"),
            (f"{chip.name} multiprocessors", chip.multiprocessors, "count"),
            *self._coefficients_used(),
            *host_assumptions(self.cluster, self._stood_in),
        ]
        for link in self._crossed():
            stated += [
                (f"{link.name}, one direction of a GPU", link.bytes_per_second, "bytes_per_second"),
                (f"{link.name} efficiency, measured at {link.group_size} ranks", link.efficiency, "ratio"),
                (f"{link.name} latency of a hop", link.latency_seconds, "seconds"),
            ]
            if link is self.cluster.inter_node:
                stated.append((f"{link.name}, bandwidth of a tree of nodes over a ring's", TREE_OVER_RING, "ratio"))
            if ramp := link.ramp:
                most = float(np.exp(max(ratios.max() for _, ratios in ramps.excess(ramp).values())))
                filled = Stated(most, ramp.tag, f"{ramp.points} sizes: {ramp.source}")
                stated.append((f"{link.name}, most of some size over latency and bandwidth", filled, "ratio"))
            if ramp and ramp.in_switch:
                ranks, faster = ramp.in_switch[-1]
                switch = Stated(faster, ramp.tag, ramp.source)
                stated.append((f"{link.name}, all-reduce of {ranks} in the switch over a ring's", switch, "ratio"))
            if not self.cluster.measured.exchanges:
                fitted = self.coefficients.fitted
                inside = link is self.cluster.intra_node
                share = fitted.intra_node if inside else fitted.inter_node
                stated.append((f"exchanges over {link.name} in a step over alone", share, "ratio"))
        if self._crossed() and self.cluster.measured.streams and self.cluster.measured.beside is None:
            stated.append(("compute lost beside an exchange", self.coefficients.fitted.beside, "ratio"))
        listed = {quantity for _, quantity, _ in stated}
        stated += [(what, quantity, "") for what, quantity in self.cluster.assumptions if quantity not in listed]
        stated += self._grids.ratios_used()
        grids = {**self._grids.used, **self._corrections.used}.items()
        return [
            *({"what": w, "value": q.value, "unit": unit, "tag": q.tag, "source": q.source} for w, q, unit in stated),
            *({"what": w, "value": None, "unit": "", "tag": g.tag, "source": said_of(g)} for w, g in grids),
        ]

    def _coefficients_used(self) -> list[tuple[str, Stated, str]]:
        known, chip = self.coefficients, self.cluster.chip
        family, fitted = known.family(chip.name), known.fitted
        slots, scaled = "slots" in self._stood_in, [s for s in known.matmul_by if s in self._stood_in]
        stated = []
        for dtype in self._rates:
            best = chip.best_flops_per_second.get(dtype)
            if dtype in chip.peak_flops_per_second:
                stated.append((f"{chip.name} peak, {dtype}", chip.peak_flops_per_second[dtype], "flops_per_second"))
            if best:
                stated.append((f"{chip.name} best measured matmul, {dtype}", best, "flops_per_second"))
            else:
                stated.append((f"best matmul over peak, {dtype}", known.matmul_best_fraction, "ratio"))
            if dtype == "fp8":
                stated.append(("fp8 matmul over bf16's, each over its best", fitted.matmul_fp8, "ratio"))
        of = {
            "matmul": [
                ("matmul result, written when its products are done, of all", known.matmul_unhidden, "ratio"),
                ("matmul tile, in tiles of each multiprocessor", known.matmul_tile, "count"),
                ("matmul in a step over alone", fitted.matmul, "ratio"),
                (f"matmul typical over best, {family.name} family", family.matmul or fitted.matmul_untabled, "ratio"),
                *((f"fp8 matmul with scales of {s} over one", known.matmul_by[s], "ratio") for s in scaled),
            ],
            "attention": [
                *(
                    (f"attention {way} over peak by {library}, {family.name} family", share, "ratio")
                    for (library, way), share in family.attention.items()
                    if library in self._stood_in
                ),
                ("attention in a step over alone", fitted.attention, "ratio"),
            ],
            "memory": [
                ("memory bandwidth over its peak", fitted.memory, "ratio"),
                ("shortest kernel", known.launch_seconds, "seconds"),
                ("launch of a kernel", fitted.host_seconds, "seconds"),
                *([("operation on experts' slots, of the host", fitted.expert_seconds, "seconds")] if slots else []),
            ],
        }
        if self._rates and self.cluster.gpus > 1:
            stated.append(("GPUs' rates of products, standard deviation over the mean", known.uneven, "ratio"))
        used = self._stood_in if self.cluster.measured.kernels else of
        return stated + [entry for subject in of if subject in used for entry in of[subject]]

    def _crossed(self) -> list[Link]:
        """The links that groups of more than one rank have been found to cross."""
        placed = self._placements.values()
        inside = any(np.any(p.members > 1) for p in placed)
        between = any(np.any(p.nodes > 1) for p in placed)
        both = ((self.cluster.intra_node, inside), (self.cluster.inter_node, between))
        return [link for link, crossed in both if crossed]
