"""By the names of GPT-2: GPT-2 itself, GPT-J, and GPT-BigCode, which has one head of keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nanum.model import Model
from nanum.model.families.decoder import attention, decoder, renamed, ungated
from nanum.model.keys import (
    ACTIVATION,
    FLAG,
    HEAD_DIM,
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
)

NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "attn_pdrop": "attention_dropout",
}
SYNONYMS = {
    llama: own for own, llama in NAMES.items() if own in ("n_embd", "n_layer", "n_head", "n_positions")
}  # which transformers takes too


def _keys(**more: Key) -> dict[str, Key]:
    """GPT2Config drops at 0.1 where its file says nothing; what a file does not state is not trained with here."""
    return {
        "vocab_size": VOCABULARY.must(),
        "n_embd": HIDDEN.must(),
        "n_layer": LAYERS.must(),
        "n_head": HEADS.must(),
        "n_positions": POSITIONS.or_(1024),
        "n_inner": INTERMEDIATE,
        "activation_function": ACTIVATION.or_("gelu_new"),
        "attn_pdrop": PROBABILITY.or_(0.0),
        "resid_pdrop": PROBABILITY.or_(0.0),
        "embd_pdrop": PROBABILITY,
        "tie_word_embeddings": FLAG.or_(True),
        **more,
    }


def _model(own: Values, name: str, source: str, **more: Any) -> Model:
    v = renamed(own, NAMES, intermediate_size=own["n_inner"] or 4 * own["n_embd"])
    given = {"norm": "layer_norm", "position": "learned", "hidden_dropout": v["resid_pdrop"]}
    return decoder(v, name, source, **{**given, "attention": attention(v, bias=True), "mlp": ungated(v), **more})


def _gpt_bigcode(v: Values, name: str, source: str) -> Model:
    return _model({**v, "num_key_value_heads": 1 if v["multi_query"] else None}, name, source)


def _gptj(v: Values, name: str, source: str) -> Model:
    turned = attention(renamed(v, NAMES), rotary=v["rotary_dim"])
    return _model(v, name, source, attention=turned, position="rotary", placement="parallel", head_bias=True)


def _fits(v: Values) -> Iterator[str]:
    if v["n_embd"] % v["n_head"]:
        yield f"n_head={v['n_head']} does not divide n_embd={v['n_embd']}"
    residual = v["resid_pdrop"]
    embedding = residual if v["embd_pdrop"] is None else v["embd_pdrop"]
    if (embedding > 0) != (residual > 0):
        yield f"embd_pdrop={embedding:g} but resid_pdrop={residual:g}: dropout in only one is not modelled"


def _fits_gptj(v: Values) -> Iterator[str]:
    yield from _fits(v)
    size, turned = v["n_embd"] // v["n_head"], v["rotary_dim"]
    if turned > size:
        yield f"rotary_dim={turned} is more than a head has: n_embd/n_head={size}"
    if turned % 2:
        yield f"rotary_dim={turned} is odd, and rotary positions turn entries in pairs"


FAMILIES = {
    "gpt2": Family(_keys(), _model, _fits, SYNONYMS),
    "gptj": Family(
        _keys(n_positions=POSITIONS.or_(2048), rotary_dim=HEAD_DIM.or_(64), tie_word_embeddings=FLAG),
        _gptj,
        _fits_gptj,
        SYNONYMS,
    ),
    "gpt_bigcode": Family(
        _keys(multi_query=FLAG.or_(True), activation_function=ACTIVATION.or_("gelu_pytorch_tanh")),
        _gpt_bigcode,
        _fits,
        SYNONYMS,
    ),
}
