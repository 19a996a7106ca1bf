"""The lesson's last part: five beliefs, each answered by numbers of the parts just run, or computed on the spot."""

from __future__ import annotations

from typing import Any

from nanum.lesson import ledger
from nanum.lesson.arithmetic import Dimensions
from nanum.lesson.communication import GROUP_SIZE, OVERLAID, PLACEMENTS, SMALL_CLUSTER, WAYS, overlaid_job

LARGEST = "32"


def part_m(document: dict[str, Any]) -> dict[str, Any]:
    """Answers from the documents of parts A, B and C. Raises Refused where a prediction is refused."""
    return {
        "twice_the_gpus": _twice_the_gpus(document["B"]),
        "least_volume": _least_volume(document["A"]),
        "memory_is_parameters": _memory_is_parameters(document["C"]),
        "zero_is_free": _zero_is_free(document["C"]),
        "a_real_cluster": a_real_cluster(),
    }


def _twice_the_gpus(part_b: dict[str, Any]) -> dict[str, Any]:
    fraction = part_b["doubling"]["serial_fraction"]
    row = next(row for row in part_b["rows"] if row["serial_fraction"] == fraction)
    ideal = next(row for row in part_b["ideal"] if row["serial_fraction"] == fraction)
    return {
        **part_b["doubling"],
        "gpus": int(LARGEST),
        "speedup": row["speedup"][LARGEST],
        "ideal_speedup": ideal["speedup"][LARGEST],
        "limit": row["limit"],
        "noise": part_b["noise"],
    }


def _least_volume(part_a: dict[str, Any]) -> dict[str, Any]:
    return {"bytes": {way: part_a[way]["bytes"] for way in WAYS}, "gpus": GROUP_SIZE, **part_a["same_step"]}


def _memory_is_parameters(part_c: dict[str, Any]) -> dict[str, Any]:
    measured = part_c["measured"]
    params_bytes = measured["params_bytes"]
    return {
        "kept_over_params": measured["ratio"]["total"],
        "activations_over_params": measured["activations_bytes"] / params_bytes,
        "training_peak_moment": measured["training_peak_moment"],
        "training_peak_over_params": measured["training_peak_bytes"] / params_bytes,
        "inference_peak_over_params": measured["inference_peak_bytes"] / params_bytes,
    }


def _zero_is_free(part_c: dict[str, Any]) -> dict[str, Any]:
    whole, divided = part_c["zero"][0], part_c["zero"][-1]
    gpus = str(GROUP_SIZE)
    return {
        "gpus": GROUP_SIZE,
        "bytes_per_gpu": {"none": whole["bytes_per_gpu"][gpus], "all": divided["bytes_per_gpu"][gpus]},
        "wire_bytes": {"none": _wire_bytes(whole, gpus), "all": _wire_bytes(divided, gpus)},
    }


def _wire_bytes(row: dict[str, Any], gpus: str) -> int | None:
    sent = row["sent"][gpus]
    return None if sent is None or "refused" in sent else sent["wire_bytes"]


def a_real_cluster() -> dict[str, Any]:
    """The same job on one GPU and on 32: the arithmetic divides by 32, a predicted step adds what the division leaves.

    `latency_seconds` is what the step would gain if messages took no time to set out. A pipeline of equal stages would
    wait (p - 1) / m of its busy time (GPipe, Huang et al. 2018); what it waits beyond that is `imbalance_seconds`.
    """
    job, micro_batch_size = overlaid_job(), Dimensions().micro_batch_size
    one = ledger.step(job, ledger.ONE_GPU, ledger.layout({}, micro_batch_size))
    divided = ledger.layout(OVERLAID, micro_batch_size, rank_order=PLACEMENTS["tp_in_node"])
    many = ledger.step(job, SMALL_CLUSTER, divided)
    swift = ledger.step(job, SMALL_CLUSTER, divided, without_latency=True)
    gpus = ledger.cluster(SMALL_CLUSTER).gpus
    time = many["time"]
    microbatches = job.num_microbatches(micro_batch_size, OVERLAID["dp"])
    even_wait_seconds = (time["step_seconds"] - time["bubble_seconds"]) * (OVERLAID["pp"] - 1) / microbatches
    arithmetic_seconds = one["time"]["step_seconds"] / gpus
    return {
        "cluster": SMALL_CLUSTER,
        "gpus": gpus,
        "sequences": job.global_batch_size,
        "tokens": job.global_batch_size * job.seq_len,
        "one_gpu_seconds": one["time"]["step_seconds"],
        "arithmetic_seconds": arithmetic_seconds,
        "predicted_seconds": time["step_seconds"],
        "predicted_seconds_range": [time["step_seconds_low"], time["step_seconds_high"]],
        "times_worse": time["step_seconds"] / arithmetic_seconds,
        "exposed_communication_seconds": time["exposed_communication_seconds"],
        "latency_seconds": time["step_seconds"] - swift["time"]["step_seconds"],
        "bubble_seconds": time["bubble_seconds"],
        "imbalance_seconds": max(0.0, time["bubble_seconds"] - even_wait_seconds),
        "serial_fraction": time["serial_fraction"],
        "speedup": one["time"]["step_seconds"] / time["step_seconds"],
    }
