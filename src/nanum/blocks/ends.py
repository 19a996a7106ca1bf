"""The two ends of a decoder: the embedding, and the last norm with the head and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanum.blocks.body import Body, Emitted, Streams, emit, new_tape
from nanum.blocks.mtp import further, kept_of_modules
from nanum.blocks.pictures import classifier_body, picture_body
from nanum.conventions import EVERYTHING, MTP_MODULE, Conventions
from nanum.dtypes import ITEMSIZE
from nanum.job import ALL, Trained
from nanum.layout import Structure
from nanum.model import Model
from nanum.operators.chunked_loss import chunked, fused
from nanum.operators.elementwise import activated, capped, dropout, residual, times_a_number
from nanum.operators.loss import cross_entropy
from nanum.operators.matmul import embedding, linear
from nanum.operators.norm import norm
from nanum.operators.tape import Tape
from nanum.sharding import Shapes, Tensor


def embedding_body(
    model: Model, shapes: Shapes, conventions: Conventions, structure: Structure, trained: Trained = ALL
) -> Body:
    """Token rows (and learned position rows): the residual stream's beginning."""
    if model.patches is not None:
        return picture_body(model, shapes, conventions, structure, trained)
    tape = new_tape(shapes, conventions, structure, trained, own_trained=trained.ends)
    splits = Streams.of(structure)

    def embed() -> Tensor:
        ids = Tensor("ids", ("B", "S", "V"), splits.whole, "onehot")
        both = model.tie_word_embeddings and not structure.pipelined
        x = embedding(tape, ids, "embedding", ("V", width(model)), splits.stream, added=both)
        if model.embedding_size:
            x = linear(tape, x, "project_in", ("D", "W"), {}, ("B", "S", "D"), splits.stream)
        if model.token_types:
            types = Tensor("types", ("B", "S", "types"), splits.stream, "onehot")
            x = residual(
                tape, x, embedding(tape, types, "token_types", ("types", "D"), splits.stream, split_rows=False)
            )
        if model.position == "learned":
            positions = Tensor("positions", ("B", "S", "P"), splits.stream, "onehot")
            x = residual(tape, x, embedding(tape, positions, "positions", ("P", "D"), splits.stream, split_rows=False))
        if model.embedding_norm:
            x = norm(tape, x, "embedding_norm", model.norm)
        if model.position == "rotary" and conventions.rope_in_forward:
            rotary_tables(tape, model)
        return dropout(tape, x, model.hidden_dropout * model.drops_embedding)

    return emit(tape, embed).body()


def width(model: Model) -> str:
    """The dim of the rows of the embedding's table."""
    return "W" if model.embedding_size else "D"


def rotary_tables(tape: Tape, model: Model) -> None:
    """Cosines and sines [S, rotary_dim] of a rank's own rows, made in the forward pass and held until backward has
    passed the layers.
    """
    rows = tape.shapes.part("S", ("cp",))
    tables = tape.buffer("rotary_tables", _tables_bytes(model, rows, tape.dtype))
    tape.emit("rope", (), (tables,))
    tape.until_backward_has_passed(tables)


def _tables_bytes(model: Model, rows: Any, dtype: str) -> Any:
    """Of cosines and sines [rows, rotary_dim]."""
    return 2 * rows * model.rotary_dim * ITEMSIZE[dtype]


@dataclass(frozen=True)
class PositionTables:
    """What a stage has of positions for the whole run, in bytes: on every stage, and on the first alone."""

    dtype: str
    every: Any
    first: Any

    @classmethod
    def of(cls, model: Model, shapes: Shapes, conventions: Conventions, structure: Structure) -> PositionTables:
        """Rotary tables are in the dtype of what they turn; of learned positions it is which rows to look up."""
        if model.position == "rotary":
            dtype = conventions.numerics.compute_dtype
            there = not conventions.rope_in_forward
            return cls(dtype, _tables_bytes(model, shapes.part("S", ("cp",)), dtype) * there, 0)
        tables = (model.position == "learned" and model.patches is None) + (model.token_types > 0)
        return cls("int64", 0, tables * ITEMSIZE["int64"] * shapes.part("S", Streams.of(structure).stream["S"]))


def rotary_angles_bytes(model: Model, conventions: Conventions, rows: Any) -> Any:
    """fp32 angles of a rank's `rows` that the model's frame holds until its forward returns: [rows, rotary_dim/2], the
    same twice over, and frequencies.
    """
    if model.position != "rotary" or not conventions.rope_in_forward:
        return 0
    turned = model.rotary_dim
    return 4 * (rows * turned // 2 + rows * turned + turned // 2)


def head_body(
    model: Model, shapes: Shapes, conventions: Conventions, structure: Structure, trained: Trained = ALL
) -> Body:
    """The last norm, the logits and the loss. Logits stay split over the vocabulary where the engine's loss is
    parallel.
    """
    if model.patches is not None:
        return classifier_body(model, shapes, conventions, structure, trained)
    tape = new_tape(shapes, conventions, structure, trained, own_trained=trained.ends)
    splits = Streams.of(structure)
    y = Tensor("y", ("B", "S", "D"), splits.stream, tape.dtype)
    split = {"V": tape.tp} if tape.tp else {}

    def project(t: Tape, h: Tensor, weight: Tensor | None = None) -> Tensor:
        vocabulary = t.tp if conventions.loss_parallel else ()
        want = {**splits.whole, "V": vocabulary}
        logits = linear(
            t, h, "head", ("V", h.dims[-1]), split, ("B", "S", "V"), want, bias=model.head_bias, weight=weight
        )
        return logits if model.logit_cap is None else capped(t, logits)

    def own_logits(h: Tensor) -> Tensor:
        """The model's own logits, after those of further tokens and their losses."""
        if not model.mtp_layers:
            return project(tape, h)
        table = tape.weight(shared_with_embedding(model)[0], ("V", "D"), split)
        own, *others = further(tape, h, model, splits, table)
        weight = table if model.tie_word_embeddings else tape.weight("head", ("V", "D"), split)
        for state in others:
            cross_entropy(tape, project(tape, state, weight))
        return project(tape, own, weight)

    def head() -> None:
        h = norm(tape, y, "norm", model.norm) if model.final_norm else y
        if model.encoder_layers:
            h = dropout(tape, h, model.hidden_dropout)
        if model.scaled_head:
            h = times_a_number(tape, h, "scale_head")
        if model.head_transform:
            h = linear(tape, h, "head_dense", ("W", "D"), {}, ("B", "S", "W"), splits.stream, bias=True)
            h = norm(tape, activated(tape, "gelu", h), "head_norm", model.norm)
        elif model.embedding_size:
            h = linear(tape, h, "project_out", ("W", "D"), {}, ("B", "S", "W"), splits.stream)
        if structure.loss == "fused":  # in the model's own forward pass
            fused(tape, h, tape.weight("head", ("V", h.dims[-1])))
            tape.frame(y, h)
            tape.mark("post_forward")
            return
        if structure.loss == "chunked":
            tape.frame(y)
            tape.mark("post_forward")
            chunked(tape, h, splits.whole, structure.loss_chunks, project)
            return
        logits = own_logits(h)
        tape.frame(y, h)
        tape.mark("post_forward")
        if conventions.step_keeps_logits:
            tape.kept = (logits,)
        cross_entropy(tape, logits)

    return head_under(emit(tape, head, x=y), structure, shared_with_embedding(model))


def shared_with_embedding(model: Model) -> tuple[str, ...]:
    """The head's name of a table that it shares with the embedding: a tied one, or that in which its modules of
    multi-token prediction look tokens up.
    """
    if model.tie_word_embeddings:
        return ("head",)
    return ("embedding",) if model.mtp_layers else ()


def head_under(head: Emitted, structure: Structure, shared: tuple[str, ...]) -> Body:
    """The head under a recompute mode, which its modules of multi-token prediction alone are run again by."""
    several = any(MTP_MODULE in op.regions for op in head.tape.forward)
    return head.body(kept_of_modules(head.tape.conventions, structure) if several else EVERYTHING, shared)
