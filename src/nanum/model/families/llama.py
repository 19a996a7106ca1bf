"""Llama, and the models that are one but for a key or two: Mistral, InternLM 2, SmolLM 3, Mixtral, Llama 4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nanum.model import Model
from nanum.model.families.decoder import (
    FULL,
    WINDOW,
    WINDOWED,
    attention,
    decoder,
    decoder_keys,
    fits,
    gated,
    one_for_each_layer,
    sliding,
)
from nanum.model.keys import (
    EXPERTS,
    FLAG,
    FLAGS,
    HEADS,
    INDICES,
    INTERMEDIATE,
    LAYERS,
    POSITIONS,
    Family,
    Key,
    Values,
    words,
)
from nanum.model.layer import Experts, Layer
from nanum.model.pattern import layers

BIASES = {"attention_bias": FLAG, "mlp_bias": FLAG}


def _llama(v: Values, name: str, source: str) -> Model:
    return decoder(v, name, source, attention=attention(v, bias=v["attention_bias"]), mlp=gated(v, bias=v["mlp_bias"]))


def _mistral(v: Values, name: str, source: str) -> Model:
    return decoder(v, name, source, attention=attention(v, window=v["sliding_window"]), mlp=gated(v))


def _internlm2(v: Values, name: str, source: str) -> Model:
    return decoder(v, name, source, attention=attention(v, bias=v["bias"]), mlp=gated(v))


def _mixtral(v: Values, name: str, source: str) -> Model:
    experts = Experts(v["num_local_experts"], v["num_experts_per_tok"], gated(v))
    return decoder(v, name, source, attention=attention(v, window=v["sliding_window"]), mlp=experts)


# --- layers without rotary positions ----------------------------------------------------------------------------------
NO_ROPE: dict[str, Key] = {"no_rope_layers": FLAGS, "no_rope_layer_interval": LAYERS.or_(4)}


def _turns(v: Values) -> list[bool]:
    """Which layers turn queries and keys: as `no_rope_layers` says (1 where they do), or all but each fourth."""
    if v["no_rope_layers"]:
        return [flag == 1 for flag in v["no_rope_layers"]]
    return [(i + 1) % v["no_rope_layer_interval"] != 0 for i in range(v["num_hidden_layers"])]


def _fits_no_rope(v: Values) -> Iterator[str]:
    yield from fits(v)
    if v["no_rope_layers"]:
        yield from one_for_each_layer(v, "no_rope_layers")


def _smollm3(v: Values, name: str, source: str) -> Model:
    mlp, bias = gated(v, bias=v["mlp_bias"]), v["attention_bias"]
    slides = sliding(v, lambda i: bool(v["use_sliding_window"]))
    window = v["sliding_window"] if v["use_sliding_window"] else None

    def layer(mark: tuple[bool, bool]) -> Layer:
        turns, slide = mark
        more = {"rotary": None if turns else 0, "window": window if slide else None}
        return Layer(attention(v, bias=bias, **more), mlp)

    return decoder(v, name, source, **layers(list(zip(_turns(v), slides, strict=True)), layer))


def _llama4(v: Values, name: str, source: str) -> Model:
    """Three layers of chunks with rotary positions to one of all tokens without; the norm of queries and keys has no
    weights and is of turned ones alone. Experts' layers have a shared one, as wide as the others.
    """
    count, step, bias = v["num_hidden_layers"], v["interleave_moe_layer_step"], v["attention_bias"]
    sparse = set(range(step - 1, count, step) if v["moe_layers"] is None else v["moe_layers"])
    turns = _turns(v)
    chunked = turns if v["layer_types"] is None else [kind == "chunked_attention" for kind in v["layer_types"]]
    expert = gated(v)
    experts = Experts(v["num_local_experts"], v["num_experts_per_tok"], expert, shared=expert)
    dense = gated(v, "intermediate_size_mlp")

    def layer(mark: tuple[bool, bool, bool]) -> Layer:
        turned, chunk, routes = mark
        window = v["attention_chunk_size"] if chunk else None
        more: dict[str, Any] = {"window": window, "chunked": window is not None, "rotary": None if turned else 0}
        if turned and v["use_qk_norm"]:
            more["qk_norm"] = "bare_head"
        return Layer(attention(v, bias=bias, **more), experts if routes else dense)

    marks = list(zip(turns, chunked, (i in sparse for i in range(count)), strict=True))
    return decoder(v, name, source, **layers(marks, layer))


LLAMA = Family(decoder_keys(**BIASES), _llama, fits)
FAMILIES = {
    "llama": LLAMA,
    "mistral": Family(
        decoder_keys(
            max_position_embeddings=POSITIONS.or_(131072),
            num_key_value_heads=HEADS.or_(8),
            sliding_window=WINDOW.or_null(4096),
        ),
        _mistral,
        fits,
    ),
    "internlm2": Family(decoder_keys(bias=FLAG.or_(True)), _internlm2, fits),
    "smollm3": Family(
        decoder_keys(
            **BIASES,
            **WINDOWED,
            **NO_ROPE,
            use_sliding_window=FLAG,
            tie_word_embeddings=FLAG.or_(True),
        ),
        _smollm3,
        _fits_no_rope,
    ),
    "mixtral": Family(
        decoder_keys(
            sliding_window=WINDOW.or_null(),
            num_local_experts=EXPERTS.or_(8),
            num_experts_per_tok=EXPERTS.or_(2),
        ),
        _mixtral,
        fits,
    ),
    "llama4_text": Family(
        decoder_keys(
            **NO_ROPE,
            layer_types=words(FULL, "chunked_attention"),
            intermediate_size_mlp=INTERMEDIATE.or_(16384),
            num_local_experts=EXPERTS.or_(16),
            num_experts_per_tok=EXPERTS.or_(1),
            moe_layers=INDICES,
            interleave_moe_layer_step=LAYERS.or_(1),
            use_qk_norm=FLAG.or_(True),
            attention_chunk_size=WINDOW.or_null(8192),
            attention_bias=FLAG,
        ),
        _llama4,
        _fits_no_rope,
    ),
}
