"""The sole composer: a model, a job and a layout under an engine's conventions become the step of a pipeline stage.

The order of division is this file: tensors are stated with their splits, tp and sp are derived from them and recompute
is forward again (`division.parts`), stages have their parts and weights their exchanges (`division.stages`), weights
are gathered and reduced around the parts (`division.data_parallel`), and the pipeline orders micro-batches. Sizes are
ints or arrays: the same calls serve one layout and a hundred thousand of one structure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from nanum.division.data_parallel import data_parallel
from nanum.division.parts import Bodies, Parts, emit_bodies
from nanum.division.stages import Staged, on_this_rank, place_stages
from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import ONE_CHUNK, Layout, Structure
from nanum.model import Model
from nanum.parallel.chunks import RankStep
from nanum.parallel.pipeline import Step, step
from nanum.parallel.stacks import beside_layers
from nanum.schedule import order, stage_of


def build(
    model: Model,
    job: Job,
    layout: Layout,
    engine: Engine,
    stage: Any,
    bodies: Bodies | None = None,
    *,
    at: Mapping[str, int] | None = None,
) -> Step:
    """One step of pipeline stage `stage` (an int, or an array beside the layout's arrays), of pp * virtual_stages.

    Emitted once for what differs: bodies for distinct shapes, actions for distinct stages, and counts for every stage.
    `bodies` are those of an earlier call, where they are the same (`emit_parts` says of what). `at` is the index along
    each axis of the rank that is meant, of one layout: ranks of a group differ where a dim does not divide. Without it,
    it is the first.
    """
    bodies = bodies or emit_bodies(model, job, layout, engine, at)
    staged = place_stages(model, job, layout, engine, stage, bodies)
    return assemble(staged, bodies.parts, layout.structure, engine)


def assemble(staged: Staged, parts: Parts, structure: Structure, engine: Engine) -> Step:
    """The step of these stages: data parallelism around the parts, and the pipeline's actions in order."""
    conventions = parts.conventions
    parks = conventions.parks if "activations" in structure.offload else "none"
    chain = replace(staged.chain, bodies=parts.bodies, parks=parks)
    if parts.between is not None:
        chain = replace(chain, beside=beside_layers(parts.bodies, parts.between, chain.stage))
    data = data_parallel(chain, staged, parts, structure, engine)
    return step(chain, data, structure, conventions, staged.position, staged.layout)


def build_rank(
    model: Model,
    job: Job,
    layout: Layout,
    engine: Engine,
    rank: int,
    bodies: Bodies | None = None,
    *,
    at: Mapping[str, int] | None = None,
) -> Step | RankStep:
    """One step of pipeline rank `rank`, of one layout: its only stage's, or all of its stages' in the schedule's order.
    `bodies` and `at` are as in `build`.

    Raises ValueError where the schedule has no order for the layout's sizes.
    """
    return next(_ranks(model, job, layout, engine, bodies or emit_bodies(model, job, layout, engine, at), [rank]))


def build_ranks(model: Model, job: Job, layout: Layout, engine: Engine) -> tuple[Step | RankStep, ...]:
    """One step of each pipeline rank of one layout, as `build_rank`. Stages that do alike have the same nodes."""
    bodies = emit_bodies(model, job, layout, engine)
    return tuple(_ranks(model, job, layout, engine, bodies, range(layout.pp)))


def _ranks(
    model: Model, job: Job, layout: Layout, engine: Engine, bodies: Bodies, ranks: Iterable[int]
) -> Iterator[Step | RankStep]:
    structure, pp = layout.structure, layout.pp
    several = structure.pipelined and structure.schedule not in ONE_CHUNK
    chunks = structure.virtual_stages if several else 1
    made: dict[Any, Step] = {}

    def of(stage: int) -> Step:
        here = build(model, job, layout, engine, stage, bodies)
        like = (*here.holds, *(on_this_rank(layout, stage, stage + way) for way in (1, -1)))
        return replace(made.setdefault(like, here), position=here.position)

    for rank in ranks:
        if not several:
            yield build(model, job, layout, engine, rank, bodies)
            continue
        table = order(structure.schedule, pp, job.num_microbatches(layout.micro_batch_size, layout.data_ranks), chunks)
        steps = tuple(of(stage_of(structure.schedule, pp, rank, chunk)) for chunk in range(chunks))
        yield RankStep(steps, table[rank], structure, bodies.parts.conventions.chunk_weights, rank)
