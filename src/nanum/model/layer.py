"""What a decoder layer is made of, by the names of a Hugging Face `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "relu", "relu2"]
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
"""The forms of GELU differ in the last digits of its value, not in what is computed, saved or sent."""
HeadNorm = Literal["none", "head", "bare_head", "width"]
"""Of queries and keys: none; of each head, by weights [head_dim] that all heads share (head) or without weights; of all
heads at once, by a weight for each entry (width).
"""


@dataclass(frozen=True)
class Attention:
    """Multi-head or grouped-query attention; `num_key_value_heads == num_attention_heads` is MHA.

    A token sees itself and those before it: all, or the last `window` (itself among them), or those of its own chunk of
    `window` tokens; where attention is not `causal` it sees all. `rotary` is how many entries of a head rotary
    positions turn: None is all of them, 0 none in this layer. Soft caps of the scores change neither a shape nor what a
    kernel reads and writes, and are not stated.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    dropout: float = 0.0
    qk_norm: HeadNorm = "none"
    window: int | None = None
    chunked: bool = False
    rotary: int | None = None
    sinks: bool = False  # a learned score for each head, beside those of the keys (gpt-oss)
    causal: bool = True
    gated: bool = False  # the output is scaled by the sigmoid of a second projection of the input (Qwen3-Next)
    relative_buckets: int = 0  # scores have a learned bias by the bucket of their distance (T5)
    has_table: bool = False  # of these biases: the first layer of a stack has it, and the others take what it made

    @property
    def rotary_dim(self) -> int:
        return self.head_dim if self.rotary is None else self.rotary


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come out of one normed
    vector of `kv_lora_rank`, beside one rotary key of `qk_rope_head_dim`; queries out of a normed vector of
    `q_lora_rank`, or out of the input itself (None). `bias` is that of the projections down, and of the output's.
    """

    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool = False
    dropout: float = 0.0

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Of queries and keys; values have `v_head_dim`."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim


@dataclass(frozen=True)
class LinearAttention:
    """Attention by a state [key_head_dim, value_head_dim] of each head, which does not grow with the sequence; its
    output is normed and gated by a projection of the input.

    - delta: the gated delta rule (Yang et al. 2024, arXiv 2412.06464; Qwen3-Next): queries, keys and values pass a
      short convolution over `convolved` tokens, and a token writes and forgets as two more numbers of each head say;
    - lightning: a decay that each head has for good (MiniMax-01, arXiv 2501.08313).
    """

    rule: Literal["delta", "lightning"]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    convolved: int = 0
    dropout: float = 0.0

    @property
    def num_attention_heads(self) -> int:
        return self.num_value_heads

    @property
    def num_key_value_heads(self) -> int:
        return self.num_key_heads

    @property
    def head_dim(self) -> int:
        """The larger of a head's two."""
        return max(self.key_head_dim, self.value_head_dim)

    @property
    def rotary_dim(self) -> int:
        return 0


@dataclass(frozen=True)
class Mlp:
    """A feed-forward block: `down(act(gate) * up)` when gated, `down(act(up))` otherwise."""

    intermediate_size: int
    gated: bool
    activation: Activation
    bias: bool = False
    dropout: float = 0.0  # of the inner activations


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: a router [num_experts, hidden_size] sends each token to `num_experts_per_tok` of them, and
    `shared` computes on every token. `router_bias` is a linear layer's; `correction_bias` is added to the scores for
    the choice alone and learns by no gradient (DeepSeek-V3): published counts have it among the parameters.
    """

    num_experts: int
    num_experts_per_tok: int
    expert: Mlp
    shared: Mlp | None = None
    shared_gate: bool = False  # the shared expert is scaled by a sigmoid of one more output of the input (Qwen2-MoE)
    router_bias: bool = False
    correction_bias: bool = False
    groups: int = 1  # equal runs of experts, of which a token is sent to `group_topk` (DeepSeek-V2, section 2.1.2)
    group_topk: int = 1

    @property
    def gated(self) -> bool:
        return self.expert.gated


@dataclass(frozen=True)
class Layer:
    """One kind of decoder layer; `cross` is attention to what an encoder made, between the two blocks."""

    attention: Attention | LatentAttention | LinearAttention
    mlp: Mlp | Experts
    cross: Attention | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        """The feed-forward widths that it computes with, each once."""
        if isinstance(self.mlp, Mlp):
            return (self.mlp.intermediate_size,)
        shared = () if self.mlp.shared is None else (self.mlp.shared.intermediate_size,)
        return tuple(dict.fromkeys((self.mlp.expert.intermediate_size, *shared)))
