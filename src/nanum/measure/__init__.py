"""A new `Cluster` out of measurements: of this machine, or of logs of nccl-tests. It is written, never fed back."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from nanum import files, processes
from nanum.cluster import Cluster, Link, Measured
from nanum.cluster.measured import Exchange
from nanum.cluster.parse import from_table
from nanum.collectives import wire_bytes
from nanum.errors import Refused
from nanum.measure import links, machine, nccl_tests
from nanum.measure.write import has_comments, text
from nanum.processes import Progress


def this_machine(name: str, progress: Progress, *, device: str = "auto", quick: bool = False) -> Cluster:
    """Measure this machine, as one node of cores or of GPUs.

    Raises as `processes.run`: Refused where there is no torch or no such device, RunFailed where measuring failed.
    """
    arguments = ["--device", device, *(["--quick"] if quick else [])]
    return machine.cluster(processes.run("nanum.live.measure", arguments, progress), name, _version())


def from_nccl_tests(paths: list[Path], base: Cluster, name: str, *, sized: bool) -> Cluster:
    """`base` with its exchanges as logs of nccl-tests have them, and its links' efficiencies and latencies as far as
    they tell them (`links.told`); with the nodes and GPUs of the largest run, unless `sized` says that `base` has its
    own. Steps that were observed on `base` are left out.

    Raises Refused with every reason, by file and line.
    """
    logs = nccl_tests.read(paths)
    if not sized and (others := nccl_tests.other_chips(logs.device, base.chip.name)):
        instead = f"--chip {' or '.join(others)}, or --cluster with what has such links"
        raise Refused([f"the logs are of {logs.device}, and --chip is {base.chip.name}: {instead}"])
    found = {(e.kind, e.ranks, e.nodes): e for e in (*base.measured.exchanges, *logs.exchanges)}
    sizes = {} if sized else {"nodes": logs.nodes, "gpus_per_node": logs.gpus_per_node}
    return replace(
        links.told(base, logs.exchanges),
        name=name,
        **sizes,  # type: ignore[arg-type]
        measured=replace(base.measured, exchanges=tuple(found.values())),
        in_a_step=None,  # steps were observed over what was known of the links before
    )


def save(cluster: Cluster, file: Path, *, force: bool) -> bool:
    """Write the cluster file, whole or not at all: did the one that it replaces have comments, which are not kept?

    Raises Refused where it cannot be written, or would be refused wherever a cluster is read.
    """
    written = text(cluster)
    from_table(tomllib.loads(written), cluster.name, where=f"{file}, which is not written")
    commented = force and file.is_file() and has_comments(file.read_bytes().decode(errors="replace"))
    files.write_whole(file, written, force=force)
    return commented


def summary(cluster: Cluster) -> dict[str, Any]:
    """What a person wants to see of a measured cluster; `measure --json` prints it."""
    found, chip = cluster.measured, cluster.chip
    return {
        "cluster": {
            "name": cluster.name,
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.gpus_per_node,
            "chip": chip.name,
            "memory_bytes": chip.memory_bytes.value,
            "memory_bytes_per_second": chip.memory_bytes_per_second.value,
            "best_flops_per_second": {dtype: rate.value for dtype, rate in chip.best_flops_per_second.items()},
            "links": [_link(link) for link in (cluster.intra_node, cluster.inter_node)[: 1 + (cluster.nodes > 1)]],
        },
        "operation_seconds": None if found.operation_seconds is None else found.operation_seconds.value,
        "together": None
        if found.together is None
        else {"ranks": found.together.ranks, **{s: r.value for s, r in found.together.ratios.items()}},
        "beside": None
        if found.beside is None
        else {
            "ranks": found.beside.ranks,
            "compute": found.beside.compute.value,
            "exchange": found.beside.exchange.value,
        },
        "framework": {work: seconds and seconds.value for work, seconds in vars(found.framework).items()},
        "exchanges": [_exchange(e) for e in found.exchanges],
        "grids": {s: len(getattr(found, s)) for s in ("matmul", "kernel", "attention", "optimizer")},
        "sources": _sources(found),
    }


def _link(link: Link) -> dict[str, Any]:
    return {
        "name": link.name,
        "bytes_per_second": link.bytes_per_second.value,
        "tag": link.bytes_per_second.tag,
        "efficiency": link.efficiency.value,
        "efficiency_group_size": link.group_size,
        "efficiency_tag": link.efficiency.tag,
        "latency_seconds": link.latency_seconds.value,
        "latency_tag": link.latency_seconds.tag,
    }


def _sources(found: Measured) -> list[str]:
    """Where the measured numbers are from, each once."""
    grids = (*found.matmul.values(), *found.kernel.values(), *found.attention.values(), *found.optimizer.values())
    return list(dict.fromkeys(grid.source for grid in (*grids, *(e.grid for e in found.exchanges))))


def _exchange(e: Exchange) -> dict[str, Any]:
    payloads = e.grid.sizes[0]
    wire = [float(wire_bytes(e.kind, payload, e.ranks)) for payload in payloads]
    return {
        "kind": e.kind,
        "ranks": e.ranks,
        "nodes": e.nodes,
        "payload_bytes": list(payloads),
        "seconds": list(e.grid.seconds),
        "low_seconds": list(e.grid.low_seconds),
        "high_seconds": list(e.grid.high_seconds),
        "algbw_bytes_per_second": [p / s for p, s in zip(payloads, e.grid.seconds, strict=True)],
        "busbw_bytes_per_second": [w / s for w, s in zip(wire, e.grid.seconds, strict=True)],
        "repeats": e.grid.repeats,
    }


def _version() -> str:
    try:
        return installed("nanum")
    except PackageNotFoundError:
        return "from its source"
