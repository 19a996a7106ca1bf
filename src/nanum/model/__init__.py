"""A model as its user states it: dimensions and block kinds, by the names of a Hugging Face `config.json`.

Nothing is counted here: parameters, bytes and FLOPs are read off the Program that the blocks emit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
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
class Layer:
    """One kind of decoder layer."""

    attention: Attention
    mlp: Mlp


Run = tuple[int, tuple[int, ...]]
"""How often a group of layers comes, and the kinds of the group's layers in turn."""


@dataclass(frozen=True)
class Model:
    """A decoder-only model: `num_hidden_layers` pre-norm layers between an embedding and a head.

    `attention` and `mlp` are those of the ordinary layer, and of every layer where no others are named: `leading` are
    the first layers, and after them `alternates` come before each ordinary one, in turn, until there are enough.
    """

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
    leading: tuple[Layer, ...] = ()
    alternates: tuple[Layer, ...] = ()

    @property
    def _period(self) -> tuple[Layer, ...]:
        return *self.alternates, Layer(self.attention, self.mlp)

    @cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """The distinct layers, in the order in which they first come."""
        return tuple(dict.fromkeys((*self.leading, *self._period)[: self.num_hidden_layers]))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """All layers in order, in groups that repeat; kinds are indices into `kinds`."""
        leading, period = self.leading[: self.num_hidden_layers], self._period
        times, rest = divmod(self.num_hidden_layers - len(leading), len(period))
        whole = [(times, self._indices(period))] if times else []
        return (*_alike(self._indices(leading)), *whole, *_alike(self._indices(period[:rest])))

    def _indices(self, layers: tuple[Layer, ...]) -> tuple[int, ...]:
        return tuple(map(self.kinds.index, layers))


def _alike(kinds: tuple[int, ...]) -> list[Run]:
    return [(len(list(same)), (kind,)) for kind, same in groupby(kinds)]


def load(word: str) -> Model:
    """The model that `word` names: a preset or its alias, a `config.json`, or a folder with one.

    Raises `Refused` with every reason.
    """
    from nanum.model import presets  # the files are read only when a model is asked for

    return presets.load(word)
