"""A model made smaller, in the same proportions, so that it can be trained anywhere."""

from __future__ import annotations

from dataclasses import replace

from nanum.errors import Refused
from nanum.model import Model

LEAST_HEAD_DIM = 8
MULTIPLE = 8  # of the feed-forward block's width


def scaled(model: Model, *, layers: int | None = None, hidden: int | None = None, vocab: int | None = None) -> Model:
    """`model` with as many layers, that hidden size and that vocabulary; None leaves one as it is.

    Heads stay as many as the hidden size has room for, in the same groups, and the feed-forward block keeps its
    proportion to the hidden size. Without dropout, since every division of it must give the same numbers.

    Raises:
        Refused: the hidden size does not divide into heads.
    """
    a, mlp = model.attention, model.mlp
    if hidden is not None and hidden != model.hidden_size:
        groups = a.num_attention_heads // a.num_key_value_heads
        fits = (
            kv
            for kv in range(min(a.num_key_value_heads, hidden // (LEAST_HEAD_DIM * groups)), 0, -1)
            if hidden % (kv * groups) == 0 and (hidden // (kv * groups)) % 2 == 0
        )
        kv_heads = next(fits, None)
        if kv_heads is None:
            raise Refused(f"--hidden {hidden} does not divide into heads of {model.name}: {groups} to a key")
        heads = kv_heads * groups
        width = max(MULTIPLE, round(mlp.intermediate_size * hidden / model.hidden_size / MULTIPLE) * MULTIPLE)
        a = replace(a, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=hidden // heads)
        mlp = replace(mlp, intermediate_size=width)
    return replace(
        model,
        hidden_size=hidden or model.hidden_size,
        num_hidden_layers=layers or model.num_hidden_layers,
        vocab_size=vocab or model.vocab_size,
        attention=replace(a, dropout=0.0),
        mlp=mlp,
        hidden_dropout=0.0,
    )
