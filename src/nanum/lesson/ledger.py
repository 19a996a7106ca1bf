"""What the lesson asks of the Program: the only file of the lesson that predicts.

Every number here is read off a prediction's document; nothing is counted a second time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from nanum.cluster import Cluster, Link, Quantity
from nanum.cluster import load as load_cluster
from nanum.engines import load as load_engine
from nanum.job import Job
from nanum.layout import AXES, Layout, Structure
from nanum.lesson.arithmetic import Dimensions
from nanum.model import Attention, Mlp, Model
from nanum.model import load as load_model
from nanum.prediction import parameters as count_parameters
from nanum.prediction import predict

MODEL = "llama-2-7b"
ENGINE = "megatron"
"""It has every ZeRO stage (2 and 3 as Megatron-FSDP), and tensor parallelism without sequence parallelism."""
ONE_GPU = "1x1xh100-sxm"
Document = dict[str, Any]


@dataclass(frozen=True)
class Sent:
    """What the rank that sends the most sends in one step, over the links of one way of dividing."""

    cluster: str
    link: str
    group_size: int
    calls: int
    calls_by_kind: Mapping[str, int]
    payload_bytes: int
    wire_bytes: int
    wire_bytes_by_phase: Mapping[str, int]
    seconds: float
    exposed_seconds: float


@cache
def model(name: str = MODEL) -> Model:
    return load_model(name)


def engine() -> str:
    """The engine whose conventions are predicted, and the version that they were read at."""
    return f"{ENGINE} {load_engine(ENGINE).version}"


@cache
def cluster(word: str) -> Cluster:
    return load_cluster(word)


def resized(dimensions: Dimensions) -> Model:
    """The 7B-class model in other dimensions: heads of the same size, as many as fill the hidden size."""
    base = model()
    times, rest = divmod(dimensions.hidden_size, base.hidden_size)
    if rest:
        raise ValueError(f"hidden_size {dimensions.hidden_size} is not a multiple of {base.name}'s {base.hidden_size}")
    heads, mlp = base.attention, base.mlp
    if not isinstance(heads, Attention) or not isinstance(mlp, Mlp):
        raise ValueError(f"{base.name} is not a model of plain attention and feed-forward blocks")
    attention = replace(
        heads,
        num_attention_heads=times * heads.num_attention_heads,
        num_key_value_heads=times * heads.num_key_value_heads,
    )
    return replace(
        base,
        name=f"{base.name} resized",
        hidden_size=dimensions.hidden_size,
        num_hidden_layers=dimensions.num_hidden_layers,
        attention=attention,
        mlp=replace(mlp, intermediate_size=times * mlp.intermediate_size),
    )


def parameters(dimensions: Dimensions) -> int:
    """Parameters of the 7B-class model in these dimensions."""
    return count_parameters(resized(dimensions))


def layout(
    divided: Mapping[str, int],
    micro_batch_size: int,
    *,
    zero: int = 0,
    rank_order: tuple[str, ...] = AXES,
) -> Layout:
    """The three ways, `divided` by the sizes of dp, tp and pp that are not 1.

    Data-parallel ranks replicate, or shard where there is a ZeRO stage; tensor parallel goes without sequence parallel
    (the lesson counts its all-reduces), and the pipeline by 1F1B.
    """
    dp, tp, pp = (divided.get(way, 1) for way in ("dp", "tp", "pp"))
    return Layout(
        dp_replicate=1 if zero else dp,
        dp_shard=dp if zero else 1,
        tp=tp,
        pp=pp,
        micro_batch_size=micro_batch_size,
        structure=Structure(zero=zero, tensor="tensor" if tp > 1 else "none", pipelined=pp > 1),
        rank_order=rank_order,
    )


@cache
def step(job: Job, cluster_word: str, divided: Layout, *, without_latency: bool = False) -> Document:
    """The prediction of one step of the 7B-class model, as predict's document. Raises Refused."""
    machine = cluster(cluster_word)
    if without_latency:
        machine = replace(
            machine, intra_node=_without_latency(machine.intra_node), inter_node=_without_latency(machine.inter_node)
        )
    document: Document = predict(model(), job, machine, divided, engine=ENGINE).to_dict()
    return document


def _without_latency(link: Link) -> Link:
    return replace(link, latency_seconds=Quantity(0.0, "assumed", "a thought experiment"))


def sent(document: Document, axes: Iterable[str], cluster_word: str) -> Sent:
    """The traffic over `axes` in a prediction, of the stage whose first rank sends most; zero where none is sent."""
    asked = set(axes)
    stages: dict[int, list[Document]] = defaultdict(list)
    for row in document["communication"]:
        if asked.issuperset(row["axis"].split("+")):
            stages[row["stage"]].append(row)
    rows = max(stages.values(), key=lambda rows: sum(row["wire_bytes"] for row in rows), default=[])
    by_phase: dict[str, int] = defaultdict(int)
    by_kind: dict[str, int] = defaultdict(int)
    for row in rows:
        by_kind[row["kind"]] += int(row["calls"])
        by_phase[row["phase"]] += int(row["wire_bytes"])
    return Sent(
        cluster=cluster_word,
        link=", ".join(dict.fromkeys(str(row["link"]) for row in rows)),
        group_size=max((int(row["group_size"]) for row in rows), default=1),
        calls=sum(int(row["calls"]) for row in rows),
        calls_by_kind=dict(by_kind),
        payload_bytes=sum(int(row["payload_bytes"]) for row in rows),
        wire_bytes=sum(int(row["wire_bytes"]) for row in rows),
        wire_bytes_by_phase=dict(by_phase),
        seconds=sum(float(row["seconds"]) for row in rows),
        exposed_seconds=sum(float(row["exposed_seconds"]) for row in rows),
    )
