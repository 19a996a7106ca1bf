"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nanum.model import Model
from nanum.model.families.decoder import (
    FULL,
    WINDOWED,
    attention,
    decoder,
    decoder_keys,
    fits,
    gated,
    sliding,
    windowed,
)
from nanum.model.keys import (
    EXPERTS,
    FLAG,
    HEAD_DIM,
    HEADS,
    INDICES,
    INTERMEDIATE,
    LAYERS,
    POSITIONS,
    SHARE,
    SOME_LAYERS,
    Family,
    Key,
    Values,
    whole,
    words,
)
from nanum.model.layer import Experts, Layer, LinearAttention
from nanum.model.pattern import layers

WINDOWS: dict[str, Key] = {
    **WINDOWED,
    "sliding_window": POSITIONS.or_null(4096),
    "use_sliding_window": FLAG,
    "max_window_layers": SOME_LAYERS.or_(28),
}
ROUTED: dict[str, Key] = {"decoder_sparse_step": LAYERS.or_(1), "mlp_only_layers": INDICES.or_([])}
SPARSE: dict[str, Key] = {**WINDOWS, **ROUTED, "num_experts_per_tok": EXPERTS.or_(8)}
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
    dense = gated(v)

    def layer(mark: tuple[bool, bool]) -> Layer:
        slide, route = mark
        kind = attention(v, window=v["sliding_window"] if slide else None, **more)
        return Layer(kind, experts if route else dense)

    return layers(list(zip(_slides(v), _routes(v), strict=True)), layer)


def _routes(v: Values) -> list[bool]:
    step = v["decoder_sparse_step"]
    return [(i + 1) % step == 0 and i not in v["mlp_only_layers"] for i in range(v["num_hidden_layers"])]


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


def _qwen3_next(v: Values, name: str, source: str) -> Model:
    """Linear attention but for each `full_attention_interval`-th layer, whose output is gated."""
    experts = Experts(
        v["num_experts"],
        v["num_experts_per_tok"],
        gated(v, "moe_intermediate_size"),
        shared=gated(v, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
    full = attention(v, bias=v["attention_bias"], qk_norm="head", gated=True)
    linear = LinearAttention(
        "delta",
        v["linear_num_key_heads"],
        v["linear_num_value_heads"],
        v["linear_key_head_dim"],
        v["linear_value_head_dim"],
        v["linear_conv_kernel_dim"],
    )
    told, every = v["layer_types"], v["full_attention_interval"]
    count = v["num_hidden_layers"]
    whole = [(i + 1) % every == 0 for i in range(count)] if told is None else [kind == FULL for kind in told]
    dense = gated(v)

    def layer(mark: tuple[bool, bool]) -> Layer:
        sees_all, route = mark
        return Layer(full if sees_all else linear, experts if route else dense)

    return decoder(v, name, source, **layers(list(zip(whole, _routes(v), strict=True)), layer))


def _fits_linear(v: Values) -> Iterator[str]:
    yield from fits(v)
    keys, values = v["linear_num_key_heads"], v["linear_num_value_heads"]
    if values % keys:
        yield f"linear_num_key_heads={keys} does not divide linear_num_value_heads={values}"


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
    "qwen3_next": Family(
        decoder_keys(
            **ROUTED,
            intermediate_size=INTERMEDIATE.or_(5632),
            attention_bias=FLAG,
            max_position_embeddings=POSITIONS.or_(32768),
            num_key_value_heads=HEADS.or_(2),
            head_dim=HEAD_DIM.or_(256),
            layer_types=words(FULL, "linear_attention"),
            full_attention_interval=LAYERS.or_(4),
            linear_conv_kernel_dim=whole(64).or_(4),
            linear_key_head_dim=HEAD_DIM.or_(128),
            linear_value_head_dim=HEAD_DIM.or_(128),
            linear_num_key_heads=HEADS.or_(16),
            linear_num_value_heads=HEADS.or_(32),
            num_experts=EXPERTS.or_(512),
            num_experts_per_tok=EXPERTS.or_(10),
            moe_intermediate_size=INTERMEDIATE.or_(512),
            shared_expert_intermediate_size=INTERMEDIATE.or_(512),
            partial_rotary_factor=SHARE.or_(0.25),
        ),
        _qwen3_next,
        _fits_linear,
        {"num_local_experts": "num_experts"},
    ),
}
