"""A model as its user states it: dimensions and block kinds, by the names of a Hugging Face `config.json`.

Nothing is counted here: parameters, bytes and FLOPs are read off the Program that the blocks emit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ACTIVATIONS: dict[str, Literal["silu", "gelu"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
}
"""The forms of GELU differ in the last digits of its value, not in what is computed, saved or sent."""


@dataclass(frozen=True)
class Attention:
    """Multi-head or grouped-query attention; `num_key_value_heads == num_attention_heads` is MHA."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    dropout: float = 0.0


@dataclass(frozen=True)
class Mlp:
    """A feed-forward block: `down(act(gate) * up)` when gated, `down(act(up))` otherwise."""

    intermediate_size: int
    gated: bool
    activation: Literal["silu", "gelu"]
    bias: bool = False


@dataclass(frozen=True)
class Model:
    """A dense decoder-only model: `num_hidden_layers` equal pre-norm layers between an embedding and a head."""

    name: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    attention: Attention
    mlp: Mlp
    norm: Literal["layer_norm", "rms_norm"]
    position: Literal["learned", "rotary"]
    tie_word_embeddings: bool
    hidden_dropout: float = 0.0
    source: str = ""


def load(word: str) -> Model:
    """The model that `word` names: a preset or its alias, a `config.json`, or a folder with one.

    Raises `Refused` with every reason.
    """
    from nanum.model import presets  # the files are read only when a model is asked for

    return presets.load(word)
