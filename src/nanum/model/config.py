"""From the keys of a Hugging Face `config.json` to a `Model`: one mapping, for shipped presets and users' files alike.

Keys that are absent take the defaults of the `transformers` configuration class of their model type
(`GPT2Config`, `LlamaConfig`, `MistralConfig`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nanum.errors import Refused
from nanum.model import ACTIVATIONS, Attention, Mlp, Model

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
        max_position_embeddings=_stated(config, "n_positions", 1024),
        attention=Attention(
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=hidden_size // heads,
            qkv_bias=True,
            output_bias=True,
            dropout=_stated(config, "attn_pdrop", 0.0),
        ),
        mlp=Mlp(
            intermediate_size=_stated(config, "n_inner", 4 * hidden_size),
            gated=False,
            activation=ACTIVATIONS[_stated(config, "activation_function", "gelu_new")],
            bias=True,
        ),
        norm="layer_norm",
        position="learned",
        tie_word_embeddings=_stated(config, "tie_word_embeddings", True),
        # GPT2Config drops at 0.1 where its file says nothing; what a file does not state is not trained with here.
        hidden_dropout=_stated(config, "resid_pdrop", 0.0),
        source=source,
    )


def _llama(
    config: Config, name: str, source: str, *, default_kv_heads: int | None = None, default_context: int = 2048
) -> Model:
    hidden_size = config["hidden_size"]
    heads = config["num_attention_heads"]
    attention_bias = _stated(config, "attention_bias", False)
    return Model(
        name=name,
        hidden_size=hidden_size,
        vocab_size=config["vocab_size"],
        num_hidden_layers=config["num_hidden_layers"],
        max_position_embeddings=_stated(config, "max_position_embeddings", default_context),
        attention=Attention(
            num_attention_heads=heads,
            num_key_value_heads=_stated(config, "num_key_value_heads", default_kv_heads or heads),
            head_dim=_stated(config, "head_dim", hidden_size // heads),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            dropout=_stated(config, "attention_dropout", 0.0),
        ),
        mlp=Mlp(
            intermediate_size=config["intermediate_size"],
            gated=True,
            activation=ACTIVATIONS[_stated(config, "hidden_act", "silu")],
            bias=_stated(config, "mlp_bias", False),
        ),
        norm="rms_norm",
        position="rotary",
        tie_word_embeddings=_stated(config, "tie_word_embeddings", False),
        source=source,
    )


def _mistral(config: Config, name: str, source: str) -> Model:
    """A Llama with the defaults of `MistralConfig`; its schema holds `sliding_window` to null."""
    return _llama(config, name, source, default_kv_heads=8, default_context=131072)


def _stated(config: Config, key: str, default: Any) -> Any:
    """A key that is null is not stated."""
    value = config.get(key)
    return default if value is None else value


_MAPPINGS: dict[str, Callable[[Config, str, str], Model]] = {"gpt2": _gpt2, "llama": _llama, "mistral": _mistral}
MODEL_TYPES = tuple(_MAPPINGS)
