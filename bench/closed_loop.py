"""Measure, predict, run: step times of real training on 1 and 2 ranks of this machine, beside what a measured cluster
predicts. None of the shapes is a point of the calibration.

A machine drifts by more than the errors in question, so it is done in passes, each a calibration of its own and then
every case: the median of the predictions stands beside the median of all steps. A calibration leaves out what others do
to the machine and steps do not, so a pass waits until the machine is quiet, and says how quiet it was.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
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

PASSES = 3
PATIENCE_SECONDS = 300.0  # for others to leave the processors alone, before each pass
QUIET_SHARE = 0.05
STEPS, WARM_UP = 7, 2
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
    """One case: what each pass predicted, and what each timed step took on the slowest rank."""

    case: Case
    predictions: tuple[float, ...]
    steps: tuple[float, ...]

    @property
    def error(self) -> float:
        return statistics.median(self.predictions) / statistics.median(self.steps) - 1

    @property
    def noise(self) -> float:
        """The middle half of the steps, over their median."""
        quarters = statistics.quantiles(self.steps, n=4)
        return (quarters[2] - quarters[0]) / quarters[1]

    def __str__(self) -> str:
        predicted = f"predicted {_seconds(self.predictions)}"
        return f"{self.case.name:<46} {predicted}  measured {_seconds(self.steps)}  {self.error:+6.1%}"


def _seconds(several: tuple[float, ...]) -> str:
    return f"{statistics.median(several):6.3f} s ({min(several):.3f} to {max(several):.3f})"


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


def run(several: list[Case]) -> list[tuple[float, ...]]:
    """Seconds of each step of each case, of the slowest rank, the first ones left out."""
    torch = engines.load("torch")
    questions: list[dict[str, Any]] = [case.question(torch) | {"checks": False} for case in several]
    found = processes.run("nanum.live.worker", [], silent, question={"questions": questions})
    times = [
        [[sum(step.values()) for step in rank["steps"]] for rank in answer["ranks"]] for answer in found["answers"]
    ]
    return [tuple(max(ranks) for ranks in zip(*case, strict=True))[WARM_UP:] for case in times]


def calibration() -> Cluster:
    with TemporaryDirectory() as folder:  # through a file, as a person would
        file = Path(folder) / "here.toml"
        save(this_machine("here", silent, device="cpu", quick=True), file, force=False)
        return load_cluster(str(file))


def silent(*progress: object) -> None:
    pass


def others_share(begin: float, own: float, seconds: float) -> float:
    """Of all processors, what neither this process nor those that it waited for used since."""
    return max(0.0, busy_seconds() - begin - (own_seconds() - own)) / (seconds * (os.cpu_count() or 1))


def busy_seconds() -> float:
    """Of all processors and processes, since the machine started; 0 where Linux does not tell."""
    try:
        return sum(map(int, Path("/proc/stat").read_text().split()[1:4])) / 100
    except OSError:
        return 0.0


def own_seconds() -> float:
    return sum(
        used.ru_utime + used.ru_stime
        for used in (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def wait_for_quiet() -> None:
    """Until others leave the processors alone for a while, or patience ends."""
    patience_ends = time.monotonic() + PATIENCE_SECONDS
    quiet = 0
    while quiet < 3 and time.monotonic() < patience_ends:
        begin, own = busy_seconds(), own_seconds()
        time.sleep(2.0)
        quiet = quiet + 1 if others_share(begin, own, 2.0) < QUIET_SHARE else 0


def closed_loop() -> Iterator[object]:
    several = list(cases())
    predictions: list[list[float]] = [[] for _ in several]
    steps: list[list[float]] = [[] for _ in several]
    for i in range(PASSES):
        wait_for_quiet()
        begin, own, start = busy_seconds(), own_seconds(), time.monotonic()
        machine = calibration()
        for case, its, took, times in zip(several, predictions, steps, run(several), strict=True):
            its.append(predicted(case, machine))
            took.extend(times)
        share = others_share(begin, own, time.monotonic() - start)
        source = machine.chip.memory_bytes_per_second.source
        print(f"pass {i + 1} of {PASSES}: others used {share:.0%} of the processors; {source}", flush=True)
    loops = [Loop(c, tuple(p), tuple(s)) for c, p, s in zip(several, predictions, steps, strict=True)]
    yield from loops
    yield _summary("1 rank", [loop for loop in loops if loop.case.ranks == 1])
    yield _summary("2 ranks", [loop for loop in loops if loop.case.ranks == 2])
    yield _summary("all", loops)


def _summary(what: str, loops: list[Loop]) -> str:
    errors = sorted(abs(loop.error) for loop in loops)
    noise = statistics.median(loop.noise for loop in loops)
    median = statistics.median(errors)
    missed = "" if median <= ASKED else "  MISSED"
    return (
        f"{what:<8} {len(loops):2} cases: median error {median:.1%} (asked: {ASKED:.0%}), largest {errors[-1]:.1%}; "
        f"noise of the steps {noise:.0%}{missed}"
    )
