"""Measure, predict, run: step times of real training on 1 and 2 ranks of this machine, beside what a measured cluster
predicts. None of the shapes is a point of the calibration. `NANUM_CLUSTER=FILE.toml` takes a calibration that is there.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanum import engines, processes
from nanum.cluster import Cluster
from nanum.cluster import load as load_cluster
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.measure import save, this_machine
from nanum.model import Attention, Mlp, Model
from nanum.prediction import predict
from nanum.verify.case import Case

STEPS, WARM_UP = 10, 3
ASKED = 0.15  # median error


def llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int) -> Model:
    return Model(
        name=f"llama {layers} x {hidden}", hidden_size=hidden, num_hidden_layers=layers, vocab_size=vocab,
        attention=Attention(heads, kv_heads, hidden // heads), mlp=Mlp(intermediate, True, "silu"), norm="rms_norm",
        position="rotary", max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip


def gpt(hidden: int, layers: int, heads: int, vocab: int) -> Model:
    return Model(
        name=f"gpt {layers} x {hidden}", hidden_size=hidden, num_hidden_layers=layers, vocab_size=vocab,
        attention=Attention(heads, heads, hidden // heads, qkv_bias=True, output_bias=True),
        mlp=Mlp(4 * hidden, False, "gelu", bias=True), norm="layer_norm",
        position="learned", max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Loop:
    """One case: what was predicted, and what each timed step took on the slowest rank."""

    name: str
    predicted: float
    steps: tuple[float, ...]

    @property
    def error(self) -> float:
        return self.predicted / statistics.median(self.steps) - 1

    def __str__(self) -> str:
        median = statistics.median(self.steps)
        spread = f"({min(self.steps):.3f} to {max(self.steps):.3f})"
        return (
            f"{self.name:<52} predicted {self.predicted:6.3f} s  measured {median:6.3f} s {spread} {self.error:+6.1%}"
        )


def cases() -> Iterator[Case]:
    """Models by layouts: one rank; two ranks of FSDP, DDP and tensor parallelism."""
    shapes = (
        ("fp32", llama(576, 4, 9, 3, 1600, 6000), 256, 2),
        ("fp32", llama(320, 6, 5, 5, 864, 5000), 384, 2),
        ("fp32", gpt(448, 4, 7, 7000), 320, 2),
        ("fp32", llama(640, 2, 10, 10, 1800, 9000), 224, 2),
        ("fp32", gpt(512, 3, 8, 3000), 448, 2),
        ("bf16", llama(256, 3, 4, 4, 704, 1500), 160, 2),
    )
    one = Layout(structure=Structure(zero=0))
    two = {
        "fsdp 2": Layout(dp_shard=2, structure=Structure(zero=3)),
        "ddp 2": Layout(dp_replicate=2, structure=Structure(zero=0)),
        "tp 2": Layout(tp=2, structure=Structure(zero=0, tensor="sequence")),
    }
    for precision, model, seq_len, batch in shapes:
        for name, layout in {"1 rank": one, **two}.items():
            if layout.tp > 1 and model.attention.num_key_value_heads % 2:
                continue
            sized = replace(layout, micro_batch_size=batch // layout.data_ranks)
            job = Job(seq_len, batch, precision)
            yield Case(f"{model.name}, {precision}, {batch} x {seq_len}, {name}", model, job, sized, steps=STEPS)


def predicted(case: Case, machine: Cluster) -> float:
    cluster = replace(machine, gpus_per_node=case.ranks)
    return predict(case.model, case.job, cluster, case.layout, engine="torch").time.step_seconds


def run(case: Case) -> tuple[float, ...]:
    """Seconds of each step, of the slowest rank, the first ones left out."""
    question: dict[str, Any] = case.question(engines.load("torch")) | {"checks": False}
    found = processes.run("nanum.live.worker", [], lambda *_: None, question={"questions": [question]})
    ranks = found["answers"][0]["ranks"]
    times = [[sum(step.values()) for step in rank["steps"]] for rank in ranks]
    return tuple(max(several) for several in zip(*times, strict=True))[WARM_UP:]


def calibration() -> Cluster:
    if named := os.environ.get("NANUM_CLUSTER"):
        return load_cluster(named)
    with TemporaryDirectory() as folder:  # through a file, as a person would
        file = Path(folder) / "here.toml"
        save(this_machine("here", lambda *_: None, device="cpu", quick=True), file, force=False)
        return load_cluster(str(file))


def closed_loop() -> Iterator[object]:
    machine = calibration()
    print(machine.measured.operation_seconds.source if machine.measured.operation_seconds else machine.name, flush=True)
    loops = []
    for case in cases():
        try:
            loop = Loop(case.name, predicted(case, machine), run(case))
        except Exception as error:
            print(f"{case.name}: {error}", file=sys.stderr)
            continue
        loops.append(loop)
        yield loop
    for ranks in ("1 rank", " 2", ""):
        errors = [abs(loop.error) for loop in loops if loop.name.endswith(ranks)]
        noise = [max(loop.steps) / min(loop.steps) - 1 for loop in loops if loop.name.endswith(ranks)]
        median, spread = statistics.median(errors), statistics.median(noise)
        what = {"1 rank": "1 rank", " 2": "2 ranks", "": "all"}[ranks]
        found = f"{len(errors):2} cases: median error {median:.1%} (asked: {ASKED:.0%}), largest {max(errors):.1%}"
        missed = "" if median <= ASKED else "  MISSED"
        yield f"{what:<8} {found}; steps of one case spread by {spread:.0%}{missed}"
