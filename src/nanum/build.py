"""The sole composer: a model, a job and a layout under an engine's conventions become the step of a pipeline stage.

The order of division is this file: tensors are stated with their splits (blocks), tp and sp are derived from them,
recompute is forward again, weights are gathered and reduced around the parts (parallel), and the pipeline orders
micro-batches. Sizes are ints or arrays: the same calls serve one layout and a hundred thousand of one structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np

from nanum.arrays import distinct, least
from nanum.blocks.body import Body, Emitted
from nanum.blocks.ends import PositionTables, embedding_body, head_body, head_under, rotary_angles_bytes
from nanum.blocks.experts import crowded
from nanum.blocks.layer import LayerKinds, emit_layers, layer_body, layer_dims
from nanum.blocks.mtp import BOTH
from nanum.blocks.pictures import picture_dims, pictures_bytes
from nanum.blocks.stacks import between_body, table_gradient_bytes, with_encoder_norm
from nanum.conventions import Conventions
from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import ONE_CHUNK, TWO_WAY, V_SHAPED, Layout, Recompute, Structure
from nanum.model import Layer, Model
from nanum.once import Once
from nanum.parallel.accumulated import Accumulated
from nanum.parallel.chain import Chain, Each, Stage
from nanum.parallel.chunks import RankStep
from nanum.parallel.flat_buffers import Buffer, FlatBuffers, buffer
from nanum.parallel.fully_shard import FullyShard
from nanum.parallel.live_shards import LiveShards
from nanum.parallel.partitioned import Partitioned
from nanum.parallel.pipeline import DataParallel, Position, Step, step
from nanum.parallel.places import Group, divided, every_nth, groups, in_chunks, in_words
from nanum.parallel.replicated import DataRanks, Replicated
from nanum.parallel.stacks import Between, beside_layers
from nanum.parallel.units import Unit, unit
from nanum.program import Node
from nanum.schedule import order, rank_of, stage_of, stages_of
from nanum.sharding import BATCH_AXES, ZERO_AXES, Shapes, Tensor

T = TypeVar("T")
BODY_FIELDS = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "ep_intra", "micro_batch_size")
"""What a part of the model can see of a layout. Layouts that differ in nothing else share its body."""


@dataclass(frozen=True, eq=False)
class Weights:
    """What the weights of the parts exchange, and those of the head without its table (which is the embedding's, where
    the two are tied and on one stage).
    """

    shapes: Each[Shapes]
    conventions: Conventions
    zero: int
    whole: bool  # each rank stores them whole
    own_experts: bool  # do experts lie on a mesh of their own?
    bodies: Each[Body]

    @cached_property
    def units(self) -> tuple[Each[Unit], Unit]:
        return self._made(
            lambda shapes, weights, grads: unit(shapes, weights, grads, self.conventions, whole=self.whole)
        )

    @cached_property
    def buffers(self) -> list[tuple[Each[Buffer], Buffer]]:
        """Of each mesh, beginning with the one that all but experts lie on, and of what is stored in fp8 there."""

        def on(mesh: bool, fp8: bool) -> tuple[Each[Buffer], Buffer]:
            given = self.conventions, self.zero
            return self._made(
                lambda shapes, weights, grads: buffer(shapes, weights, grads, *given, experts=mesh, fp8=fp8)
            )

        meshes = (False, True)[: 1 + self.own_experts]
        return [*(on(mesh, False) for mesh in meshes), *([on(False, True)] if self.conventions.fp8_gather else [])]

    def _made(self, make: Callable[[Shapes, tuple[Tensor, ...], Mapping[Tensor, Tensor]], T]) -> tuple[Each[T], T]:
        head = self.bodies.head
        without = tuple(w for w in head.weights if w.name not in head.shared)
        each = self.shapes.zip(self.bodies).map(lambda both: make(both[0], both[1].weights, both[1].weight_grads))
        return each, make(self.shapes.head, without, head.weight_grads)


@dataclass(frozen=True, eq=False)
class Parts:
    """The bodies of a model's parts, in the space of their own shapes, and what their weights exchange."""

    shapes: Each[Shapes]
    conventions: Conventions
    structure: Structure
    layers: LayerKinds
    emitted_layers: tuple[Emitted, ...]
    bodies: Each[Body]
    weights: Weights
    between: Between | None = None  # an encoder and a decoder

    def recomputing(self, recompute: Recompute) -> Parts:
        """The same parts under another recompute mode: only what a layer keeps differs."""
        structure = replace(self.structure, recompute=recompute)
        layers = tuple(layer_body(emitted, recompute) for emitted in self.emitted_layers)
        head = self.bodies.head
        if head.emitted is not None:
            head = head_under(head.emitted, structure, head.shared)
        return replace(self, structure=structure, bodies=replace(self.bodies, layers=layers, head=head))

    @property
    def table(self) -> Tensor:
        """The embedding's weight: rows of the vocabulary."""
        return self.bodies.embedding.weights[0]

    @property
    def table_grad_bytes(self) -> Any:
        """The gradient that the head leaves for a table that it shares."""
        head = self.bodies.head
        return sum(self.shapes.head.bytes(g) for w, g in head.weight_grads.items() if w.name in head.shared)

    @property
    def waiting_bytes(self) -> Any:
        """The gradient of an untied table that the embedding's is added to: what a decoder's tokens leave."""
        return table_gradient_bytes(self.between.body, self.shapes.embedding) if self.between else 0


@dataclass(frozen=True, eq=False)
class Bodies:
    """Parts over the distinct layouts that a body sees, and the place of each layout among them."""

    parts: Parts
    layout: Layout
    at: np.ndarray | None


def emit_bodies(model: Model, job: Job, layout: Layout, engine: Engine, at: Mapping[str, int] | None = None) -> Bodies:
    place, distinct_layout = body_space(layout)
    return Bodies(emit_parts(model, job, distinct_layout, engine, at), distinct_layout, place)


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
    return assemble(place_stages(model, job, layout, engine, stage, bodies), bodies.parts, layout.structure, engine)


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
        like = (*here.holds, *(_on_this_rank(layout, stage, stage + way) for way in (1, -1)))
        return replace(made.setdefault(like, here), position=here.position)

    for rank in ranks:
        if not several:
            yield build(model, job, layout, engine, rank, bodies)
            continue
        table = order(structure.schedule, pp, job.num_microbatches(layout.micro_batch_size, layout.data_ranks), chunks)
        steps = tuple(of(stage_of(structure.schedule, pp, rank, chunk)) for chunk in range(chunks))
        yield RankStep(steps, table[rank], structure, bodies.parts.conventions.chunk_weights, rank)


@dataclass(frozen=True, eq=False)
class Staged:
    """The distinct stages of layouts and what their weights exchange, whatever is recomputed or resharded."""

    chain: Chain
    weights: Each[Unit] | tuple[Each[Buffer], ...]
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
    onward, back = (_on_this_rank(layout, stage, stage + way) for way in (1, -1))
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
    return Staged(chain, _exchanged(chain, parts, engine), Position(stage, layout.pp, m, at), seen)


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


def _on_this_rank(layout: Layout, stage: Any, other: Any) -> int:
    """1 where a stage and its neighbour are on the same rank: at the turn of a V."""
    structure = layout.structure
    if structure.schedule not in V_SHAPED or not structure.pipelined:
        return 0
    ranks = [rank_of(structure.schedule, layout.pp, s) for s in (stage, other)]
    return int(ranks[0] == ranks[1] and 0 <= other < layout.pp * structure.virtual_stages)


def assemble(staged: Staged, parts: Parts, structure: Structure, engine: Engine) -> Step:
    """The step of these stages: data parallelism around the parts, and the pipeline's actions in order."""
    conventions = parts.conventions
    parks = conventions.parks if "activations" in structure.offload else "none"
    chain = replace(staged.chain, bodies=parts.bodies, parks=parks)
    if parts.between is not None:
        chain = replace(chain, beside=beside_layers(parts.bodies, parts.between, chain.stage))
    weights = staged.weights
    data: DataParallel
    if engine.data_parallel == "flat_buffers":
        ranks = parts.shapes.embedding.ranks(("dp_replicate", "dp_shard", "cp"))
        data = FlatBuffers(chain, conventions, structure, cast(tuple[Each[Buffer], ...], weights), data_ranks=ranks)
    elif _flattens(structure, engine):  # experts of their own mesh are refused
        (buffers,) = cast(tuple[Each[Buffer]], weights)
        way = Accumulated if engine.data_parallel == "accumulated" else Partitioned
        data = way(chain, conventions, structure, buffers)
    elif engine.data_parallel == "partitioned":
        ranks = chain.stage.take(parts.shapes.embedding.ranks(ZERO_AXES))
        data = LiveShards(chain, conventions, structure, cast(Each[Unit], weights), ranks)
    elif _replicates(structure, engine):
        data = Replicated(
            chain, conventions, structure, cast(Each[Unit], weights), DataRanks.of(parts.shapes.embedding, chain.stage)
        )
    else:
        data = FullyShard(chain, conventions, structure, cast(Each[Unit], weights), staged.made)
    return step(chain, data, structure, conventions, staged.position, staged.layout)


def _replicates(structure: Structure, engine: Engine) -> bool:
    """Do ranks store weights whole, as a plain module or under DDP?"""
    return engine.data_parallel == "plain_or_fully_shard" and structure.zero < 3


def _flattens(structure: Structure, engine: Engine) -> bool:
    """Do weights or their gradients lie in flat buffers, which are cut anywhere?"""
    return engine.data_parallel in ("flat_buffers", "accumulated") or (
        engine.data_parallel == "partitioned" and structure.zero < 3
    )


def _check(layout: Layout) -> None:
    """Raises ValueError where a structure says otherwise than the sizes: what is emitted follows the structure."""
    if np.any((layout.tp > 1) != (layout.structure.tensor != "none")):
        raise ValueError(f"structure.tensor={layout.structure.tensor!r}, but tp={layout.tp}")
    if np.any((layout.cp > 1) != (layout.structure.cp_kind != "none")):
        raise ValueError(f"structure.cp_kind={layout.structure.cp_kind!r}, but cp={layout.cp}")
    if np.any((layout.pp > 1) != layout.structure.pipelined):
        raise ValueError(f"structure.pipelined={layout.structure.pipelined}, but pp={layout.pp}")


def emit_parts(model: Model, job: Job, layout: Layout, engine: Engine, at: Mapping[str, int] | None = None) -> Parts:
    """Embedding, layers and head, forward and backward, with their tensors' splits stated.

    They depend on the engine, the sizes named in `BODY_FIELDS`, the rank that is meant (`at`), and of the structure on
    all but the schedule and the pipeline.
    """
    structure = layout.structure
    conventions = engine.conventions(model, job, structure)
    mesh, dims = layout.mesh, _dims(model, job, layout, conventions)
    ends = Shapes(mesh, dims, at)
    layers = LayerKinds.of(model, job.trained)

    def around(kind: Layer, **more: Any) -> Shapes:
        sizes = {**dims, **layer_dims(kind, dims, layout, job.routing), **more}
        return Shapes(mesh, sizes, at, crowded(kind, layout, job))

    of_parts = layers.parts(structure.recompute_chunk if structure.in_chunks else 1)
    of_kinds = tuple(around(layers.kinds[part[0]]) for part in of_parts)  # in a chunk all are of one size
    of_head = around(model.layers[-1], **{BOTH: 2 * model.hidden_size}) if model.mtp_layers else ends
    given = conventions, structure, job.trained
    emitted = tuple(
        emit_layers(
            model,
            tuple(layers.kinds[kind] for kind in part),
            here,
            *given,
            given_grad=layers.given_grad(part[0]),
            last=layers.is_last(part[0]),
        )
        for part, here in zip(of_parts, of_kinds, strict=True)
    )
    modes: tuple[Recompute, ...] = ("full", "none") if structure.partly else (structure.recompute,)
    bodies = Each(
        embedding_body(model, ends, *given),
        tuple(layer_body(layer, mode) for mode in modes for layer in emitted),
        head_body(model, of_head, *given),
    )
    between: Between | None = None
    if layers.stacks:
        joint = between_body(model, ends, conventions, structure)
        table = table_gradient_bytes(joint, ends) if model.tie_word_embeddings else 0
        between = Between(layers.stacks, joint, table)
        bodies = replace(bodies, embedding=with_encoder_norm(bodies.embedding, joint))
    shapes = Each(ends, of_kinds * len(modes), of_head)
    weights = Weights(
        shapes, conventions, structure.zero, _replicates(structure, engine), structure.own_experts, bodies
    )
    return Parts(shapes, conventions, structure, layers, emitted, bodies, weights, between)


def _dims(model: Model, job: Job, layout: Layout, conventions: Conventions) -> dict[str, Any]:
    """Global sizes. The vocabulary is padded as the engine pads it."""
    multiple = conventions.vocab_multiple_per_tp * (layout.tp if conventions.vocab_multiple_per_tp > 1 else 1)
    multiple = 1 if model.patches else multiple  # classes are no vocabulary
    return {
        "B": layout.micro_batch_size * layout.data_ranks,
        "S": job.seq_len,
        "T": job.seq_len,  # rows of keys
        "D": model.hidden_size,
        "V": -(-model.vocab_size // multiple) * multiple,
        "P": model.max_position_embeddings + model.unused_positions,
        "W": model.embedding_size or model.hidden_size,
        "R": job.trained.lora_rank,
        "types": model.token_types,
        "pair": 2,
        **picture_dims(model.patches, job.seq_len),
    }


def _exchanged(chain: Chain, parts: Parts, engine: Engine) -> Each[Unit] | tuple[Each[Buffer], ...]:
    """Units or buffers of the parts, on each distinct stage."""
    if _flattens(parts.structure, engine):
        return tuple(_on_stages(chain, *made) for made in parts.weights.buffers)
    units = _on_stages(chain, *parts.weights.units)
    if parts.conventions.units == "root" and not _replicates(parts.structure, engine):
        return Each(units.embedding + units.head, units.layers, units.head.times(0, lambda q: q))
    return units


W = TypeVar("W", Unit, Buffer)


def _on_stages(chain: Chain, each: Each[W], rest: W) -> Each[W]:
    """A table that embedding and head share is the embedding's, where both are; `rest` is the head without it."""
    s = chain.stage
    shares = s.embeds * s.heads * (chain.tied_elements is not None)
    head = each.head.times(s.heads - shares, s.take) + rest.times(shares, s.take)
    layers = tuple(layer.times(1, s.take) for layer in each.layers)
    return Each(each.embedding.times(s.embeds, s.take), layers, head)


def body_space(layout: Layout) -> tuple[np.ndarray | None, Layout]:
    """The place of each layout among those that are distinct to a body, and these."""
    columns = [getattr(layout, f) for f in BODY_FIELDS]
    if not any(isinstance(c, np.ndarray) for c in (*columns, layout.pp)):
        return None, layout
    rows, at = distinct([*columns, 0 * layout.pp])
    fields: dict[str, Any] = dict(zip(BODY_FIELDS, rows, strict=False))
    return at, Layout(**fields, pp=1, structure=layout.structure, rank_order=layout.rank_order)
