"""The families of models, each stated once: which keys its `config.json` has, and what model they make."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from nanum.model.keys import Family

MODULES = {
    "gpt": ("gpt2", "gptj", "gpt_bigcode"),
    "llama": ("llama", "mistral", "internlm2", "smollm3", "mixtral", "llama4_text"),
    "qwen": ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_next"),
    "deepseek": ("deepseek", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe"),
    "gemma": ("gemma", "gemma2", "gemma3_text"),
    "phi": ("phi", "phi3", "phimoe"),
    "others": ("minimax_m1", "olmo", "olmo2", "olmoe", "gpt_oss", "starcoder2", "nemotron"),
    "bert": ("bert", "roberta"),
    "t5": ("t5",),
    "vit": ("vit",),
    "neox": ("gpt_neox", "opt", "bloom", "mpt", "falcon"),
}
"""Which file states which types: a model waits for its own alone."""
TYPES = {model_type: module for module, types in MODULES.items() for model_type in types}
TEXT_PARTS = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
"""Models of text and images, whose text part alone is modelled: a table of its own in their config."""
NOT_YET = {
    **dict.fromkeys(("distilbert", "albert", "electra", "modernbert"), "an encoder"),
    **dict.fromkeys(("minimax", "kimi_linear", "ring_linear"), "another linear attention"),
    **dict.fromkeys(("mamba", "mamba2", "jamba", "bamba", "zamba2", "nemotron_h"), "a state space"),
}
"""Types that are known, and what of them is not modelled yet."""


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a decoder: that of the text part, where a model has others too."""
    model_type = config.get("model_type")
    part = config.get("text_config")
    if not isinstance(model_type, str) or model_type not in TEXT_PARTS or not isinstance(part, Mapping):
        return config
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**tied, **part, "model_type": TEXT_PARTS[model_type]}


def family(model_type: str) -> Family:
    """The family of models of that type, of those in `TYPES`."""
    found: Family = import_module(f"{__name__}.{TYPES[model_type]}").FAMILIES[model_type]
    return found
