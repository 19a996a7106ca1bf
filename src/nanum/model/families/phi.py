"""Phi 1 to 4, and Phi 3.5 with experts."""

from __future__ import annotations

from nanum.model import Model
from nanum.model.families.decoder import ROTARY_SHARE, WINDOW, attention, decoder, decoder_keys, fits, gated, ungated
from nanum.model.keys import ACTIVATION, EXPERTS, FLAG, INTERMEDIATE, POSITIONS, PROBABILITY, Family, Values, only
from nanum.model.layer import Experts

DROPS = {"resid_pdrop": PROBABILITY.or_(0.0), "embd_pdrop": PROBABILITY.or_(0.0)}


def _phi(v: Values, name: str, source: str) -> Model:
    return decoder(
        v, name, source,
        attention=attention(v, bias=True),
        mlp=ungated(v),
        norm="layer_norm",
        placement="parallel",
        head_bias=True,
        hidden_dropout=v["resid_pdrop"],
        drops_embedding=v["embd_pdrop"] > 0,
    )  # fmt: skip


def _phi3(v: Values, name: str, source: str) -> Model:
    return decoder(
        v, name, source,
        attention=attention(v, bias=v["attention_bias"], window=v["sliding_window"]),
        mlp=gated(v),
        hidden_dropout=v["resid_pdrop"],
        drops_embedding=v["embd_pdrop"] > 0,
    )  # fmt: skip


def _phimoe(v: Values, name: str, source: str) -> Model:
    experts = Experts(v["num_local_experts"], v["num_experts_per_tok"], gated(v))
    kind = attention(v, bias=v["attention_bias"], window=v["sliding_window"])
    return decoder(v, name, source, attention=kind, mlp=experts, norm="layer_norm", head_bias=v["lm_head_bias"])


FAMILIES = {
    "phi": Family(
        decoder_keys(
            **{**DROPS, "partial_rotary_factor": ROTARY_SHARE["partial_rotary_factor"].or_(0.5)},
            intermediate_size=INTERMEDIATE.or_(8192),
            hidden_act=ACTIVATION.or_("gelu_new"),
            qk_layernorm=only(False).or_(False),
        ),
        _phi,
        fits,
    ),
    "phi3": Family(
        decoder_keys(
            **DROPS,
            **ROTARY_SHARE,
            max_position_embeddings=POSITIONS.or_(4096),
            attention_bias=FLAG,
            sliding_window=WINDOW.or_null(),
        ),
        _phi3,
        fits,
        ignored=("full_attn_mod", "interpolate_factor", "use_lora", "lm_head_bias", "mlp_bias"),
    ),
    "phimoe": Family(
        decoder_keys(
            max_position_embeddings=POSITIONS.or_(131072),
            attention_bias=FLAG,
            lm_head_bias=FLAG,
            sliding_window=WINDOW.or_null(),
            num_local_experts=EXPERTS.or_(16),
            num_experts_per_tok=EXPERTS.or_(2),
        ),
        _phimoe,
        fits,
    ),
}
