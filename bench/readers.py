"""How many stages a second the vectorised readers read: memory, traffic and the bound of the time, on one core."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bench.timing import Result, repeat
from nanum.account.cost import Cost
from nanum.account.memory import peak
from nanum.account.step_time import bound, stage_bound
from nanum.account.traffic import traffic
from nanum.build import Bodies, body_space, build, emit_parts
from nanum.cluster import load as load_cluster
from nanum.engines import load as load_engine
from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import load as load_model

STAGES = 100_000
ALONE = 20
WANTED = 200_000
"""Stages a second and core."""


def layouts(structure: Structure) -> tuple[Layout, np.ndarray, np.ndarray]:
    """About `STAGES` stages of random layouts of Llama-3.1-70B on 512 GPUs: entries, their stages, and pp of each layout."""
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
    """Emit and read about 100,000 stages of one structure, for each engine."""
    model, job, cluster = load_model("llama-3.1-70b"), Job(8192, 2048), load_cluster("64x8xh100-sxm")
    for name, zero in (("torchtitan", 3), ("megatron", 1)):
        engine = load_engine(name)
        entries, stage, pp = layouts(Structure(zero=zero, tensor="sequence", recompute="full", pipelined=True))
        first = np.cumsum(pp) - pp
        m = (job.global_batch_size // (entries.micro_batch_size * entries.data_ranks))[first]

        def work(
            entries: Layout = entries,
            stage: np.ndarray = stage,
            pp: np.ndarray = pp,
            m: np.ndarray = m,
            engine: Engine = engine,
        ) -> None:
            at, distinct = body_space(entries)
            bodies = Bodies(emit_parts(model, job, distinct, engine), distinct, at)
            step = build(model, job, entries, engine, stage, bodies)
            program = step.program
            peak(program)
            traffic(program)
            bound("1f1b", m, pp, stage_bound(step, Cost(cluster, step.layout), Cost(cluster, distinct), {}))

        yield Result(f"memory, traffic and bound, {name}", repeat(work), len(stage), "stages", f"{WANTED:,} stages/s")
        yield Result(
            f"  the same, one stage at a time, {name}",
            repeat(lambda: work_alone(entries, stage, engine, job)),
            ALONE,
            "stages",
        )  # noqa: B023


def work_alone(entries: Layout, stage: np.ndarray, engine: Engine, job: Job) -> None:
    """A few of the stages as scalars, for the ratio."""
    model = load_model("llama-3.1-70b")
    for i in range(ALONE):
        sizes = (entries.dp_replicate, entries.dp_shard, entries.cp, entries.tp, entries.pp, entries.micro_batch_size)
        one = Layout(*(int(q[i]) for q in sizes), structure=entries.structure)
        program = build(model, job, one, engine, int(stage[i])).program
        peak(program)
        traffic(program)
