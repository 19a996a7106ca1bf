"""A model as its user states it: dimensions and block kinds, by the names of a Hugging Face `config.json`.

Nothing is counted here: parameters, bytes and FLOPs are read off the Program that the blocks emit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Literal

from nanum.model.layer import ACTIVATIONS, Attention, Experts, LatentAttention, Layer, LinearAttention, Mlp
from nanum.model.patches import Patches

__all__ = [
    "ACTIVATIONS", "Attention", "Experts", "LatentAttention", "Layer", "LinearAttention", "Mlp", "Model", "Patches",
    "load",
]  # fmt: skip

Norm = Literal["layer_norm", "layer_norm_no_bias", "layer_norm_no_weight", "rms_norm"]
"""A norm whose weight is stored less 1 (Gemma, Nemotron) is no other norm."""
Placement = Literal["pre", "post", "sandwich", "post_residual", "parallel", "parallel_two_norms"]
"""Where a layer's norms stand, f being attention and then the feed-forward block:

- pre: `x + f(norm(x))`
- post: `x + norm(f(x))` (OLMo 2)
- sandwich: `x + norm(f(norm(x)))` (Gemma 2)
- post_residual: `norm(x + f(x))`, the first Transformer's (OPT-350m)
- parallel: `x + attention(norm(x)) + mlp(norm(x))`, of one norm (GPT-J, Phi); parallel_two_norms: each has its own
  (GPT-NeoX)
"""

WITHOUT_MTP = "layers that predict further tokens (multi-token prediction), which --mtp-layers puts in"
"""Said of a model whose config has them, where none is asked for."""

Run = tuple[int, tuple[int, ...]]
"""How often a group of layers comes, and the kinds of the group's layers in turn."""


@dataclass(frozen=True)
class Model:
    """A decoder, or an encoder that fills in tokens: `num_hidden_layers` layers between an embedding and a head. An
    encoder of pictures has `patches` in place of tokens, and classes in place of a vocabulary (0: no classifier). Of an
    encoder and a decoder the layers of both are told one after the other.

    `attention` and `mlp` are those of the ordinary layer, and of every layer where no others are named: `leading` are
    the first layers, and after them `alternates` come before each ordinary one, in turn, until there are enough.
    """

    name: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    attention: Attention | LatentAttention | LinearAttention
    mlp: Mlp | Experts
    norm: Norm
    position: Literal["learned", "rotary", "alibi", "relative"]
    tie_word_embeddings: bool
    hidden_dropout: float = 0.0
    source: str = ""
    leading: tuple[Layer, ...] = ()
    alternates: tuple[Layer, ...] = ()
    placement: Placement = "pre"
    embedding_norm: bool = False  # of the embedding's rows, and what is added to them (BLOOM)
    final_norm: bool = True  # before the head
    head_bias: bool = False
    head_transform: bool = False  # a linear layer, GELU and a norm before the head (BERT)
    token_types: int = 0  # rows of a table of which each token has one (BERT's segments)
    logit_cap: float | None = None  # logits are `cap * tanh(logits / cap)` (Gemma 2)
    embedding_size: int | None = None  # where rows of the table are narrower, and projected (OPT-350m)
    unused_positions: int = 0  # rows of the learned table before the first position (OPT)
    drops_embedding: bool = True  # is `hidden_dropout` that of the residual stream's beginning too?
    patches: Patches | None = None
    cross: Attention | None = None  # of the ordinary layer
    encoder_layers: int = (
        0  # so many first layers are an encoder's: a norm ends them, and the decoder embeds its tokens
    )
    scaled_head: bool = False  # the last norm's result is scaled by 1/sqrt(hidden_size) before the head (T5)
    left_out: tuple[str, ...] = ()  # what its config has and no layer here: said beside every answer
    mtp_layers: int = 0  # modules after the last layer that each predict one token further

    def predicting(self, mtp_layers: int) -> Model:
        """The same model with so many modules of multi-token prediction."""
        left_out = self.left_out if mtp_layers == 0 else tuple(what for what in self.left_out if what != WITHOUT_MTP)
        return replace(self, mtp_layers=mtp_layers, left_out=left_out)

    @property
    def ordinary(self) -> Layer:
        return Layer(self.attention, self.mlp, self.cross)

    @property
    def rotary_dim(self) -> int:
        """The most entries of a head that rotary positions turn in a layer."""
        return max(layer.attention.rotary_dim for layer in self.kinds)

    @property
    def _period(self) -> tuple[Layer, ...]:
        return *self.alternates, self.ordinary

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

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Each layer's kind, in order."""
        return tuple(self.kinds[kind] for times, kinds in self.runs for kind in kinds * times)

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
