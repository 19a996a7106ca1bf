"""The parts of a model, emitted with their tensors' splits stated: embedding, layers and head, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nanum.arrays import distinct
from nanum.blocks.body import Body, Emitted
from nanum.blocks.ends import embedding_body, head_body, head_under
from nanum.blocks.experts import crowded
from nanum.blocks.layer import LayerKinds, emit_layers, layer_body, layer_dims
from nanum.blocks.mtp import BOTH
from nanum.blocks.pictures import picture_dims
from nanum.blocks.stacks import between_body, table_gradient_bytes, with_encoder_norm
from nanum.conventions import Conventions
from nanum.division.weights import Weights, replicates
from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import Layout, Recompute, Structure
from nanum.model import Layer, Model
from nanum.parallel.chain import Each
from nanum.parallel.stacks import Between
from nanum.sharding import Shapes, Tensor

BODY_FIELDS = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "ep_intra", "micro_batch_size")
"""What a part of the model can see of a layout. Layouts that differ in nothing else share its body."""


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


def body_space(layout: Layout) -> tuple[np.ndarray | None, Layout]:
    """The place of each layout among those that are distinct to a body, and these."""
    columns = [getattr(layout, f) for f in BODY_FIELDS]
    if not any(isinstance(c, np.ndarray) for c in (*columns, layout.pp)):
        return None, layout
    rows, at = distinct([*columns, 0 * layout.pp])
    fields: dict[str, Any] = dict(zip(BODY_FIELDS, rows, strict=False))
    return at, Layout(**fields, pp=1, structure=layout.structure, rank_order=layout.rank_order)


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
    weights = Weights(shapes, conventions, structure.zero, replicates(structure, engine), structure.own_experts, bodies)
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
