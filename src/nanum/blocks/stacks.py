"""An encoder and a decoder in one run of layers: where each begins and ends, and what is between them.

The first layer of a stack makes a bias of scores that its others take; what the encoder made is read by every layer of
the decoder. Their gradients come together from the last layer to the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from nanum.blocks.body import Body, Streams, emit, new_tape
from nanum.conventions import Conventions
from nanum.layout import Structure
from nanum.model import Attention, Layer, Model, Run
from nanum.operators.elementwise import dropout
from nanum.operators.matmul import embedding
from nanum.operators.norm import norm
from nanum.operators.relative import bias_gradient, bias_of_scores, relative_bias
from nanum.operators.tape import Tape
from nanum.sharding import Shapes, Tensor


@dataclass(frozen=True)
class Stack:
    """The kinds of its first layer and of its last, which may be one."""

    first: int
    last: int


def stack_kinds(model: Model) -> tuple[tuple[Layer, ...], tuple[Run, ...], tuple[Stack, ...]]:
    """The layers whose bodies differ, how they follow each other, and the two stacks: a stack's last layer, of which
    backward begins, is a kind apart.
    """
    n = model.encoder_layers
    ends = {n - 1, model.num_hidden_layers - 1}
    marks = [(layer, i in ends) for i, layer in enumerate(model.layers)]
    distinct = list(dict.fromkeys(marks))
    kinds = [distinct.index(mark) for mark in marks]
    runs = tuple((len(list(same)), (kind,)) for kind, same in groupby(kinds))
    stacks = Stack(kinds[0], kinds[n - 1]), Stack(kinds[n], kinds[-1])
    return tuple(layer for layer, _ in distinct), runs, stacks


def bias_of_stack(t: Tape, a: Attention, structure: Structure, *, last: bool) -> Tensor:
    """Of the scores of a layer: made here, or by the stack's first; of its `last` no gradient has arrived."""
    arrives = None if last else bias_gradient(bias_of_scores(t))
    if a.has_table:
        return t.share(relative_bias(t, causal=a.causal), arrives, borrowed=False)
    return t.share(bias_of_scores(t), arrives, borrowed=True, at_once=_at_once(structure))


def memory_of_encoder(t: Tape, splits: Streams, structure: Structure, *, last: bool) -> Tensor:
    """What the encoder made, in the residual stream's split."""
    memory = Tensor("memory", ("B", "S", "D"), splits.stream, t.dtype)
    arrives = None if last else memory.like(name="d_memory")
    return t.share(memory, arrives, borrowed=True, at_once=_at_once(structure))


def _at_once(structure: Structure) -> bool:
    """Autograd adds gradients where the tensor was made; FSDP2 first at each layer's border, by a node of its own there
    (_fsdp_param_group.py: `RegisterPostBackwardFunction`).
    """
    return structure.zero < 3


def between_body(model: Model, shapes: Shapes, conventions: Conventions, structure: Structure) -> Body:
    """From the encoder's last layer to the decoder's first: a norm, whose result the decoder's layers read, and the
    rows of the decoder's tokens, of the table that the encoder's are of.
    """
    tape = new_tape(shapes, conventions, structure)
    splits = Streams.of(structure)
    x = Tensor("x", ("B", "S", "D"), splits.stream, tape.dtype)

    def between() -> Tensor:
        memory = dropout(tape, norm(tape, x, "encoder_norm", model.norm), model.hidden_dropout)
        tape.share(memory, memory.like(name="d_memory"), borrowed=False)
        ids = Tensor("ids", ("B", "S", "V"), splits.whole, "onehot")
        y = embedding(tape, ids, "embedding", ("V", "D"), splits.stream, added=model.tie_word_embeddings)
        return dropout(tape, y, model.hidden_dropout)

    body = emit(tape, between, x=x).body(shared=("embedding",))
    return replace(body, weights=tuple(w for w in body.weights if w.name != "embedding"))


def with_encoder_norm(ends: Body, between: Body) -> Body:
    """The embedding, with the weights between the stacks: they are of one unit."""
    own = {w: g for w, g in between.weight_grads.items() if w.name != "embedding"}
    return replace(ends, weights=(*ends.weights, *between.weights), weight_grads={**ends.weight_grads, **own})


def table_gradient_bytes(between: Body, shapes: Shapes) -> Any:
    """Of the gradient that the decoder's tokens leave of the table."""
    return sum(shapes.bytes(g) for w, g in between.weight_grads.items() if w.name == "embedding")
