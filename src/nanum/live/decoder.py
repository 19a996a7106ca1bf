"""The decoder that is run for real: what `nanum.blocks` states, as PyTorch modules with eager kernels.

A pipeline stage is the same module with fewer layers, and with or without its two ends. Parameters are named as the
whole model names them and seeded by that name, so that every division of one model starts from the same numbers.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanum.live.experts import Mixture
from nanum.live.latent import LatentSelfAttention
from nanum.live.layer import Layer, new_norm
from nanum.model import Attention, Experts, LatentAttention, LinearAttention, Mlp, Model
from nanum.model import Layer as Kind

Run = Callable[[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None], torch.Tensor]
Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q [B, heads, S, head_dim], k and v [B, kv_heads, S, head_dim] -> [B, heads, S, head_dim], causal."""


def local_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def whole_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of an encoder, which sees what follows too."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


class SelfAttention(nn.Module):
    def __init__(self, hidden_size: int, a: Attention) -> None:
        super().__init__()
        self.head_dim = a.head_dim
        queries, keys = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
        self.wq = nn.Linear(hidden_size, queries, bias=a.qkv_bias)
        self.wk = nn.Linear(hidden_size, keys, bias=a.qkv_bias)
        self.wv = nn.Linear(hidden_size, keys, bias=a.qkv_bias)
        self.wq_gate = nn.Linear(hidden_size, queries, bias=a.qkv_bias) if a.gated else None
        sizes = (queries, keys) if a.qk_norm == "width" else (a.head_dim, a.head_dim)
        weights = a.qk_norm != "bare_head"
        norms = [nn.RMSNorm(size, elementwise_affine=weights) if a.qk_norm != "none" else None for size in sizes]
        self.q_norm, self.k_norm = norms
        self.whole_norm = a.qk_norm == "width"
        self.wo = nn.Linear(queries, hidden_size, bias=a.output_bias)
        self.core: Core = local_attention if a.causal else whole_attention

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        share = None if self.wq_gate is None else torch.sigmoid(self.wq_gate(x))
        q, k, v = self._heads(q, self.q_norm), self._heads(k, self.k_norm), self._heads(v)
        # Not `q = rotate(q)`: this frame holds what was not turned yet, as `nanum.blocks.layer` says.
        core = self.core(q, k, v) if rotary is None else self.core(rotate(q, *rotary), rotate(k, *rotary), v)
        flat = core.transpose(1, 2).flatten(2)
        out: torch.Tensor = self.wo(flat if share is None else flat * share)
        return out

    def _heads(self, x: torch.Tensor, norm: nn.Module | None = None) -> torch.Tensor:
        if norm is not None and self.whole_norm:
            x, norm = norm(x), None
        x = x.unflatten(-1, (-1, self.head_dim))
        return (x if norm is None else norm(x)).transpose(1, 2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions by halves (RoFormer, arXiv 2104.09864), of as many entries of a head as the tables have."""
    if cos.shape[-1] < x.shape[-1]:
        turned, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
        both = rotate(turned, cos, sin).transpose(1, 2), rest.transpose(1, 2)
        return torch.cat(both, -1).transpose(1, 2)  # in memory [B, S, heads, entries], as it came
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def square_of_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


class FeedForward(nn.Module):
    def __init__(self, hidden_size: int, m: Mlp) -> None:
        super().__init__()
        if m.gated:
            self.gate = nn.Linear(hidden_size, m.intermediate_size, bias=m.bias)
        self.up = nn.Linear(hidden_size, m.intermediate_size, bias=m.bias)
        self.down = nn.Linear(m.intermediate_size, hidden_size, bias=m.bias)
        self.gated = m.gated
        self.activation: Any = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "relu2": square_of_relu}[m.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.activation(self.gate(x)) * self.up(x) if self.gated else self.activation(self.up(x))
        out: torch.Tensor = self.down(inner)
        return out


def self_attention(hidden_size: int, a: Attention | LatentAttention) -> nn.Module:
    if isinstance(a, LatentAttention):
        return LatentSelfAttention(hidden_size, a, local_attention, rotate)
    return SelfAttention(hidden_size, a)


def feed_forward(hidden_size: int, m: Mlp | Experts) -> nn.Module:
    return Mixture(hidden_size, m, FeedForward) if isinstance(m, Experts) else FeedForward(hidden_size, m)


def new_layer(m: Model, kind: Kind) -> Layer:
    if isinstance(kind.attention, LinearAttention):
        raise ValueError("linear attention is not run")
    attention, mlp = self_attention(m.hidden_size, kind.attention), feed_forward(m.hidden_size, kind.mlp)
    return Layer(m, attention, mlp, turns=kind.attention.rotary_dim > 0)


class Decoder(nn.Module):
    """Layers `layers` of a model, with its embedding where `embeds` and its last norm and head where `heads`.

    `positions` are those of the tokens that this rank sees: rows of the learned table (int64), or fp32 angles' places.
    """

    places: torch.Tensor | None
    segments: Any  # of each token: one, the first
    cos: torch.Tensor | None
    sin: torch.Tensor | None

    def __init__(self, m: Model, layers: Sequence[int], *, embeds: bool, heads: bool, positions: torch.Tensor) -> None:
        super().__init__()
        wide, narrow = m.hidden_size, m.embedding_size
        self.embedding = nn.Embedding(m.vocab_size, narrow or wide) if embeds else None
        self.project_in = nn.Linear(narrow, wide, bias=False) if embeds and narrow else None
        self.token_types = nn.Embedding(m.token_types, wide) if embeds and m.token_types else None
        learned = m.position == "learned" and embeds
        self.positions = nn.Embedding(m.max_position_embeddings + m.unused_positions, wide) if learned else None
        self.embedding_norm = new_norm(m) if embeds and m.embedding_norm else None
        self.layers = nn.ModuleDict({str(i): new_layer(m, m.layers[i]) for i in layers})
        self.norm = new_norm(m) if heads and m.final_norm else None
        self.project_out: nn.Module | None = None
        if heads and m.head_transform:
            self.project_out = nn.Sequential(nn.Linear(wide, wide), nn.GELU(), new_norm(m))
        elif heads and narrow:
            self.project_out = nn.Linear(wide, narrow, bias=False)
        self.head = nn.Linear(narrow or wide, m.vocab_size, bias=m.head_bias) if heads else None
        turns = rotary_tables(m.rotary_dim, positions) if m.position == "rotary" else (None, None)
        self.register_buffer("places", positions + m.unused_positions if learned else None, persistent=False)
        self.register_buffer("segments", torch.zeros_like(positions) if self.token_types else None, persistent=False)
        for name, table in zip(("cos", "sin"), turns, strict=True):
            self.register_buffer(name, table, persistent=False)
        self.runs: Callable[[], Iterable[Run]] = self.layers.values  # layers in turn, or several at once
        self.logit_cap = m.logit_cap
        self.tied = m.tie_word_embeddings and embeds and heads
        self.tie()

    def tie(self) -> None:
        """One table for embedding and head, where both are here and the model shares it."""
        if self.tied and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids [B, S], or the stage before's activations [B, S, D], to logits [B, S, V] or activations."""
        if self.embedding is not None:
            x = self.embedding(x)
            if self.project_in is not None:
                x = self.project_in(x)
            if self.token_types is not None:
                x = x + self.token_types(self.segments.expand(len(x), -1))
            if self.positions is not None and self.places is not None:
                x = x + self.positions(self.places.expand(len(x), -1))
            if self.embedding_norm is not None:
                x = self.embedding_norm(x)
        rotary = None if self.cos is None or self.sin is None else (self.cos, self.sin)
        for run in self.runs():
            x = run(x, rotary)
        if self.head is None:
            return x
        h = x if self.norm is None else self.norm(x)
        logits: torch.Tensor = self.head(h if self.project_out is None else self.project_out(h))
        return logits if self.logit_cap is None else capped(logits, self.logit_cap)


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.tanh(logits / cap) * cap


def rotary_tables(head_dim: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [S, head_dim] of every position, in fp32."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(positions.float(), frequencies)
    both = torch.cat((angles, angles), -1)
    return both.cos(), both.sin()


@torch.no_grad()
def seed_weights(model: nn.Module, seed: int) -> None:
    """The same numbers for a parameter of one name, whatever else the module holds: small, so that training is calm."""
    for name, parameter in named_parameters(model):
        generator = torch.Generator().manual_seed((zlib.crc32(name.encode()) + seed) % 2**31)
        if parameter.dim() > 1:
            scale = 1.0 / math.sqrt(parameter.shape[-1])
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        elif name.endswith("bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter once, by the name it has in the whole model, whatever it is wrapped in."""
    for name, parameter in model.named_parameters():
        parts = (part for part in name.split(".") if part not in ("module", "_checkpoint_wrapped_module"))
        yield ".".join(parts), parameter
