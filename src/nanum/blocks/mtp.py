"""Multi-token prediction: modules after the last layer, each of which predicts one token further (DeepSeek-V3, arXiv
2412.19437, section 2.2).

As Megatron-LM has it (core/transformer/multi_token_prediction.py, d98e8a6): what is normed for the head is joined to
the embedding of the token that is then known, each normed once more, and projected to the hidden size; a layer of the
model's last kind and a norm follow. The head, its loss and the embedding are the model's own.
"""

from __future__ import annotations

from nanum.blocks.body import Streams
from nanum.blocks.layer import decoder_layer
from nanum.conventions import EVERYTHING, MTP_MODULE, Conventions, Kept
from nanum.layout import Structure
from nanum.model import Model
from nanum.operators.elementwise import side_by_side
from nanum.operators.matmul import embedding, linear
from nanum.operators.norm import norm
from nanum.operators.tape import Tape
from nanum.sharding import Tensor

BOTH = "DD"
"""The dim of a token's state and the next one's embedding, side by side."""


def further(t: Tape, h: Tensor, model: Model, splits: Streams, table: Tensor) -> list[Tensor]:
    """What the head is given: `h`, and after it what each module makes of the one before, with tokens of `table`."""
    ids = Tensor("ids", ("B", "S", "V"), splits.whole, "onehot")
    states = [h]
    for i in range(model.mtp_layers):
        embedded = embedding(t, ids, table.name, ("V", "D"), splits.stream, weight=table)
        with t.region(f"{MTP_MODULE} {i}"), t.region(MTP_MODULE):
            states.append(_module(t, states[-1], embedded, model, splits))
    return _together(t, states)


def _module(t: Tape, h: Tensor, embedded: Tensor, model: Model, splits: Streams) -> Tensor:
    """The projection is split over tp by its columns; what it makes is gathered, and then cut as the stream is."""
    both = side_by_side(t, norm(t, embedded, "mtp_enorm", model.norm), norm(t, h, "mtp_hnorm", model.norm), BOTH)
    split = {"D": t.tp} if t.tp else {}
    y = linear(t, both, "mtp_proj", ("D", BOTH), split, ("B", "S", "D"), {**splits.whole, **split})
    x = t.resharded(t.resharded(y, splits.whole), splits.stream)
    return norm(t, decoder_layer(t, x, model, model.layers[-1], splits), "mtp_norm", model.norm)


def _together(t: Tape, states: list[Tensor]) -> list[Tensor]:
    """Megatron hands all states on as one tensor, which the head reads part by part."""
    if len(states) == 1:
        return states
    parts = [state.like(name="of all states") for state in states]
    t.emit("cat", states, parts)

    def passing(state: Tensor, part: Tensor) -> None:
        t.then(part, lambda: t.add_grad(state, t.grad(part)))

    for state, part in zip(states, parts, strict=True):
        passing(state, part)
    return parts


def kept_of_modules(conventions: Conventions, structure: Structure) -> Kept:
    """What of the head and its modules outlives the forward pass: a module is one checkpoint, unless only some of a
    stage's layers are (its `_checkpointed_forward`: not by --recompute-method block).
    """
    if structure.recompute == "full":
        return EVERYTHING if structure.partly else Kept(rerun=frozenset({MTP_MODULE}), in_turn=True)
    return conventions.selective if structure.recompute == "selective" else EVERYTHING
