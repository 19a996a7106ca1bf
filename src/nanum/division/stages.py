"""Where the parts of a model are: the distinct stages of layouts, and what each exchanges for its weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nanum.arrays import distinct, least
from nanum.blocks.ends import PositionTables, rotary_angles_bytes
from nanum.blocks.layer import LayerKinds
from nanum.blocks.pictures import pictures_bytes
from nanum.division.parts import BODY_FIELDS, Bodies
from nanum.division.weights import Exchanged, exchanged
from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import TWO_WAY, V_SHAPED, Layout, Structure
from nanum.model import Model
from nanum.once import Once
from nanum.parallel.chain import Chain, Stage
from nanum.parallel.pipeline import Position
from nanum.parallel.places import Group, divided, every_nth, groups, in_chunks, in_words
from nanum.program import Node
from nanum.schedule import rank_of, stages_of
from nanum.sharding import BATCH_AXES


@dataclass(frozen=True, eq=False)
class Staged:
    """The distinct stages of layouts and what their weights exchange, whatever is recomputed or resharded."""

    chain: Chain
    weights: Exchanged
    position: Position
    layout: Layout  # of each distinct stage
    made: Once[tuple[Node, ...]] = field(default_factory=Once)  # what their steps do alike around their weights


def place_stages(model: Model, job: Job, layout: Layout, engine: Engine, stage: Any, bodies: Bodies) -> Staged:
    """Where the parts of the model are: the distinct stages, and what each exchanges for its weights."""
    _check(layout)
    parts, at_body = bodies.parts, bodies.at
    structure = layout.structure
    stages = stages_of(structure.schedule, layout.pp, structure.virtual_stages) if structure.pipelined else layout.pp
    layers = engine.layers(model, stages, stage, structure)
    first, last = (stage == 0) * 1, (stage == stages - 1) * 1
    # Where all layers are alike it does not matter which of them a stage has.
    begins = (
        _layers_before(model, engine, stages, stage, structure) if len(bodies.parts.layers.kinds) > 1 else 0 * layers
    )
    at = None
    kinds: Any = (layers, begins, first, last, at_body, layout.pp)
    if at_body is not None:
        kinds, at = distinct(kinds)
    layers, begins, first, last, at_body, pp = kinds
    placed = _placed(parts.layers, begins, layers, structure)
    onward, back = (on_this_rank(layout, stage, stage + way) for way in (1, -1))
    where = Stage(placed, first, last, (1 - last) * (1 - onward), (1 - first) * (1 - back), at_body, onward, back)
    sizes = {f: where.take(getattr(bodies.layout, f)) for f in BODY_FIELDS}
    shapes, conventions, table = parts.shapes.embedding, parts.conventions, parts.table
    tied = bool(parts.bodies.head.shared)
    rows = shapes.part("S", ("cp",))  # of a sequence, on one rank
    given = pictures_bytes(model.patches, shapes, conventions.numerics.compute_dtype) if model.patches else None
    tables = PositionTables.of(model, shapes, conventions, structure)
    chain = Chain(
        where,
        parts.bodies,
        dtype=conventions.numerics.compute_dtype,
        tp=where.take(shapes.mesh["tp"]),
        pp=pp,
        input_bytes=where.take(8 * shapes.part("B", BATCH_AXES) * rows) if given is None else where.take(given[0]),
        target_bytes=where.take(given[1]) if given else None,
        frame_bytes=where.take(rotary_angles_bytes(model, conventions, rows)),
        tables_bytes=where.take(tables.every) + where.take(tables.first) * first,
        tables_dtype=tables.dtype,
        tied_elements=where.take(shapes.elements(table.dims, table.split)) if tied else None,
        tied_grad_bytes=where.take(parts.table_grad_bytes if tied else parts.waiting_bytes),
        table_trained=job.trained.ends,
    )
    m = job.num_microbatches(layout.micro_batch_size, layout.data_ranks)
    if structure.pipelined and structure.schedule in TWO_WAY:
        m = m // 2  # half of them enter at either end
    seen = Layout(**sizes, pp=pp, structure=layout.structure, rank_order=layout.rank_order)
    weights = exchanged(chain, parts.weights, parts.structure, engine)
    return Staged(chain, weights, Position(stage, layout.pp, m, at), seen)


def _placed(kinds: LayerKinds, begins: Any, layers: Any, structure: Structure) -> tuple[Group, ...]:
    """The layers of each stage, by the indices of their bodies."""
    if structure.in_chunks:
        chunk = structure.recompute_chunk
        return in_words(in_chunks(kinds.in_order, chunk, kinds.parts(chunk)), begins, layers)
    if structure.partly and structure.recompute_every > 1:
        return in_words(every_nth(kinds.in_order, structure.recompute_every), begins, layers)
    if structure.partly:
        return divided(kinds.runs, begins, layers, structure.recompute_layers)
    return groups(kinds.runs, begins, layers)


def _layers_before(model: Model, engine: Engine, stages: Any, stage: Any, structure: Structure) -> Any:
    """How many layers the stages before have."""
    before: Any = 0 * stage
    for earlier in range(int(np.max(stage))):
        here = engine.layers(model, stages, least(earlier + 0 * stage, stages - 1), structure)
        before = before + here * (earlier < stage)
    return before


def on_this_rank(layout: Layout, stage: Any, other: Any) -> int:
    """1 where a stage and its neighbour are on the same rank: at the turn of a V."""
    structure = layout.structure
    if structure.schedule not in V_SHAPED or not structure.pipelined:
        return 0
    ranks = [rank_of(structure.schedule, layout.pp, s) for s in (stage, other)]
    return int(ranks[0] == ranks[1] and 0 <= other < layout.pp * structure.virtual_stages)


def _check(layout: Layout) -> None:
    """Raises ValueError where a structure says otherwise than the sizes: what is emitted follows the structure."""
    if np.any((layout.tp > 1) != (layout.structure.tensor != "none")):
        raise ValueError(f"structure.tensor={layout.structure.tensor!r}, but tp={layout.tp}")
    if np.any((layout.cp > 1) != (layout.structure.cp_kind != "none")):
        raise ValueError(f"structure.cp_kind={layout.structure.cp_kind!r}, but cp={layout.cp}")
    if np.any((layout.pp > 1) != layout.structure.pipelined):
        raise ValueError(f"structure.pipelined={layout.structure.pipelined}, but pp={layout.pp}")
