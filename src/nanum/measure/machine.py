"""From what `nanum.live.measure` measured to a `Cluster`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from nanum.cluster import Chip, Cluster, Link, Quantity
from nanum.cluster.grids import measured
from nanum.cluster.measured import Exchange, Framework, Measured
from nanum.cluster.parse import default_network
from nanum.collectives import ring_steps, wire_bytes
from nanum.job import Job
from nanum.layout import Layout
from nanum.measure.links import rounded
from nanum.model.document import from_document
from nanum.prediction import predict
from nanum.program import Compute
from nanum.units import MIB

Document = Mapping[str, Any]


def cluster(document: Document, name: str, version: str) -> Cluster:
    """The machine as one node. Its best matmul stands for the peak, and a copy for the memory's bandwidth."""
    about = document["machine"]
    source = _source(document, version)
    found = measured(_table(document, source))

    def known(value: float) -> Quantity:
        return Quantity(rounded(value), "measured", source)

    best = {dtype: known(rate) for dtype, rate in _best_matmuls(found).items()}
    device = "1 core" if about["kind"] == "cpu" else f"{about['multiprocessors']} multiprocessors"
    chip = Chip(
        name=f"{about['name']} ({device})",
        peak_flops_per_second=best,
        best_flops_per_second=best,
        memory_bytes=Quantity(about["memory_bytes"], "measured", f"as the system reports it; {source}"),
        memory_bytes_per_second=known(_copy_bytes_per_second(found)),
        multiprocessors=Quantity(about["multiprocessors"], "measured", f"as the system reports it; {source}"),
    )
    link = _link(found, about, source)
    whole = Cluster(name, 1, about["devices"], chip, link, default_network(), measured=found)
    overheads = {work: known(seconds) for work, seconds in overhead_seconds(document, whole).items()}
    return replace(whole, measured=replace(found, framework=Framework(**overheads)))


def _source(document: Document, version: str) -> str:
    about = document["machine"]
    libraries = ", ".join(f"{name} {found}" for name, found in about["libraries"].items())
    threads = "one thread a rank" if about["kind"] == "cpu" else about["kind"]
    quick = " --quick" if document["quick"] else ""
    devices = f"{about['devices']} x {about['name']}, {threads}"
    return (
        f"nanum {version} measure{quick}, {about['date']}, {devices}; {libraries}; load {document['load']:.1f} before"
    )


def _table(document: Document, source: str) -> dict[str, Any]:
    """The document as a [measured] table."""
    table: dict[str, Any] = {
        "tag": "measured",
        "source": source,
        "streams": document["machine"]["streams"],
        "operation_seconds": rounded(document["operation_seconds"]),
    }
    for ratios in ("beside", "together"):
        if ratios in document:
            table[ratios] = {k: v if k == "ranks" else rounded(v) for k, v in document[ratios].items()}
    for grid in document["grids"]:
        entry = {
            key: list(map(rounded, value)) if key.endswith("seconds") else value
            for key, value in grid.items()
            if key != "subject"
        }
        table.setdefault(grid["subject"], []).append(entry)
    return table


def overhead_seconds(document: Document, cluster: Cluster) -> dict[str, float]:
    """What the host does besides: the seconds of a tiny model's steps beyond those of their kernels and exchanges, over
    the number of parameters, or of exchanges. Noise may leave less than nothing, which is taken for nothing.
    """
    found: dict[str, float] = {}
    for run in document.get("framework", ()):
        layout = Layout.from_document(run["layout"])
        alone = replace(cluster, gpus_per_node=int(layout.world))
        predicted = predict(from_document(run["model"]), Job.from_document(run["job"]), alone, layout, engine="torch")
        time, (step,) = predicted.time, predicted.steps
        (update,) = (node for node in step.optimizer if isinstance(node, Compute))
        parameter = "sharded_parameter" if update.sharded else "parameter"
        if run["work"] in ("alone", "unit"):
            left = run["optimizer_seconds"] - time.optimizer_seconds
            found[parameter] = max(0.0, left / float(update.tensors))
        if run["work"] != "alone":
            # DDP's broadcast of buffers is no bucket, and what the optimizer exchanges is in its own seconds.
            calls = sum(r.calls for r in predicted.communication if r.phase != "optimizer" and r.what != "buffers")
            left = run["backward_seconds"] - (time.step_seconds - float(predicted.stage_times[0].optimizer_seconds))
            found[run["work"]] = max(0.0, left / calls)
    return found


def _best_matmuls(found: Measured) -> dict[str, float]:
    best: dict[str, float] = {}
    for (dtype, _), grid in found.matmul.items():
        for (m, n, k), seconds in zip(product(*grid.sizes), grid.seconds, strict=True):
            best[dtype] = max(best.get(dtype, 0.0), 2.0 * m * n * k / seconds)
    return best


BEYOND_CACHES_BYTES = 16 * MIB


def _copy_bytes_per_second(found: Measured) -> float:
    """Of the fastest copy beyond the caches."""
    grid = found.kernel["fp32", "copy"]
    rates = [(size, size / seconds) for size, seconds in zip(grid.sizes[0], grid.seconds, strict=True)]
    return max(rate for size, rate in rates if size >= BEYOND_CACHES_BYTES or size == rates[-1][0])


def _link(found: Measured, about: Document, source: str) -> Link:
    """By the largest all-gather of all devices, which gives a bandwidth as it is (and so an efficiency of 1), and the
    smallest all-reduce, which gives a hop's latency.
    """
    name = "NCCL" if about["kind"] == "cuda" else "gloo"
    whole = {e.kind: e for e in found.exchanges if e.ranks == about["devices"]}
    if not whole:
        none = Quantity(1e9, "assumed", "one device: there is nobody to exchange with")
        return Link("none", none, Quantity(1.0, *_how(none)), Quantity(0.0, *_how(none)), 1)
    rate = _busbw(whole["all_gather"], -1)
    small = whole["all_reduce"]
    hop = small.grid.seconds[0] / ring_steps("all_reduce", small.ranks)
    return Link(
        name=f"{name} in one machine",
        bytes_per_second=Quantity(rounded(rate), "measured", f"bus bandwidth of the largest all-gather; {source}"),
        efficiency=Quantity(1.0, "measured", f"the bandwidth is the measured one; {source}"),
        latency_seconds=Quantity(rounded(hop), "measured", f"smallest all-reduce, by its ring's steps; {source}"),
        group_size=small.ranks,
    )


def _busbw(exchange: Exchange, at: int) -> float:
    """Bus bandwidth as nccl-tests has it: what each rank must send, over seconds."""
    payload = exchange.grid.sizes[0][at]
    return float(wire_bytes(exchange.kind, payload, exchange.ranks)) / exchange.grid.seconds[at]


def _how(quantity: Quantity) -> tuple[Any, str]:
    return quantity.tag, quantity.source
