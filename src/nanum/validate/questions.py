"""A row as a question that a prediction answers, or every reason why it is none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from nanum.cluster import Cluster
from nanum.cluster.parse import trusted
from nanum.cluster.tables import chip_names, chip_table
from nanum.engines.engine import Engine
from nanum.engines.megatron import MODULES
from nanum.errors import Refused
from nanum.job import Job, Precision, Routing
from nanum.layout import Layout, Recompute, Schedule, Structure, TensorParallel
from nanum.model import Model
from nanum.prediction import consistent, reasons
from nanum.rules.dispatch import sharing_a_node
from nanum.units import GB, GIB
from nanum.validate.models import model_of
from nanum.validate.rows import Row
from nanum.validate.sources import Source, source_of

Quantity = Literal["step_seconds", "memory_bytes"]
Kind = Literal["allocated", "reserved", "device"]

OF_PRODUCTS = ("async TP", "tp_comm_overlap")
"""In a row's words: exchanges of tensor parallelism beside products, torchtitan's and Megatron's."""
NVLINK_72 = 72  # GPUs that one NVLink domain of a GB200 or GB300 NVL72 has
CHIPS: Mapping[str, str | Mapping[str, Any]] = {
    "A100-SXM4-80GB": "a100-sxm-80gb",
    "A100-SXM4-40GB": "a100-sxm-40gb",
    "H100-SXM5-80GB": "h100-sxm",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "V100-SXM2-32GB": "v100-sxm-32gb",
    "H100 96GB HBM2e 2.4TB/s (Grand Teton, 500W limit)": {"memory": "96 GB", "memory_bandwidth": "2.4 TB/s"},
}
"""By the names in rows, which may also be a shipped chip's own: that chip, or in what an H100 SXM differs."""
SCHEDULES: dict[str, Schedule] = {
    "1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb-h1", "ZB-2p": "zb-h2", "ZB-2p* (b/2, 2m)": "zb-h2",
    "ZB-V": "zbv", "GPipe": "gpipe",
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """One run to predict, and what was measured of it: bytes with the kind of memory that they are."""

    row: Row
    model: Model
    job: Job
    cluster: Cluster
    layout: Layout
    engine: Engine
    step_seconds: float | None
    memory_bytes: float | None
    memory_kind: Kind | None  # also of a run that did not fit


def question_of(row: Row) -> Question | list[str]:
    """The row as a question, or every reason why it cannot be asked."""
    why: list[str] = []
    source = source_of(row)
    _kind_of_row(row, why)
    model = model_of(row, source, why)
    if model and row["model.mtp_layers"]:
        model = model.predicting(row["model.mtp_layers"])
    precision = _precision(row, source, why)
    cluster = _cluster(row, source, why)
    layout = _layout(row, source, why)
    if layout and cluster and (row["dispatcher"] or source.dispatcher) == "flex" and layout.ep > 1:
        structure = replace(layout.structure, dispatcher="flex", own_experts=True)
        layout = replace(layout, structure=structure, ep_intra=int(sharing_a_node(layout, cluster.gpus_per_node)))
    engine = _engine(source, why)
    batch, sequence = row["global_batch"], row["model.seq"]
    if batch is None:
        why.append("the global batch is not stated")
    step = _step_seconds(row)
    memory, kind = _memory(row, source)
    if step is None and kind is None:
        why.append("neither a step's time nor a memory of a stated kind was measured")
    if why or not (model and precision and cluster and layout and engine):
        return why
    capacity = row["expert_capacity"]
    job = Job(sequence, batch, precision, routing=Routing(capacity, padded=capacity is not None))
    layout = consistent(layout)
    if why := reasons(model, job, cluster, layout, engine):
        return [f"impossible: {reason}" for reason in why]
    return Question(row, model, job, cluster, layout, engine, step, memory, kind)


def unasked(row: Row) -> dict[Quantity, str]:
    """Quantities of a row that are not compared, though it has them, each with the reason."""
    if row["measured.memory_gb"] is None or _memory(row, source_of(row))[1] is not None:
        return {}
    return {"memory_bytes": "whether memory is allocated, reserved or the device's is not stated"}


def _kind_of_row(row: Row, why: list[str]) -> None:
    kind = row["row_kind"] or "measured"
    if kind.startswith("analytic"):
        why.append("a formula's value, not a run")
    elif kind != "measured":
        why.append("only ratios between runs are stated")
    if "lora" in (row["task"] or "").lower():
        why.append("the rank of its LoRA is not stated")


def _precision(row: Row, source: Source, why: list[str]) -> Precision | None:
    said = (row["precision"] or source.precision).lower().replace("float8", "fp8")
    if "fp4" in said:
        why.append("fp4 is not modelled")
        return None
    if "fp8" in said:
        return "fp8"
    for name in ("bf16", "fp16", "fp32"):
        if said.startswith((name, f"amp_{name}")):
            return name
    why.append(f"precision {said} is not modelled")
    return None


def _engine(source: Source, why: list[str]) -> Engine | None:
    try:
        return source.loaded()
    except Refused as refused:
        why.extend(refused.reasons)
        return None


def _cluster(row: Row, source: Source, why: list[str]) -> Cluster | None:
    gpu, gpus, node = row["hardware.gpu"], row["layout.gpus"], row["hardware.gpus_per_node"]
    known = gpu in CHIPS or gpu in chip_names()
    if not known:
        why.append(f"no chip like '{gpu}' is shipped" if gpu else "the GPU is not stated")
    if gpus is None:
        why.append("the number of GPUs is not stated")
    if not known or gpus is None:
        return None
    if gpu.lower() in ("gb200", "gb300"):  # one domain as far as it goes
        node = max(n for n in range(1, NVLINK_72 + 1) if gpus % n == 0)
    node = min(node or 8, gpus)
    if gpus % node:
        why.append(f"{gpus} GPUs are no whole nodes of {node}")
        return None
    cluster = _made(gpu, gpus // node, node, source.network, source.reached)
    return replace(cluster, launch_blocking=True) if row["launch_blocking"] else cluster


SLOWED = (500 / 700) ** (1 / 3)
"""How far a power limit of 500 W lowers the clock of a chip made for 700 W: power grows with the clock's cube, where
the voltage follows it (P = C V^2 f)."""


def _slowed(rate: dict[str, Any]) -> dict[str, Any]:
    return {**rate, "value": rate["value"] * SLOWED, "tag": "assumed", "source": f"at 500 of 700 W: {rate['source']}"}


@lru_cache(maxsize=256)
def _made(gpu: str, nodes: int, gpus_per_node: int, network: str | None, reached: float | None) -> Cluster:
    chip = CHIPS.get(gpu, gpu)
    table: dict[str, Any] = {"nodes": nodes, "gpus_per_node": gpus_per_node, "chip": chip}
    if not isinstance(chip, str):
        shipped = chip_table("h100-sxm")
        rates = {key: {dtype: _slowed(rate) for dtype, rate in shipped[key].items()} for key in ("peak", "best")}
        table |= {"chip": {**shipped, **chip, **rates, "name": "h100-96gb"}, "intra_node": shipped["intra_node"]}
    if network:
        table["inter_node"] = {"bandwidth": network} | ({"efficiency": reached} if reached else {})
    return trusted(table, f"{nodes}x{gpus_per_node}x{gpu}", where="its row")


def _recompute(row: Row, source: Source) -> Recompute:
    said = (row["recompute"] or source.recompute).lower()
    return next((mode for mode in ("none", "selective", "full") if said.startswith(mode)), source.recompute)


def _recompute_modules(row: Row) -> tuple[str, ...]:
    """Megatron's names, where a row lists them after its mode."""
    _, _, names = (row["recompute"] or "").partition(": ")
    return tuple(name for name in names.split(", ") if name in MODULES)


def _layout(row: Row, source: Source, why: list[str]) -> Layout | None:
    tp, pp, cp, ep = (row[f"layout.{axis}"] or 1 for axis in ("tp", "pp", "cp", "ep"))
    dp, micro_batch = row["layout.dp"], row["micro_batch"]
    if dp is None and row["layout.gpus"] is not None:
        dp = max(row["layout.gpus"] // (tp * pp * cp), 1)
    if micro_batch is None:
        why.append("the micro-batch is not stated")
    schedule, chunks = _schedule(row, pp, source, why)
    if micro_batch is None or dp is None or schedule is None:
        return None
    zero = source.zero if row["layout.zero_stage"] is None else row["layout.zero_stage"]
    sp = row["layout.sequence_parallel"]
    reshard = True if source.reshard is None else source.reshard
    if source.fully_shards:
        if zero == 2:
            zero, reshard = 3, False
        elif source.reshard is None:
            reshard = pp == 1
    tensor: TensorParallel = "sequence" if (source.sequence_parallel if sp is None else sp) else "tensor"
    overlap = row["overlap"] or source.overlap
    structure = Structure(
        zero=zero,
        reshard=reshard,
        tensor=tensor,
        tp_overlap=tp > 1 and tensor == "sequence" and any(word in overlap for word in OF_PRODUCTS),
        recompute=_recompute(row, source),
        recompute_modules=_recompute_modules(row),
        schedule=schedule,
        attention=source.attention,
        compile="torch.compile" in (row["overlap"] or ""),
        virtual_stages=chunks,
        cp_kind=_cp_kind(row),
        own_experts=(row["layout.etp"] or tp) != tp,
        fp8_gather="fp8 all-gather" in (row["precision"] or ""),
        grad_sync="each" if zero == 3 else "last",
    )
    return Layout(1, dp, cp, tp, pp, micro_batch, structure, ep=ep, etp=row["layout.etp"] or 1)


def _cp_kind(row: Row) -> Literal["ring", "allgather", "ulysses"]:
    if "a2a" in (row["overlap"] or ""):
        return "ulysses"
    return "ring"


def _schedule(row: Row, pp: int, source: Source, why: list[str]) -> tuple[Schedule | None, int]:
    """The schedule and its stages a rank. A row's `vpp` in words is as many as there are layers, or nearly."""
    known = (v for v in source.virtual_stages if (row["model.layers"] or 0) % (pp * v) == 0)
    said, chunks = row["schedule"], row["layout.vpp"] or next(known, 1)
    if not isinstance(chunks, int):  # each layer a stage; embedding and head count as one
        chunks = max(((row["model.layers"] or 0) + 2) // pp, 1)
    if pp == 1:
        return "1f1b", 1
    if said is None:
        return ("interleaved" if chunks > 1 else "1f1b"), chunks
    if said not in SCHEDULES:
        why.append(f"schedule {said} is not modelled")
        return None, 1
    return SCHEDULES[said], chunks


def _step_seconds(row: Row) -> float | None:
    """As measured, or from what else was: FLOPs a second are counted in too many ways to compare."""
    for path in ("measured.step_time_s", "derived.step_time_s"):
        if row[path] is not None:
            return float(row[path])
    rate, batch, sequence, gpus = (
        row[p] for p in ("measured.tokens_per_s_per_gpu", "global_batch", "model.seq", "layout.gpus")
    )
    return batch * sequence / (rate * gpus) if rate and batch and sequence and gpus else None


def _memory(row: Row, source: Source) -> tuple[float | None, Kind | None]:
    """Bytes, and which of the three they are, as the row says or its source's entry takes for granted. Bytes are None
    where a run did not fit, the kind where there is none.
    """
    said = row["measured.memory_def"] or ""
    if "not stated" in said:
        said = f"GB {source.memory}" if source.memory else ""
    kinds: tuple[tuple[str, Kind], ...] = (
        ("nvidia-smi", "device"),
        ("reserved", "reserved"),
        ("allocated", "allocated"),
    )
    kind = next((kind for word, kind in kinds if re.search(word, said, re.IGNORECASE)), None)
    value = row["measured.memory_gb"]
    if kind is None or (value is None and not row["oom"]):
        return None, None
    if value is None:
        return None, kind
    unit = GIB if said.startswith("GiB") or kind == "device" else GB  # nvidia-smi counts in MiB
    return value * unit, kind
