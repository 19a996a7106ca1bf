"""From the keys of a Hugging Face `config.json` to a `Model`: one mapping, for shipped presets and users' files alike.

Keys that are absent, or null, take the defaults of their model type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nanum.errors import Refused
from nanum.model import ACTIVATIONS, Attention, Mlp, Model
from nanum.model.defaults import stated

Config = Mapping[str, Any]


def from_config(config: Config, name: str, *, where: str = "config.json", source: str = "") -> Model:
    """`config`, as read from a user's `config.json`, as a `Model` called `name`.

    Raises `Refused` with every reason, each led by `where`: an unknown model type or key; a size that is missing, not a
    whole number or out of range; sizes that do not fit each other; what is not modelled (experts, sliding windows,
    quantization).
    """
    from nanum.model import schema  # brings in pydantic, which a preset need not wait for

    reasons = schema.reasons(config)
    if reasons:
        raise Refused(f"{where}: {reason}" for reason in reasons)
    return trusted(config, name, source or where)


def trusted(config: Config, name: str, source: str) -> Model:
    """As `from_config`, for a config that is known to be good."""
    return _MAPPINGS[config["model_type"]](config, name, source)


def _gpt2(config: Config, name: str, source: str) -> Model:
    hidden_size = config["n_embd"]
    heads = config["n_head"]
    return Model(
        name=name,
        hidden_size=hidden_size,
        vocab_size=config["vocab_size"],
        num_hidden_layers=config["n_layer"],
        max_position_embeddings=stated(config, "n_positions"),
        attention=Attention(
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=hidden_size // heads,
            qkv_bias=True,
            output_bias=True,
            dropout=stated(config, "attn_pdrop"),
        ),
        mlp=Mlp(
            intermediate_size=stated(config, "n_inner", 4 * hidden_size),
            gated=False,
            activation=ACTIVATIONS[stated(config, "activation_function")],
            bias=True,
        ),
        norm="layer_norm",
        position="learned",
        tie_word_embeddings=stated(config, "tie_word_embeddings"),
        hidden_dropout=stated(config, "resid_pdrop"),
        source=source,
    )


def _llama(config: Config, name: str, source: str) -> Model:
    """A Llama, or a Mistral, which has other defaults; the schema holds the latter's `sliding_window` to null."""
    hidden_size = config["hidden_size"]
    heads = config["num_attention_heads"]
    attention_bias = stated(config, "attention_bias")
    return Model(
        name=name,
        hidden_size=hidden_size,
        vocab_size=config["vocab_size"],
        num_hidden_layers=config["num_hidden_layers"],
        max_position_embeddings=stated(config, "max_position_embeddings"),
        attention=Attention(
            num_attention_heads=heads,
            num_key_value_heads=stated(config, "num_key_value_heads", heads),
            head_dim=stated(config, "head_dim", hidden_size // heads),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            dropout=stated(config, "attention_dropout"),
        ),
        mlp=Mlp(
            intermediate_size=config["intermediate_size"],
            gated=True,
            activation=ACTIVATIONS[stated(config, "hidden_act")],
            bias=stated(config, "mlp_bias"),
        ),
        norm="rms_norm",
        position="rotary",
        tie_word_embeddings=stated(config, "tie_word_embeddings"),
        source=source,
    )


_MAPPINGS: dict[str, Callable[[Config, str, str], Model]] = {"gpt2": _gpt2, "llama": _llama, "mistral": _llama}
