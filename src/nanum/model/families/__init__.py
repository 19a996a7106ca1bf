"""The families of models, each stated once: which keys its `config.json` has, and what model they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanum.model.families import deepseek, gemma, gpt, llama, neox, others, phi, qwen
from nanum.model.keys import Family

FAMILIES: dict[str, Family] = {
    **gpt.FAMILIES,
    **llama.FAMILIES,
    **qwen.FAMILIES,
    **deepseek.FAMILIES,
    **gemma.FAMILIES,
    **phi.FAMILIES,
    **others.FAMILIES,
    **neox.FAMILIES,
}
TEXT_PARTS = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
"""Models of text and images, whose text part alone is modelled: a table of its own in their config."""
NOT_YET = {
    **dict.fromkeys(("bert", "roberta", "t5", "vit", "distilbert", "albert", "electra", "modernbert"), "an encoder"),
    **dict.fromkeys(("qwen3_next", "minimax", "minimax_m1"), "linear attention"),
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
