"""How many stages a second the vectorised readers read: memory, traffic and the bound of the time, on one core."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from bench.timing import Result, repeat
from nanum.account.cost import Cost
from nanum.account.memory import peak
from nanum.account.step_time import bound, stage_bound
from nanum.account.traffic import traffic
from nanum.build import build
from nanum.cluster import load as load_cluster
from nanum.division.parts import Bodies, body_space, emit_parts
from nanum.engines import load as load_engine
from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import load as load_model
from nanum.once import Once

STAGES = 100_000
ALONE = 20
WANTED = 200_000
"""Stages a second and core."""


def layouts(structure: Structure) -> tuple[Layout, np.ndarray, np.ndarray]:
    """About `STAGES` stages of random layouts on 512 GPUs: an entry for each, its stage, and pp of each layout."""
    rng = np.random.default_rng(0)
    n = STAGES // 7
    tp, pp, micro = 2 ** rng.integers(1, 4, n), 2 ** rng.integers(1, 5, n), 2 ** rng.integers(0, 3, n)
    replicate = 2 ** rng.integers(0, 3, n)
    shard = np.maximum(512 // (tp * pp * replicate), 1)
    entry = np.repeat(np.arange(n), pp)
    stage = np.arange(len(entry)) - np.repeat(np.cumsum(pp) - pp, pp)
    sizes = (replicate, shard, np.ones(n, np.int64), tp, pp, micro)
    return Layout(*(q[entry] for q in sizes), structure=structure), stage, pp


def readers() -> Iterator[Result]:
    """Emit and read about 100,000 stages of one structure, by engine; and a few of them one by one, for the ratio."""
    job = Job(8192, 2048)
    for name, zero in (("torchtitan", 3), ("megatron", 1)):
        entries, stage, pp = layouts(Structure(zero=zero, tensor="sequence", recompute="full", pipelined=True))
        engine = load_engine(name)
        together = repeat(partial(read_together, entries, stage, pp, engine, job))
        yield Result(f"memory, traffic and bound, {name}", together, len(stage), "stages", least_rate=WANTED)
        alone = repeat(partial(read_alone, entries, stage, engine, job))
        yield Result(f"  without the bound, one by one, {name}", alone, ALONE, "stages")


def read_together(entries: Layout, stage: np.ndarray, pp: np.ndarray, engine: Engine, job: Job) -> None:
    """As a search reads: bodies for distinct shapes, actions for distinct stages, and the three readers."""
    model, cluster = load_model("llama-3.1-70b"), load_cluster("64x8xh100-sxm")
    m = job.num_microbatches(entries.micro_batch_size, entries.data_ranks)[np.cumsum(pp) - pp]
    at, distinct = body_space(entries)
    bodies = Bodies(emit_parts(model, job, distinct, engine), distinct, at)
    step = build(model, job, entries, engine, stage, bodies)
    program = step.program
    peak(program)
    traffic(program)
    bound("1f1b", m, pp, stage_bound(step, Cost(cluster, step.layout), Cost(cluster, distinct), Once()))


def read_alone(entries: Layout, stage: np.ndarray, engine: Engine, job: Job) -> None:
    """A few of the stages as scalars."""
    model = load_model("llama-3.1-70b")
    for i in range(ALONE):
        sizes = (entries.dp_replicate, entries.dp_shard, entries.cp, entries.tp, entries.pp, entries.micro_batch_size)
        one = Layout(*(int(q[i]) for q in sizes), structure=entries.structure)
        program = build(model, job, one, engine, int(stage[i])).program
        peak(program)
        traffic(program)
