"""Gemma 1, 2 and 3 (text): tied embeddings, wide heads, a GELU gate; since the second, four norms and windows."""

from __future__ import annotations

from typing import Any

from nanum.model import Model
from nanum.model.families.decoder import WINDOWED, attention, decoder, decoder_keys, fits, gated, sliding, windowed
from nanum.model.keys import (
    ACTIVATION,
    CAP,
    FLAG,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    POSITIONS,
    VOCABULARY,
    Family,
    Key,
    Values,
)
from nanum.model.layer import Mlp


def _keys(**more: Key) -> dict[str, Key]:
    """`hidden_activation` goes before `hidden_act`, which the first files had."""
    return decoder_keys(
        **{
            "hidden_act": ACTIVATION.or_("gelu_pytorch_tanh"),
            "hidden_activation": ACTIVATION,
            "head_dim": HEAD_DIM.or_(256),
            "max_position_embeddings": POSITIONS.or_(8192),
            "attention_bias": FLAG,
            "tie_word_embeddings": FLAG.or_(True),
            **more,
        }
    )


def _mlp(v: Values) -> Mlp:
    return gated({**v, "hidden_act": v["hidden_activation"] or v["hidden_act"]})


def _gemma(v: Values, name: str, source: str) -> Model:
    return decoder(v, name, source, attention=attention(v, bias=v["attention_bias"]), mlp=_mlp(v))


def _sandwich(v: Values, name: str, source: str, full_each: int, **more: Any) -> Model:
    slides = sliding(v, lambda i: (i + 1) % full_each != 0)
    kinds = windowed(v, slides, _mlp(v), bias=v["attention_bias"], **more)
    return decoder(v, name, source, placement="sandwich", logit_cap=v["final_logit_softcapping"], **kinds)


def _gemma2(v: Values, name: str, source: str) -> Model:
    return _sandwich(v, name, source, 2)


def _gemma3(v: Values, name: str, source: str) -> Model:
    return _sandwich(v, name, source, v["sliding_window_pattern"], qk_norm="head")


FAMILIES = {
    "gemma": Family(_keys(), _gemma, fits),
    "gemma2": Family(
        _keys(**WINDOWED, num_key_value_heads=HEADS.or_(4), final_logit_softcapping=CAP.or_null(30.0))
        | {"sliding_window": POSITIONS.or_null(4096)},
        _gemma2,
        fits,
        ignored=("sliding_window_size",),
    ),
    # The files of the larger ones, whose text part is a table of its own, leave out what is as in the class.
    "gemma3_text": Family(
        _keys(
            **WINDOWED,
            vocab_size=VOCABULARY.or_(262208),
            hidden_size=HIDDEN.or_(2304),
            intermediate_size=INTERMEDIATE.or_(9216),
            num_hidden_layers=LAYERS.or_(26),
            num_attention_heads=HEADS.or_(8),
            num_key_value_heads=HEADS.or_(4),
            max_position_embeddings=POSITIONS.or_(131072),
            sliding_window_pattern=LAYERS.or_(6),
            final_logit_softcapping=CAP.or_null(),
        )
        | {"sliding_window": POSITIONS.or_null(4096)},
        _gemma3,
        fits,
        {"_sliding_window_pattern": "sliding_window_pattern"},
    ),
}
