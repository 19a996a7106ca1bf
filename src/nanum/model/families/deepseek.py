"""DeepSeek and the models built like it: Kimi K2 and GLM 4.5. The first layers are dense; the others have experts, some
of them shared.
"""

from __future__ import annotations

from collections.abc import Iterator

from nanum.model import WITHOUT_MTP, Model
from nanum.model.families.decoder import ROTARY_SHARE, attention, decoder, decoder_keys, fits, gated, one_for_each_layer
from nanum.model.keys import (
    EXPERTS,
    FLAG,
    HEAD_DIM,
    HEADS,
    INTERMEDIATE,
    LAYERS,
    POSITIONS,
    RANK,
    SOME_LAYERS,
    Family,
    Key,
    Values,
    whole,
)
from nanum.model.layer import Attention, Experts, LatentAttention, Layer, Mlp
from nanum.model.pattern import layers

PREDICTED = "num_nextn_predict_layers"
LEFT_OUT = {PREDICTED: WITHOUT_MTP}
STORED = {"quantization_config": "the quantization of published weights, which are counted as they are trained"}


def _keys(**more: Key) -> dict[str, Key]:
    return decoder_keys(
        **{
            "attention_bias": FLAG,
            "n_routed_experts": EXPERTS.or_null(),
            "n_shared_experts": whole(2**10).or_null(),
            "num_experts_per_tok": EXPERTS.or_null(),
            "moe_intermediate_size": INTERMEDIATE.or_(1407),
            "first_k_dense_replace": SOME_LAYERS.or_(0),
            "moe_layer_freq": LAYERS.or_(1),
            "n_group": EXPERTS.or_null(),
            "topk_group": EXPERTS.or_null(),
            **more,
        }
    )


LATENT: dict[str, Key] = {
    "q_lora_rank": RANK.or_null(1536),
    "kv_lora_rank": RANK.or_(512),
    "qk_nope_head_dim": HEAD_DIM.or_(128),
    "qk_rope_head_dim": HEAD_DIM.or_(64),
    "v_head_dim": HEAD_DIM.or_(128),
}


def _feed_forward(v: Values, *, corrects: bool) -> tuple[Mlp, Mlp | Experts]:
    """Of the dense layers, and of the others."""
    dense = gated(v)
    if not v["n_routed_experts"]:
        return dense, dense
    width, shared = v["moe_intermediate_size"], v["n_shared_experts"]
    return dense, Experts(
        v["n_routed_experts"],
        v["num_experts_per_tok"],
        gated(v, "moe_intermediate_size"),
        shared=gated({**v, "shared": shared * width}, "shared") if shared else None,
        correction_bias=corrects,
        groups=v["n_group"] or 1,
        group_topk=v["topk_group"] or 1,
    )


def _model(v: Values, name: str, source: str, kind: Attention | LatentAttention, *, corrects: bool = False) -> Model:
    dense, sparse = _feed_forward(v, corrects=corrects)
    first, each = v["first_k_dense_replace"], v["moe_layer_freq"]
    routes = [i >= first and i % each == 0 for i in range(v["num_hidden_layers"])]
    return decoder(v, name, source, **layers(routes, lambda route: Layer(kind, sparse if route else dense)))


def _deepseek(v: Values, name: str, source: str) -> Model:
    return _model(v, name, source, attention(v, bias=v["attention_bias"]))


def _latent(v: Values) -> LatentAttention:
    return LatentAttention(
        v["num_attention_heads"],
        v["q_lora_rank"],
        v["kv_lora_rank"],
        v["qk_nope_head_dim"],
        v["qk_rope_head_dim"],
        v["v_head_dim"],
        bias=v["attention_bias"],
        dropout=v["attention_dropout"],
    )


def _deepseek_v2(v: Values, name: str, source: str) -> Model:
    return _model(v, name, source, _latent(v))


def _deepseek_v3(v: Values, name: str, source: str) -> Model:
    return _model(v, name, source, _latent(v), corrects=True)


def _glm4_moe(v: Values, name: str, source: str) -> Model:
    """Queries, keys and values have a bias where attention does, its output none."""
    norm = "head" if v["use_qk_norm"] else "none"
    kind = attention(v, qkv_bias=v["attention_bias"], output_bias=False, qk_norm=norm)
    return _model(v, name, source, kind, corrects=True)


def _fits_experts(v: Values) -> Iterator[str]:
    if v["n_routed_experts"] and not v["num_experts_per_tok"]:
        yield f"num_experts_per_tok is missing, for n_routed_experts={v['n_routed_experts']}"


def _fits(v: Values) -> Iterator[str]:
    yield from fits(v)
    yield from _fits_experts(v)


def _fits_latent(v: Values) -> Iterator[str]:
    """Keys are of as many heads as queries, whatever `num_key_value_heads` says."""
    if v["qk_rope_head_dim"] % 2:
        yield f"qk_rope_head_dim={v['qk_rope_head_dim']} is odd, and rotary positions turn its entries in pairs"
    yield from _fits_experts(v)
    yield from one_for_each_layer(v, "layer_types")


V3 = _keys(
    **LATENT,
    max_position_embeddings=POSITIONS.or_(4096),
    moe_intermediate_size=INTERMEDIATE.or_(2048),
    first_k_dense_replace=SOME_LAYERS.or_(3),
    n_routed_experts=EXPERTS.or_(256),
    n_shared_experts=whole(2**10).or_(1),
    num_experts_per_tok=EXPERTS.or_(8),
    n_group=EXPERTS.or_(8),
    topk_group=EXPERTS.or_(4),
)
FAMILIES = {
    "deepseek": Family(_keys(), _deepseek, _fits),
    "deepseek_v2": Family(_keys(**LATENT), _deepseek_v2, _fits_latent),
    **dict.fromkeys(
        ("deepseek_v3", "kimi_k2"),
        Family(V3, _deepseek_v3, _fits_latent, {"num_local_experts": "n_routed_experts"}, LEFT_OUT | STORED),
    ),
    "glm4_moe": Family(
        _keys(
            partial_rotary_factor=ROTARY_SHARE["partial_rotary_factor"].or_(0.5),
            use_qk_norm=FLAG,
            head_dim=HEAD_DIM,
            num_key_value_heads=HEADS.or_(8),
            max_position_embeddings=POSITIONS.or_(131072),
            moe_intermediate_size=INTERMEDIATE.or_(1408),
            first_k_dense_replace=SOME_LAYERS.or_(1),
            n_routed_experts=EXPERTS.or_(128),
            n_shared_experts=whole(2**10).or_(1),
            num_experts_per_tok=EXPERTS.or_(8),
        ),
        _glm4_moe,
        _fits,
        left_out=LEFT_OUT,
    ),
}
