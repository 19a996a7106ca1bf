"""OLMo, gpt-oss, StarCoder 2 and Nemotron."""

from __future__ import annotations

from collections.abc import Iterator

from nanum.model import Model
from nanum.model.families.decoder import (
    FULL,
    ROTARY_SHARE,
    WINDOW,
    WINDOWED,
    attention,
    decoder,
    decoder_keys,
    fits,
    gated,
    head_dim,
    one_for_each_layer,
    sliding,
    ungated,
)
from nanum.model.families.deepseek import STORED
from nanum.model.keys import (
    ACTIVATION,
    EXPERTS,
    FLAG,
    FLAGS,
    HEAD_DIM,
    HEADS,
    INTERMEDIATE,
    POSITIONS,
    PROBABILITY,
    Family,
    Values,
    only,
    whole,
    words,
)
from nanum.model.layer import Experts, Layer, LinearAttention
from nanum.model.pattern import layers


def _olmo(v: Values, name: str, source: str) -> Model:
    """Norms without a weight."""
    kind = attention(v, bias=v["attention_bias"])
    return decoder(v, name, source, attention=kind, mlp=gated(v), norm="layer_norm_no_weight")


def _olmo2(v: Values, name: str, source: str) -> Model:
    kind = attention(v, bias=v["attention_bias"], qk_norm="width")
    return decoder(v, name, source, attention=kind, mlp=gated(v), placement="post")


def _olmoe(v: Values, name: str, source: str) -> Model:
    kind = attention(v, bias=v["attention_bias"], qk_norm="width")
    return decoder(v, name, source, attention=kind, mlp=Experts(v["num_experts"], v["num_experts_per_tok"], gated(v)))


def _gpt_oss(v: Values, name: str, source: str) -> Model:
    """Every second layer sees a window, the first among them; all of an expert has biases, and the router."""
    experts = Experts(v["num_local_experts"], v["num_experts_per_tok"], gated(v, bias=True), router_bias=True)

    def layer(slide: bool) -> Layer:
        window = v["sliding_window"] if slide else None
        return Layer(attention(v, bias=v["attention_bias"], sinks=True, window=window), experts)

    return decoder(v, name, source, **layers(sliding(v, lambda i: i % 2 == 0), layer))


def _starcoder2(v: Values, name: str, source: str) -> Model:
    kind = attention(v, bias=v["use_bias"], window=v["sliding_window"])
    return decoder(
        v, name, source,
        attention=kind,
        mlp=ungated(v, bias=v["use_bias"]),
        norm="layer_norm",
        hidden_dropout=v["residual_dropout"],
        drops_embedding=v["embedding_dropout"] > 0,
    )  # fmt: skip


def _nemotron(v: Values, name: str, source: str) -> Model:
    kind = attention(v, bias=v["attention_bias"])
    return decoder(v, name, source, attention=kind, mlp=ungated(v, bias=v["mlp_bias"]), norm="layer_norm")


def _minimax(v: Values, name: str, source: str) -> Model:
    """Seven layers of lightning attention to one that sees all, as a list says, by 0 and 1."""
    experts = Experts(v["num_local_experts"], v["num_experts_per_tok"], gated(v))
    full = attention(v, rotary=v["rotary_dim"])
    heads, size = v["num_attention_heads"], full.head_dim
    lightning = LinearAttention("lightning", heads, heads, size, size)
    if v["layer_types"] is not None:
        whole = [kind == FULL for kind in v["layer_types"]]
    else:
        whole = [flag == 1 for flag in v["attn_type_list"] or ()] or [i % 8 == 7 for i in range(v["num_hidden_layers"])]
    return decoder(v, name, source, **layers(whole, lambda sees_all: Layer(full if sees_all else lightning, experts)))


def _fits_minimax(v: Values) -> Iterator[str]:
    yield from fits(v)
    if v["attn_type_list"]:
        yield from one_for_each_layer(v, "attn_type_list")
    if v["rotary_dim"] is not None and (v["rotary_dim"] % 2 or v["rotary_dim"] > head_dim(v)):
        yield f"rotary_dim={v['rotary_dim']} is odd, or more than a head has: {head_dim(v)}"


MINIMAX = Family(
    decoder_keys(
        max_position_embeddings=POSITIONS.or_(2048),
        num_local_experts=EXPERTS.or_(8),
        num_experts_per_tok=EXPERTS.or_(2),
        rotary_dim=HEAD_DIM,
        attn_type_list=FLAGS,
        layer_types=words(FULL, "linear_attention"),
        shared_intermediate_size=whole(0, 0).or_(0),
    ),
    _minimax,
    _fits_minimax,
)
FAMILIES = {
    "minimax_m1": MINIMAX,
    "olmo": Family(decoder_keys(attention_bias=FLAG), _olmo, fits),
    "olmo2": Family(decoder_keys(attention_bias=FLAG), _olmo2, fits),
    "olmoe": Family(
        decoder_keys(
            max_position_embeddings=POSITIONS.or_(4096),
            attention_bias=FLAG,
            num_experts=EXPERTS.or_(64),
            num_experts_per_tok=EXPERTS.or_(8),
        ),
        _olmoe,
        fits,
        {"num_local_experts": "num_experts"},
    ),
    "gpt_oss": Family(
        decoder_keys(
            layer_types=WINDOWED["layer_types"],
            sliding_window=POSITIONS.or_(128),
            head_dim=HEAD_DIM.or_(64),
            num_key_value_heads=HEADS.or_(8),
            max_position_embeddings=POSITIONS.or_(131072),
            attention_bias=FLAG.or_(True),
            num_local_experts=EXPERTS.or_(128),
            num_experts_per_tok=EXPERTS.or_(4),
        ),
        _gpt_oss,
        fits,
        {"experts_per_token": "num_experts_per_tok"},
        left_out=STORED,
    ),
    "starcoder2": Family(
        decoder_keys(
            intermediate_size=INTERMEDIATE.or_(12288),
            num_key_value_heads=HEADS.or_(2),
            hidden_act=ACTIVATION.or_("gelu_pytorch_tanh"),
            max_position_embeddings=POSITIONS.or_(4096),
            use_bias=FLAG.or_(True),
            sliding_window=WINDOW.or_null(),
            residual_dropout=PROBABILITY.or_(0.0),
            embedding_dropout=PROBABILITY.or_(0.0),
            norm_type=only("layer_norm").or_("layer_norm"),
            mlp_type=only("default").or_("default"),
            tie_word_embeddings=FLAG.or_(True),
        ),
        _starcoder2,
        fits,
    ),
    "nemotron": Family(
        decoder_keys(
            partial_rotary_factor=ROTARY_SHARE["partial_rotary_factor"].or_(0.5),
            hidden_act=ACTIVATION.or_("relu2"),
            max_position_embeddings=POSITIONS.or_(4096),
            attention_bias=FLAG,
            mlp_bias=FLAG,
        ),
        _nemotron,
        fits,
    ),
}
