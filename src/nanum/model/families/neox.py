"""GPT-NeoX, OPT, BLOOM, MPT and Falcon: LayerNorm, a feed-forward block without a gate, and each a habit of its own."""

from __future__ import annotations

from collections.abc import Iterator

from nanum.model import Model
from nanum.model.families.decoder import attention, decoder, decoder_keys, renamed, ungated
from nanum.model.keys import (
    ACTIVATION,
    FLAG,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    POSITIONS,
    PROBABILITY,
    SHARE,
    TABLE,
    VOCABULARY,
    Family,
    Key,
    Values,
    only,
    whole,
)

_OF_GROUPS = ("num_key_value_heads", "head_dim")
DROPOUT = PROBABILITY.or_(0.0)


def _keys(*, without: tuple[str, ...] = _OF_GROUPS, **more: Key) -> dict[str, Key]:
    """Llama's, but for those of grouped-query attention."""
    return {name: key for name, key in decoder_keys(**more).items() if name not in without}


def fits_heads(v: Values) -> Iterator[str]:
    if v["hidden_size"] % v["num_attention_heads"]:
        yield f"num_attention_heads={v['num_attention_heads']} does not divide hidden_size={v['hidden_size']}"


def _gpt_neox(own: Values, name: str, source: str) -> Model:
    v = renamed(own, {"rotary_pct": "partial_rotary_factor"})
    return decoder(
        v, name, source,
        attention=attention(v, bias=v["attention_bias"]),
        mlp=ungated(v),
        norm="layer_norm",
        placement="parallel_two_norms" if v["use_parallel_residual"] else "pre",
        hidden_dropout=v["hidden_dropout"],
    )  # fmt: skip


def _fits_gpt_neox(v: Values) -> Iterator[str]:
    yield from fits_heads(v)
    turned = int(v["hidden_size"] // v["num_attention_heads"] * v["rotary_pct"])
    if turned % 2:
        yield f"rotary_pct={v['rotary_pct']:g} turns {turned} entries of a head, and rotary positions go by pairs"


def _opt(own: Values, name: str, source: str) -> Model:
    """The first position is the third row of the table. Of the sizes, 350m alone has its norms after the residual's sum
    (so none before the head), and a narrower table.
    """
    v = renamed(own, {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"})
    before, narrow = v["do_layer_norm_before"], v["word_embed_proj_dim"]
    return decoder(
        v, name, source,
        attention=attention(v, bias=v["enable_bias"]),
        mlp=ungated(v, bias=v["enable_bias"]),
        norm="layer_norm" if v["layer_norm_elementwise_affine"] else "layer_norm_no_weight",
        position="learned",
        unused_positions=2,
        placement="pre" if before else "post_residual",
        final_norm=before and not v["_remove_final_layer_norm"],
        embedding_size=None if narrow == v["hidden_size"] else narrow,
        hidden_dropout=v["dropout"],
        drops_embedding=False,
    )  # fmt: skip


def _bloom(own: Values, name: str, source: str) -> Model:
    v = renamed(
        own,
        {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "seq_length": "max_position_embeddings"},
        intermediate_size=4 * own["hidden_size"],
        hidden_act="gelu",
    )
    return decoder(
        v, name, source,
        attention=attention(v, bias=True),
        mlp=ungated(v),
        norm="layer_norm",
        position="alibi",
        embedding_norm=True,
        hidden_dropout=v["hidden_dropout"],
        drops_embedding=False,
    )  # fmt: skip


def _mpt(own: Values, name: str, source: str) -> Model:
    names = {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
    }
    table = own["attn_config"] or {}
    v = renamed(
        own,
        names,
        intermediate_size=own["expansion_ratio"] * own["d_model"],
        hidden_act="gelu",
        attention_dropout=table.get("attn_pdrop") or 0.0,
    )
    return decoder(
        v, name, source,
        attention=attention(v),
        mlp=ungated(v, bias=False),
        norm="layer_norm_no_bias",
        position="alibi",
        hidden_dropout=v["resid_pdrop"],
        drops_embedding=False,
    )  # fmt: skip


def _fits_mpt(v: Values) -> Iterator[str]:
    if v["d_model"] % v["n_heads"]:
        yield f"n_heads={v['n_heads']} does not divide d_model={v['d_model']}"
    table = {"alibi": True, "qk_ln": False, "attn_type": "multihead_attention", **(v["attn_config"] or {})}
    if table["alibi"] is not True:
        yield "attn_config.alibi is not true: an MPT with learned positions is not modelled"
    if table["qk_ln"]:
        yield "attn_config.qk_ln is set: MPT's norm of queries and keys is not modelled"
    if table["attn_type"] != "multihead_attention":
        yield "attn_config.attn_type is not multihead_attention, and no other is modelled"
    if not PROBABILITY.accepts(table.get("attn_pdrop") or 0):
        yield f"attn_config.attn_pdrop is not {PROBABILITY.says}"


def _falcon(v: Values, name: str, source: str) -> Model:
    """One head of keys, or `num_kv_heads` of the new decoder, which has a norm for attention and one for the MLP."""
    heads, new = v["num_attention_heads"], v["new_decoder_architecture"]
    keys = v["num_kv_heads"] or heads if new else 1 if v["multi_query"] else heads
    two = new and v["num_ln_in_parallel_attn"] in (None, 2)
    given = renamed(
        v,
        {"activation": "hidden_act"},
        num_key_value_heads=keys,
        intermediate_size=v["ffn_hidden_size"] or 4 * v["hidden_size"],
    )
    return decoder(
        given, name, source,
        attention=attention(given, bias=v["bias"]),
        mlp=ungated(given, bias=v["bias"]),
        norm="layer_norm",
        position="alibi" if v["alibi"] else "rotary",
        placement="parallel_two_norms" if two else "parallel" if new or v["parallel_attn"] else "pre",
        hidden_dropout=v["hidden_dropout"],
        drops_embedding=False,
    )  # fmt: skip


def _fits_falcon(v: Values) -> Iterator[str]:
    yield from fits_heads(v)
    keys = v["num_kv_heads"]
    if v["new_decoder_architecture"] and keys and v["num_attention_heads"] % keys:
        yield f"num_kv_heads={keys} does not divide num_attention_heads={v['num_attention_heads']}"


FAMILIES = {
    "gpt_neox": Family(
        _keys(
            intermediate_size=INTERMEDIATE.or_(24576),
            hidden_act=ACTIVATION.or_("gelu"),
            rotary_pct=SHARE.or_(0.25),
            use_parallel_residual=FLAG.or_(True),
            attention_bias=FLAG.or_(True),
            hidden_dropout=DROPOUT,
        ),
        _gpt_neox,
        _fits_gpt_neox,
        {"partial_rotary_factor": "rotary_pct"},
        ignored=("attention_probs_dropout_prob", "hidden_dropout_prob"),
    ),
    "opt": Family(
        _keys(
            without=(*_OF_GROUPS, "intermediate_size", "hidden_act"),
            ffn_dim=INTERMEDIATE.or_(3072),
            activation_function=ACTIVATION.or_("relu"),
            word_embed_proj_dim=HIDDEN,
            do_layer_norm_before=FLAG.or_(True),
            enable_bias=FLAG.or_(True),
            layer_norm_elementwise_affine=FLAG.or_(True),
            _remove_final_layer_norm=FLAG,
            dropout=DROPOUT,
            tie_word_embeddings=FLAG.or_(True),
        ),
        _opt,
        fits_heads,
    ),
    "bloom": Family(
        {
            "vocab_size": VOCABULARY.must(),
            "hidden_size": HIDDEN.must(),
            "n_layer": LAYERS.must(),
            "n_head": HEADS.must(),
            "seq_length": POSITIONS.or_(2048),
            "hidden_dropout": DROPOUT,
            "attention_dropout": DROPOUT,
            "apply_residual_connection_post_layernorm": only(False).or_(False),
            "tie_word_embeddings": FLAG.or_(True),
        },
        _bloom,
        lambda v: fits_heads({**v, "num_attention_heads": v["n_head"]}),
        {"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    ),
    "mpt": Family(
        {
            "vocab_size": VOCABULARY.must(),
            "d_model": HIDDEN.must(),
            "n_layers": LAYERS.must(),
            "n_heads": HEADS.must(),
            "expansion_ratio": whole(64).or_(4),
            "max_seq_len": POSITIONS.or_(2048),
            "no_bias": only(True).or_(True),
            "attn_config": TABLE,
            "resid_pdrop": DROPOUT,
            "tie_word_embeddings": FLAG.or_(True),
        },
        _mpt,
        _fits_mpt,
        {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
        ignored=("norm_type",),
    ),
    "falcon": Family(
        _keys(
            without=(*_OF_GROUPS, "intermediate_size", "hidden_act"),
            num_kv_heads=HEADS,
            ffn_hidden_size=INTERMEDIATE,
            activation=ACTIVATION.or_("gelu"),
            multi_query=FLAG.or_(True),
            parallel_attn=FLAG.or_(True),
            new_decoder_architecture=FLAG,
            num_ln_in_parallel_attn=whole(2),
            bias=FLAG,
            alibi=FLAG,
            hidden_dropout=DROPOUT,
            tie_word_embeddings=FLAG.or_(True),
        ),
        _falcon,
        _fits_falcon,
        {"n_head_kv": "num_kv_heads", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
    ),
}
