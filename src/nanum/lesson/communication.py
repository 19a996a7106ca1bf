"""Part A: what is exchanged. The arithmetic, what one rank really sends, the pipeline's bubble, the three overlaid."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from nanum.job import Job
from nanum.lesson import arithmetic, ledger
from nanum.lesson.arithmetic import Dimensions
from nanum.schedule import finish_times

GROUP_SIZE = 8
IN_NODE, BETWEEN_NODES = "1x8xh100-sxm", "8x1xh100-sxm"
"""The same group of eight: in one NVLink domain, and one GPU in each of eight nodes."""

WAYS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "data_parallel": ({"dp": GROUP_SIZE}, ("dp_replicate", "dp_shard")),
    "tensor_parallel": ({"tp": GROUP_SIZE}, ("tp",)),
    "pipeline": ({"pp": GROUP_SIZE}, ("pp",)),
}

BUBBLE_STAGES = 8
BUBBLE_MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)

SMALL_CLUSTER = "4x8xh100-sxm"
OVERLAID = {"tp": 8, "pp": 2, "dp": 2}
OVERLAID_MICROBATCHES = 16
PLACEMENTS: dict[str, tuple[str, ...]] = {
    "tp_in_node": ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    "tp_over_two_nodes": ("pp", "cp", "tp", "dp_replicate", "dp_shard"),
    "tp_over_four_nodes": ("tp", "cp", "dp_replicate", "dp_shard", "pp"),
}
"""Rank orders, outermost first. On nodes of eight, only the first keeps a tensor-parallel group in its node."""


def part_a() -> dict[str, Any]:
    """The document of part A. Raises Refused where a prediction is refused."""
    dimensions = Dimensions()
    nominal = {
        "data_parallel": (arithmetic.data_parallel_bytes(), 1),
        "tensor_parallel": (arithmetic.tensor_parallel_bytes(dimensions), 2 * dimensions.num_hidden_layers),
        "pipeline": (arithmetic.pipeline_bytes(dimensions), 1),
    }
    growth = arithmetic.sweep(ledger.parameters)
    real_parameters = ledger.parameters(dimensions)
    document: dict[str, Any] = {
        "dimensions": asdict(dimensions),
        "engine": ledger.engine(),
        "parameters": {"nominal": arithmetic.NOMINAL_PARAMETERS, "model": ledger.MODEL, "real": real_parameters},
        "real_data_parallel_bytes": arithmetic.data_parallel_bytes(real_parameters),
        "links": {
            "in_node": asdict(ledger.cluster(IN_NODE).intra_node),
            "between_nodes": asdict(ledger.cluster(BETWEEN_NODES).inter_node),
        },
    }
    for way, (divided, axes) in WAYS.items():
        count_bytes, messages = nominal[way]
        document[way] = {
            "bytes": count_bytes,
            "messages": messages,
            "growth": {grown.dimension: {"ratio": grown.ratio, "kind": grown.kind} for grown in growth[way]},
            "sent": [asdict(sent_by(divided, axes, dimensions, word)) for word in (IN_NODE, BETWEEN_NODES)],
        }
    document["reconciled"] = reconciled(document)
    document["same_step"] = same_step(dimensions)
    document["bubble"] = bubble()
    document["overlaid"] = overlaid()
    return document


def sent_by(divided: dict[str, int], axes: tuple[str, ...], dimensions: Dimensions, cluster_word: str) -> ledger.Sent:
    """What one rank sends in a step of one micro-batch a data-parallel rank."""
    divided_layout = ledger.layout(divided, dimensions.micro_batch_size)
    job = Job(dimensions.seq_len, dimensions.micro_batch_size * divided_layout.data_ranks)
    return ledger.sent(ledger.step(job, cluster_word, divided_layout), axes, cluster_word)


def reconciled(document: dict[str, Any]) -> dict[str, Any]:
    """What leads from the loose counting's bytes to those that a rank really sends, read off the two.

    `ring_factor` is 2 (n - 1) / n, what each rank of a ring passes on of an all-reduce's payload. The tensor-parallel
    forward pass sends `tensor_layers_bytes` in its layers, and the rest at its two ends (embedding and loss).
    """
    data, tensor = (document[way]["sent"][0] for way in ("data_parallel", "tensor_parallel"))
    ring_factor = data["wire_bytes"] / data["payload_bytes"]
    forward_bytes = tensor["wire_bytes_by_phase"]["forward"]
    layers_bytes = ring_factor * document["tensor_parallel"]["bytes"]
    return {
        "group_size": data["group_size"],
        "ring_factor": ring_factor,
        "grad_bytes_per_parameter": data["payload_bytes"] / document["parameters"]["real"],
        "grads_bytes": data["payload_bytes"],
        "tensor_layers_bytes": layers_bytes,
        "tensor_ends_bytes": forward_bytes - layers_bytes,
    }


def same_step(dimensions: Dimensions) -> dict[str, Any]:
    """One step of the same sequences by each way, so many that every data-parallel rank has a micro-batch.

    Bytes are no longer those of one micro-batch: tensor parallel and the pipeline take one after the other.
    """
    job = Job(dimensions.seq_len, dimensions.micro_batch_size * GROUP_SIZE)

    def taken(way: str, cluster_word: str) -> dict[str, Any]:
        divided, axes = WAYS[way]
        prediction = ledger.step(job, cluster_word, ledger.layout(divided, dimensions.micro_batch_size))
        sent = ledger.sent(prediction, axes, cluster_word)
        return {
            "wire_bytes": sent.wire_bytes,
            "calls": sent.calls,
            "exposed_seconds": prediction["time"]["exposed_communication_seconds"],
            "bubble_seconds": prediction["time"]["bubble_seconds"],
            "step_seconds": prediction["time"]["step_seconds"],
        }

    places = {"in_node": IN_NODE, "between_nodes": BETWEEN_NODES}
    return {
        "sequences": job.global_batch_size,
        "ways": {way: {place: taken(way, word) for place, word in places.items()} for way in WAYS},
        "fastest": {
            place: min(WAYS, key=lambda way: taken(way, word)["step_seconds"]) for place, word in places.items()
        },
    }


def bubble() -> list[dict[str, Any]]:
    """The share of a step that a stage of eight equal ones waits, from the order of its forward and backward passes.

    A backward pass takes twice a forward's time: two matmuls for each one.
    """
    one = np.ones((BUBBLE_STAGES, 1))
    rows = []
    for count in BUBBLE_MICROBATCHES:
        finish = finish_times("1f1b", count, {"forward": one, "backward": 2 * one})
        fraction = float(finish.bubble_seconds.max() / finish.total_seconds.max())
        rows.append({"stages": BUBBLE_STAGES, "num_microbatches": count, "fraction": fraction})
    return rows


def overlaid() -> dict[str, Any]:
    """One job on a small cluster, in three placements of the same division."""
    dimensions = Dimensions()
    job = overlaid_job()
    placed = []
    for name, rank_order in PLACEMENTS.items():
        divided = ledger.layout(OVERLAID, dimensions.micro_batch_size, rank_order=rank_order)
        document = ledger.step(job, SMALL_CLUSTER, divided)
        exchanges = {way: asdict(ledger.sent(document, axes, SMALL_CLUSTER)) for way, (_, axes) in WAYS.items()}
        placed.append({"placement": name, "rank_order": rank_order, "sent": exchanges, "time": document["time"]})
    return {
        "cluster": SMALL_CLUSTER,
        "layout": OVERLAID,
        "num_microbatches": OVERLAID_MICROBATCHES,
        "sequences": job.global_batch_size,
        "tokens": job.global_batch_size * job.seq_len,
        "placements": placed,
    }


def overlaid_job() -> Job:
    dimensions = Dimensions()
    return Job(dimensions.seq_len, dimensions.micro_batch_size * OVERLAID["dp"] * OVERLAID_MICROBATCHES)
