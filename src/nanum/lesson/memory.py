"""Part C: what training keeps in memory, storage by storage; what ZeRO divides of it, and what it sends for that."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nanum.errors import Refused
from nanum.job import Job
from nanum.lesson import ledger
from nanum.lesson.arithmetic import SHARDED, ZERO_GPUS, Dimensions, zero_bytes_per_gpu
from nanum.lesson.measured import bench, device_name
from nanum.processes import Progress

KEPT = ("params", "grads", "optimizer_states")

ZERO_CLUSTERS = {1: "1x1xh100-sxm", 4: "1x4xh100-sxm", 8: "1x8xh100-sxm", 32: "4x8xh100-sxm"}


def part_c(progress: Progress, *, device: str = "auto") -> dict[str, Any]:
    """The document of part C. Raises as `measured.bench` does."""
    measured = from_storages(bench(["memory", "--device", device], progress))
    return {"measured": measured, "model": ledger.MODEL, "engine": ledger.engine(), "zero": zero_table()}


def from_storages(measured: dict[str, Any]) -> dict[str, Any]:
    """The measured half of part C from what `nanum.live.bench memory` counted.

    The total is of parameters, gradients and AdamW's two moments; its step counters, a scalar a tensor, are told apart.
    """
    kept = {name: measured[f"{name}_bytes"] for name in KEPT}
    total_bytes = sum(kept.values())
    params_bytes = kept["params"]
    return {
        **measured,
        "device": device_name(measured["device"]),
        "processor": measured["device"],
        "torch": measured["device"]["torch"],
        "total_bytes": total_bytes,
        "ratio": {name: count / params_bytes for name, count in kept.items()} | {"total": total_bytes / params_bytes},
    }


def zero_table() -> list[dict[str, Any]]:
    """Bytes of the nominal 7B model in fp32 on each GPU, and beside them what one rank of the real one sends in a step.

    `sent` is None where the group is one GPU; a stage that the engine refuses says why in `refused`.
    """
    return [
        {
            "sharded": sharded,
            "stage": stage,
            "bytes_per_gpu": {str(gpus): zero_bytes_per_gpu(sharded, gpus) for gpus in ZERO_GPUS},
            "sent": {str(gpus): _sent(stage, gpus) for gpus in ZERO_GPUS},
        }
        for stage, sharded in enumerate(SHARDED)
    ]


def _sent(stage: int, gpus: int) -> dict[str, Any] | None:
    if gpus == 1:
        return None
    dimensions = Dimensions()
    divided = ledger.layout({"dp": gpus}, dimensions.micro_batch_size, zero=stage)
    job = Job(dimensions.seq_len, dimensions.micro_batch_size * gpus, precision="fp32")
    word = ZERO_CLUSTERS[gpus]
    try:
        document = ledger.step(job, word, divided)
    except Refused as refused:
        return {"refused": list(refused.reasons)}
    return asdict(ledger.sent(document, ("dp_replicate", "dp_shard"), word))
