"""Measures this machine, as a process: `python -m nanum.live.measure [--device D] [--quick]`.

One JSON document on stdout; `progress DONE TOTAL WHAT` lines on stderr (`nanum.processes` has the protocol). A core is
a device where there is no GPU: a rank has one thread. All measuring is done in forked ranks, the single-device part in
a single one, so that this process stays free to end them.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(3)

from nanum.live.bench import choose_device, processor_name, synchronize
from nanum.live.grids import Plan, measured, ticks
from nanum.live.launch import join
from nanum.live.measure_exchanges import KINDS, beside, exchanges, group_sizes, payloads, together
from nanum.live.measure_framework import framework
from nanum.live.measure_kernels import jobs, operation_seconds
from nanum.live.pulse import Pulse
from nanum.live.sampling import summary
from nanum.live.supervisor import run_ranks
from nanum.processes import answering

HANGS_SECONDS = 120.0  # without a sign of life from any rank
ALONE_SHARE = 0.6  # of the progress bar: what one device does alone
BAR = 1000


def devices_of(kind: str) -> int:
    """GPUs, or cores that this process may use. It asks NVML, not CUDA: a process that has touched CUDA cannot fork."""
    if kind == "cuda":
        return int(torch.cuda.device_count())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(device: torch.device, devices: int) -> dict[str, Any]:
    """What is measured: how many devices, how much memory each has, and with which libraries."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "streams": True,
        }
        libraries = {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    else:
        found = {
            "name": processor_name(),
            "memory_bytes": memory_bytes()[0] // devices,
            "multiprocessors": 1,
            "streams": False,
        }
        libraries = {"blas": "MKL" if torch.backends.mkl.is_available() else "no MKL"}
    return {
        **found,
        "devices": devices,
        "kind": device.type,
        "date": dt.date.today().isoformat(),
        "libraries": {"python": platform.python_version(), "torch": torch.__version__, **libraries},
    }


def memory_bytes() -> tuple[int, int]:
    """Of the whole machine: in all, and free (a limit of a container's cgroup counts). Linux; elsewhere 8 GiB."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 8 << 30, 4 << 30
    stated = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    total, free = stated["MemTotal"], stated["MemAvailable"]
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and limit < total:
        total, free = limit, min(free, limit - (used or 0))
    return total, free


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or `max`
        return None


def free_bytes(device: torch.device, devices: int) -> float:
    """What one device may fill."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return memory_bytes()[1] / devices


class Ticker:
    """Progress of one part of the run, as a share of the whole bar; each tick is a sign of life."""

    def __init__(self, pulse: Pulse, rank: int, total: int, begin: float, end: float) -> None:
        self._pulse, self._rank, self._total, self._begin, self._end = pulse, rank, total, begin, end
        self._done = 0

    def __call__(self, what: str) -> None:
        self._pulse.beat(what)
        self._done += 1
        if self._rank == 0:
            share = self._begin + (self._end - self._begin) * min(1.0, self._done / max(self._total, 1))
            self._pulse.progress(round(BAR * share), BAR, what)


def settle(device: torch.device, rank: int) -> torch.device:
    """One thread for a core; one GPU for a rank."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    return device


def alone(kind: str, quick: bool, devices: int) -> Any:
    """The entry of the single rank that measures one device."""

    def entry(rank: int, pulse: Pulse, folder: Path) -> dict[str, Any]:
        device = settle(torch.device(kind), rank)
        plan = Plan(device, quick, free_bytes(device, devices))
        torch.manual_seed(35)
        found = jobs(plan)
        tick = Ticker(pulse, rank, ticks(found, plan), 0.0, ALONE_SHARE if devices > 1 else 1.0)
        grids = measured(found, plan, tick)
        least = summary(operation_seconds(plan))[0]
        return {"machine": machine(device, devices), "grids": grids, "operation_seconds": least}

    return entry


BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def all_of_them(kind: str, quick: bool, devices: int) -> Any:
    """The entry of each of the ranks that measure what devices do together."""

    def entry(rank: int, pulse: Pulse, folder: Path) -> dict[str, Any]:
        device = settle(torch.device(kind), rank)
        join(rank, devices, folder, BACKENDS[kind])
        plan = Plan(device, quick, free_bytes(device, devices))
        ticks = 4 + 5 + sum(len(KINDS) * len(payloads(plan, n)) for n in group_sizes(devices))
        tick = Ticker(pulse, rank, ticks, ALONE_SHARE, 1.0)
        found = {
            "grids": exchanges(plan, rank, devices, tick),
            "together": together(plan, rank, tick),
            "beside": beside(plan, rank, devices, tick),
        }
        synchronize(device)
        dist.destroy_process_group()
        return found

    return entry


def document(kind: str, quick: bool) -> dict[str, Any]:
    devices = devices_of(kind)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    (mine,) = run_ranks(alone(kind, quick, devices), 1, patience_seconds=HANGS_SECONDS)
    found = {"quick": quick, "load": load, **mine}
    if devices < 2:
        return found
    several = run_ranks(all_of_them(kind, quick, devices), devices, patience_seconds=HANGS_SECONDS)
    both = several[0]
    if kind == "cpu":
        found["framework"] = framework(quick, HANGS_SECONDS)
    return found | {
        "grids": [*mine["grids"], *both["grids"]],
        "together": {"ranks": devices, **both["together"]},
        "beside": {"ranks": devices, **both["beside"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nanum.live.measure", description="This machine, as JSON.")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or looking for GPUs would make forking impossible
    device = choose_device(asked.device)
    kind = "cpu" if device.type == "mps" else device.type
    with answering():
        json.dump(document(kind, asked.quick), sys.stdout)
    print()


if __name__ == "__main__":
    main()
