"""Encoders that fill in tokens: BERT and RoBERTa, with the head that they are pretrained with, and no pooler."""

from __future__ import annotations

from nanum.model import Model
from nanum.model.families.decoder import attention, decoder, renamed, ungated
from nanum.model.families.neox import fits_heads
from nanum.model.keys import (
    ACTIVATION,
    FLAG,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    POSITIONS,
    PROBABILITY,
    VOCABULARY,
    Family,
    Key,
    Values,
    only,
    whole,
)


def _keys(types: int) -> dict[str, Key]:
    return {
        "vocab_size": VOCABULARY.must(),
        "hidden_size": HIDDEN.must(),
        "num_hidden_layers": LAYERS.must(),
        "num_attention_heads": HEADS.must(),
        "intermediate_size": INTERMEDIATE.must(),
        "hidden_act": ACTIVATION.or_("gelu"),
        "max_position_embeddings": POSITIONS.or_(512),
        "type_vocab_size": whole(2**10).or_(types),
        "hidden_dropout_prob": PROBABILITY.or_(0.0),
        "attention_probs_dropout_prob": PROBABILITY.or_(0.0),
        "position_embedding_type": only("absolute").or_("absolute"),
        "is_decoder": only(False).or_(False),
        "tie_word_embeddings": FLAG.or_(True),
    }


def _bert(own: Values, name: str, source: str, unused: int = 0) -> Model:
    """Norms come after each sum with the residual; a token has a word's row, a position's and a segment's."""
    v = renamed(own, {"attention_probs_dropout_prob": "attention_dropout"})
    return decoder(
        {**v, "max_position_embeddings": v["max_position_embeddings"] - unused}, name, source,
        attention=attention(v, bias=True, causal=False),
        mlp=ungated(v),
        norm="layer_norm",
        position="learned",
        unused_positions=unused,
        placement="post_residual",
        embedding_norm=True,
        final_norm=False,
        token_types=v["type_vocab_size"],
        head_transform=True,
        head_bias=True,
        hidden_dropout=v["hidden_dropout_prob"],
    )  # fmt: skip


def _roberta(v: Values, name: str, source: str) -> Model:
    """Of the rows of positions the first two are not used."""
    return _bert(v, name, source, unused=2)


FAMILIES = {
    "bert": Family(_keys(2), _bert, fits_heads),
    "roberta": Family({**_keys(1), "max_position_embeddings": whole(2**30, 3).or_(514)}, _roberta, fits_heads),
}
