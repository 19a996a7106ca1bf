"""The two ends of an encoder of pictures: its patches, and a classifier of the class token.

A convolution whose windows do not overlap is a linear layer over patches; which are given as rows, in the dtype that is
computed with. Every rank of tp has both ends whole, as Megatron-LM's vision models have (legacy/model/vision).
"""

from __future__ import annotations

from nanum.blocks.body import Body, Streams, emit, new_tape
from nanum.conventions import Conventions
from nanum.dtypes import ITEMSIZE
from nanum.job import ALL, Trained
from nanum.layout import Structure
from nanum.model import Model, Patches
from nanum.operators.elementwise import dropout
from nanum.operators.loss import cross_entropy
from nanum.operators.matmul import linear
from nanum.operators.norm import norm
from nanum.operators.pictures import first_row, prepended, shifted
from nanum.sharding import BATCH_AXES, Shapes, Tensor

ROW = "one"
"""The dim of a class token: one row of a sequence."""


def picture_dims(patches: Patches | None, seq_len: int) -> dict[str, int]:
    """Global sizes of a picture: its patches, the numbers of each, and one row."""
    return {} if patches is None else {"patches": seq_len - 1, "pixels": patches.numbers, ROW: 1}


def pictures_bytes(patches: Patches, shapes: Shapes, dtype: str) -> tuple[int, int]:
    """Of one micro-batch's pictures, and of their labels."""
    sequences = shapes.part("B", BATCH_AXES)
    return sequences * patches.count * patches.numbers * ITEMSIZE[dtype], sequences * ITEMSIZE["int64"]


def picture_body(
    model: Model, shapes: Shapes, conventions: Conventions, structure: Structure, trained: Trained = ALL
) -> Body:
    """Patches projected, the class token before them, and learned positions: parameters in the order and the shapes of
    `transformers` (ViTEmbeddings).
    """
    tape = new_tape(shapes, conventions, structure, trained, own_trained=trained.ends)
    splits = Streams.of(structure)
    rows = splits.whole["S"]

    def embed() -> Tensor:
        given = Tensor("pictures", ("B", "patches", "pixels"), {"B": BATCH_AXES, "patches": rows}, tape.dtype)
        tape.given.append(given)
        token = tape.weight("class_token", (ROW, "D"))
        positions = tape.weight("positions", (ROW, "P", "D"))
        where = {"B": BATCH_AXES, "patches": rows}
        x = linear(tape, given, "patches", ("D", "pixels"), {}, ("B", "patches", "D"), where, bias=True)
        x = shifted(tape, prepended(tape, token, x, ("B", "S", "D")), positions)
        return dropout(tape, x, model.hidden_dropout * model.drops_embedding)

    return emit(tape, embed).body()


def classifier_body(
    model: Model, shapes: Shapes, conventions: Conventions, structure: Structure, trained: Trained = ALL
) -> Body:
    """The last norm, the class token's row, a linear layer, and the loss. Without a classifier the row itself is taken
    for logits: what an encoder alone is trained for is not of the model.
    """
    tape = new_tape(shapes, conventions, structure, trained, own_trained=trained.ends)
    splits = Streams.of(structure)
    y = Tensor("y", ("B", "S", "D"), splits.stream, tape.dtype)
    rows = {"B": BATCH_AXES, ROW: splits.whole["S"]}

    def head() -> None:
        h = norm(tape, y, "norm", model.norm) if model.final_norm else y
        logits = first_row(tape, h, ("B", ROW, "D"), copied=not model.vocab_size)
        if model.vocab_size:
            logits = linear(tape, logits, "head", ("V", "D"), {}, ("B", ROW, "V"), rows, bias=model.head_bias)
        tape.frame(y, h)
        tape.mark("post_forward")
        if conventions.step_keeps_logits:
            tape.kept = (logits,)
        cross_entropy(tape, logits)

    return emit(tape, head, x=y).body()
