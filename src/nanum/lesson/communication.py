"""Part A: what is exchanged. The lesson's arithmetic, what one rank really sends, the pipeline's bubble, and the three overlaid."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nanum.job import Job
from nanum.lesson import arithmetic, ledger
from nanum.lesson.arithmetic import Dimensions

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
"""Rank orders, outermost first. With tp 8, pp 2 and dp 2 on nodes of 8: only the first keeps a tensor-parallel group in its node."""


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
        "parameters": {"nominal": arithmetic.NOMINAL_PARAMETERS, "model": ledger.MODEL, "real": real_parameters},
        "real_data_parallel_bytes": arithmetic.data_parallel_bytes(real_parameters),
    }
    for way, (divided, axes) in WAYS.items():
        count_bytes, messages = nominal[way]
        document[way] = {
            "bytes": count_bytes,
            "messages": messages,
            "growth": {grown.dimension: {"ratio": grown.ratio, "kind": grown.kind} for grown in growth[way]},
            "sent": [asdict(sent_by(divided, axes, dimensions, word)) for word in (IN_NODE, BETWEEN_NODES)],
        }
    document["bubble"] = bubble()
    document["overlaid"] = overlaid()
    return document


def sent_by(divided: dict[str, int], axes: tuple[str, ...], dimensions: Dimensions, cluster_word: str) -> ledger.Sent:
    """What one rank sends in a step of one micro-batch a data-parallel rank."""
    divided_layout = ledger.layout(**divided, micro_batch_size=dimensions.micro_batch_size)
    job = Job(dimensions.seq_len, dimensions.micro_batch_size * divided_layout.data_ranks)
    return ledger.sent(ledger.step(job, cluster_word, divided_layout), axes, cluster_word)


def bubble() -> list[dict[str, Any]]:
    """The share of a step that a stage of eight equal ones waits, from the order of its forward and backward passes."""
    return [
        {"stages": BUBBLE_STAGES, "num_microbatches": count, "fraction": ledger.bubble_fraction(BUBBLE_STAGES, count)}
        for count in BUBBLE_MICROBATCHES
    ]


def overlaid() -> list[dict[str, Any]]:
    """One job on a small cluster, in three placements of the same division."""
    dimensions = Dimensions()
    job = overlaid_job()
    placed = []
    for name, rank_order in PLACEMENTS.items():
        divided = ledger.layout(**OVERLAID, micro_batch_size=dimensions.micro_batch_size, rank_order=rank_order)
        document = ledger.step(job, SMALL_CLUSTER, divided)
        exchanges = {way: asdict(ledger.sent(document, axes, SMALL_CLUSTER)) for way, (_, axes) in WAYS.items()}
        placed.append({"placement": name, "rank_order": rank_order, "sent": exchanges, "time": document["time"]})
    return placed


def overlaid_job() -> Job:
    dimensions = Dimensions()
    return Job(dimensions.seq_len, dimensions.micro_batch_size * OVERLAID["dp"] * OVERLAID_MICROBATCHES)
