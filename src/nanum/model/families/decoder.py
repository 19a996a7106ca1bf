"""What most families share: the keys of a Llama's config, and a decoder out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nanum.model import Model
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
    SHARE,
    VOCABULARY,
    Key,
    Values,
    words,
)
from nanum.model.layer import ACTIVATIONS, Attention, Layer, Mlp
from nanum.model.pattern import layers

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = POSITIONS
WINDOWED: dict[str, Key] = {"sliding_window": WINDOW.or_null(), "layer_types": words(FULL, SLIDING)}
ROTARY_SHARE = {"partial_rotary_factor": SHARE.or_(1.0)}


def decoder_keys(**more: Key) -> dict[str, Key]:
    return {
        "vocab_size": VOCABULARY.must(),
        "hidden_size": HIDDEN.must(),
        "intermediate_size": INTERMEDIATE.must(),
        "num_hidden_layers": LAYERS.must(),
        "num_attention_heads": HEADS.must(),
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": POSITIONS.or_(2048),
        "hidden_act": ACTIVATION.or_("silu"),
        "attention_dropout": PROBABILITY.or_(0.0),
        "tie_word_embeddings": FLAG,
        "layer_types": words(FULL),
        **more,
    }


def renamed(v: Values, names: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """The values under Llama's names: `names` has these by the family's own, `more` is what the config cannot say."""
    return {"num_key_value_heads": None, **v, **{names[key]: value for key, value in v.items() if key in names}, **more}


def head_dim(v: Values) -> int:
    return int(v.get("head_dim") or v["hidden_size"] // v["num_attention_heads"])


def attention(v: Values, *, bias: bool = False, **more: Any) -> Attention:
    """Grouped-query attention by Llama's names; `bias` is of all its projections."""
    heads = v["num_attention_heads"]
    share = v.get("partial_rotary_factor", 1.0)
    return Attention(
        num_attention_heads=heads,
        num_key_value_heads=v["num_key_value_heads"] or heads,
        head_dim=head_dim(v),
        dropout=v["attention_dropout"],
        **{"qkv_bias": bias, "output_bias": bias, "rotary": None if share == 1 else int(head_dim(v) * share), **more},
    )


def gated(v: Values, width: str = "intermediate_size", **more: Any) -> Mlp:
    return Mlp(v[width], gated=True, activation=ACTIVATIONS[v["hidden_act"]], **more)


def ungated(v: Values, *, bias: bool = True) -> Mlp:
    return Mlp(v["intermediate_size"], gated=False, activation=ACTIVATIONS[v["hidden_act"]], bias=bias)


def decoder(v: Values, name: str, source: str, **more: Any) -> Model:
    """A model of Llama's sizes; `more` are its layers, and what else it has."""
    return Model(
        **{
            "name": name,
            "hidden_size": v["hidden_size"],
            "vocab_size": v["vocab_size"],
            "num_hidden_layers": v["num_hidden_layers"],
            "max_position_embeddings": v["max_position_embeddings"],
            "norm": "rms_norm",
            "position": "rotary",
            "tie_word_embeddings": v["tie_word_embeddings"],
            "source": source,
            **more,
        }
    )


def sliding(v: Values, otherwise: Callable[[int], bool]) -> list[bool]:
    """Which layers see a window only: as `layer_types` says, or as the class does by a layer's index."""
    if v["layer_types"] is not None:
        return [kind == SLIDING for kind in v["layer_types"]]
    return [otherwise(i) for i in range(v["num_hidden_layers"])]


def windowed(v: Values, slides: Sequence[bool], mlp: Mlp, **more: Any) -> dict[str, Any]:
    """Layers of one feed-forward block, of which some see a window only."""
    return layers(slides, lambda slide: Layer(attention(v, window=v["sliding_window"] if slide else None, **more), mlp))


# --- what does not fit ------------------------------------------------------------------------------------------------
def fits(v: Values) -> Iterator[str]:
    """Heads and layers of a Llama-like config."""
    hidden_size, heads = v["hidden_size"], v["num_attention_heads"]
    size = v.get("head_dim")
    if size is None:
        if hidden_size % heads:
            yield f"num_attention_heads={heads} does not divide hidden_size={hidden_size}, and no head_dim is given"
            size = 2  # said already
        else:
            size = hidden_size // heads
    if size % 2:
        yield f"head_dim={size} is odd, and rotary positions turn its entries in pairs"
    elif int(size * v.get("partial_rotary_factor", 1.0)) % 2:
        share = v["partial_rotary_factor"]
        yield f"partial_rotary_factor={share:g} of head_dim={size} is odd, and rotary positions turn entries in pairs"
    kv_heads = v["num_key_value_heads"] or heads
    if heads % kv_heads:
        yield f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}"
    yield from one_for_each_layer(v, "layer_types")


def one_for_each_layer(v: Values, key: str) -> Iterator[str]:
    told = v.get(key)
    if told is not None and len(told) != v["num_hidden_layers"]:
        yield f"{key} has {len(told)} entries for num_hidden_layers={v['num_hidden_layers']}"
