"""What the lesson asks of the Program: the only file of the lesson that predicts.

Every number here is read off a prediction's document; nothing is counted a second time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from nanum.cluster import Cluster
from nanum.job import Job
from nanum.layout import AXES, Layout, Structure
from nanum.lesson.arithmetic import Dimensions
from nanum.model import Model

MODEL = "llama-2-7b"
ENGINE = "megatron"
Document = dict[str, Any]


@dataclass(frozen=True)
class Sent:
    """What the rank that sends the most sends in one step, over the links of one way of dividing."""

    engine: str
    cluster: str
    link: str
    group_size: int
    calls: int
    payload_bytes: int
    wire_bytes: int
    wire_bytes_by_phase: Mapping[str, int]
    seconds: float
    exposed_seconds: float


@cache
def model(name: str = MODEL) -> Model:
    from nanum.model.presets import load

    return load(name)


@cache
def cluster(word: str) -> Cluster:
    from nanum.cluster.load import load

    return load(word)


def resized(dimensions: Dimensions) -> Model:
    """The 7B-class model in other dimensions: heads of the same size, as many as fill the hidden size."""
    base = model()
    times, rest = divmod(dimensions.hidden_size, base.hidden_size)
    if rest:
        raise ValueError(f"hidden_size {dimensions.hidden_size} is not a multiple of {base.name}'s {base.hidden_size}")
    attention = replace(
        base.attention,
        num_attention_heads=times * base.attention.num_attention_heads,
        num_key_value_heads=times * base.attention.num_key_value_heads,
    )
    return replace(
        base,
        name=f"{base.name} resized",
        hidden_size=dimensions.hidden_size,
        num_hidden_layers=dimensions.num_hidden_layers,
        attention=attention,
        mlp=replace(base.mlp, intermediate_size=times * base.mlp.intermediate_size),
    )


def parameters(dimensions: Dimensions) -> int:
    """Parameters of the 7B-class model in these dimensions."""
    job = Job(seq_len=dimensions.seq_len, global_batch_size=dimensions.micro_batch_size)
    layout = Layout(micro_batch_size=dimensions.micro_batch_size, structure=Structure(zero=0))
    return int(_predict(resized(dimensions), job, "1x1xh100-sxm", layout)["model"]["parameters"])


def layout(
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    micro_batch_size: int,
    zero: int = 0,
    rank_order: tuple[str, ...] = AXES,
) -> Layout:
    """A layout of the three ways: `dp` ranks that replicate, or shard by ZeRO; tensor parallel without sequence parallel; 1F1B."""
    structure = Structure(zero=zero, tensor="tensor" if tp > 1 else "none", pipelined=pp > 1)
    data = {"dp_shard": dp} if zero else {"dp_replicate": dp}
    return Layout(**data, tp=tp, pp=pp, micro_batch_size=micro_batch_size, structure=structure, rank_order=rank_order)


@cache
def step(job: Job, cluster_word: str, divided: Layout, engine: str = ENGINE) -> Document:
    """The prediction of one step of the 7B-class model, as predict's document. Raises Refused."""
    return _predict(model(), job, cluster_word, divided, engine)


def sent(document: Document, axes: Iterable[str], cluster_word: str) -> Sent:
    """The traffic over `axes` in a prediction, of the stage whose first rank sends the most. All zero where none is sent."""
    asked = set(axes)
    stages: dict[int, list[Document]] = defaultdict(list)
    for row in document["communication"]:
        if asked.issuperset(row["axis"].split("+")):
            stages[row["stage"]].append(row)
    rows = max(stages.values(), key=lambda rows: sum(row["wire_bytes"] for row in rows), default=[])
    by_phase: dict[str, int] = defaultdict(int)
    for row in rows:
        by_phase[row["phase"]] += int(row["wire_bytes"])
    return Sent(
        engine=f"{document['engine']['name']} {document['engine']['version']}",
        cluster=cluster_word,
        link=", ".join(dict.fromkeys(str(row["link"]) for row in rows)),
        group_size=max((int(row["group_size"]) for row in rows), default=1),
        calls=sum(int(row["calls"]) for row in rows),
        payload_bytes=sum(int(row["payload_bytes"]) for row in rows),
        wire_bytes=sum(int(row["wire_bytes"]) for row in rows),
        wire_bytes_by_phase=dict(by_phase),
        seconds=sum(float(row["seconds"]) for row in rows),
        exposed_seconds=sum(float(row["exposed_seconds"]) for row in rows),
    )


def _predict(model: Model, job: Job, cluster_word: str, divided: Layout, engine: str = ENGINE) -> Document:
    from nanum.predict import predict

    document: Document = predict(model, job, cluster(cluster_word), divided, engine=engine).to_dict()
    return document
