"""What a `config.json` means by a key that it leaves out: the defaults of the `transformers` configuration classes
(`GPT2Config`, `LlamaConfig`, `MistralConfig`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
# GPT2Config drops at 0.1 where its file says nothing; what a file does not state is not trained with here.
_GPT2: dict[str, Any] = {
    "n_positions": 1024,
    "activation_function": "gelu_new",
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "tie_word_embeddings": True,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "max_position_embeddings": 131072, "num_key_value_heads": 8},
}


def stated(config: Mapping[str, Any], key: str, otherwise: Any = None) -> Any:
    """What `config` says by `key`; its model type's default where it says nothing, or null; else `otherwise`."""
    value = config.get(key)
    return DEFAULTS[config["model_type"]].get(key, otherwise) if value is None else value
