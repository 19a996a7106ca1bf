"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from typing import Any

from nanum.model import Model
from nanum.model.families.decoder import WINDOWED, attention, decoder, decoder_keys, fits, gated, sliding, windowed
from nanum.model.keys import (
    EXPERTS,
    FLAG,
    HEAD_DIM,
    HEADS,
    INDICES,
    INTERMEDIATE,
    LAYERS,
    POSITIONS,
    SOME_LAYERS,
    Family,
    Key,
    Values,
)
from nanum.model.layer import Experts, Layer
from nanum.model.pattern import layers

WINDOWS: dict[str, Key] = {
    **WINDOWED,
    "sliding_window": POSITIONS.or_null(4096),
    "use_sliding_window": FLAG,
    "max_window_layers": SOME_LAYERS.or_(28),
}
SPARSE: dict[str, Key] = {
    **WINDOWS,
    "num_experts_per_tok": EXPERTS.or_(8),
    "decoder_sparse_step": LAYERS.or_(1),
    "mlp_only_layers": INDICES.or_([]),
}
QWEN2 = {"qkv_bias": True, "output_bias": False}


def _slides(v: Values) -> list[bool]:
    """The layers from `max_window_layers` on see a window, where windows are used at all."""
    if not v["use_sliding_window"]:
        return [False] * v["num_hidden_layers"]
    return sliding(v, lambda i: i >= v["max_window_layers"])


def _qwen2(v: Values, name: str, source: str) -> Model:
    return decoder(v, name, source, **windowed(v, _slides(v), gated(v), **QWEN2))


def _qwen3(v: Values, name: str, source: str) -> Model:
    return decoder(v, name, source, **windowed(v, _slides(v), gated(v), bias=v["attention_bias"], qk_norm="head"))


def _sparse(v: Values, experts: Experts, **more: Any) -> dict[str, Any]:
    """Layers of experts: each `decoder_sparse_step`-th, but for `mlp_only_layers`."""
    step, dense = v["decoder_sparse_step"], gated(v)
    routes = [(i + 1) % step == 0 and i not in v["mlp_only_layers"] for i in range(v["num_hidden_layers"])]

    def layer(mark: tuple[bool, bool]) -> Layer:
        slide, route = mark
        kind = attention(v, window=v["sliding_window"] if slide else None, **more)
        return Layer(kind, experts if route else dense)

    return layers(list(zip(_slides(v), routes, strict=True)), layer)


def _qwen2_moe(v: Values, name: str, source: str) -> Model:
    experts = Experts(
        v["num_experts"],
        v["num_experts_per_tok"],
        gated(v, "moe_intermediate_size"),
        shared=gated(v, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
    biases = {"qkv_bias": v["qkv_bias"], "output_bias": False}
    return decoder(v, name, source, **_sparse(v, experts, **biases))


def _qwen3_moe(v: Values, name: str, source: str) -> Model:
    experts = Experts(v["num_experts"], v["num_experts_per_tok"], gated(v, "moe_intermediate_size"))
    return decoder(v, name, source, **_sparse(v, experts, bias=v["attention_bias"], qk_norm="head"))


FAMILIES = {
    "qwen2": Family(
        decoder_keys(**WINDOWS, max_position_embeddings=POSITIONS.or_(32768), num_key_value_heads=HEADS.or_(32)),
        _qwen2,
        fits,
        ignored=("attention_bias",),
    ),
    "qwen3": Family(
        decoder_keys(
            **WINDOWS,
            attention_bias=FLAG,
            max_position_embeddings=POSITIONS.or_(32768),
            num_key_value_heads=HEADS.or_(32),
            head_dim=HEAD_DIM.or_(128),
        ),
        _qwen3,
        fits,
    ),
    "qwen2_moe": Family(
        decoder_keys(
            **SPARSE,
            intermediate_size=INTERMEDIATE.or_(5632),
            max_position_embeddings=POSITIONS.or_(32768),
            num_key_value_heads=HEADS.or_(16),
            num_experts=EXPERTS.or_(60),
            moe_intermediate_size=INTERMEDIATE.or_(1408),
            shared_expert_intermediate_size=INTERMEDIATE.or_(5632),
            qkv_bias=FLAG.or_(True),
        )
        | {"num_experts_per_tok": EXPERTS.or_(4)},
        _qwen2_moe,
        fits,
        {"num_local_experts": "num_experts"},
    ),
    "qwen3_moe": Family(
        decoder_keys(
            **SPARSE,
            intermediate_size=INTERMEDIATE.or_(6144),
            attention_bias=FLAG,
            max_position_embeddings=POSITIONS.or_(32768),
            num_key_value_heads=HEADS.or_(4),
            num_experts=EXPERTS.or_(128),
            moe_intermediate_size=INTERMEDIATE.or_(768),
        ),
        _qwen3_moe,
        fits,
        {"num_local_experts": "num_experts"},
    ),
}
