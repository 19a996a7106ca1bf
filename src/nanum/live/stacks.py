"""The encoder and decoder that are run for real: what `nanum.blocks.stacks` states, as PyTorch modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanum.live.decoder import SelfAttention, feed_forward
from nanum.live.layer import new_norm
from nanum.model import Attention, Model
from nanum.model import Layer as Kind

FURTHEST = 128
"""From this distance on all are in one bucket (modeling_t5.py: `relative_attention_max_distance`)."""


def buckets_of(rows: int, buckets: int, *, causal: bool) -> torch.Tensor:
    """The bucket [rows, rows] of each distance from a row to a key: half of them of one distance each, the others of
    ever more; without a causal mask as many again for keys that follow (Raffel et al. 2019, section 2.1).
    """
    place = torch.arange(rows)
    distance = place[:, None] - place[None, :]
    beyond = torch.zeros_like(distance)
    if not causal:
        buckets //= 2
        beyond = (distance < 0).to(torch.int64) * buckets
    distance = distance.clamp(min=0) if causal else distance.abs()
    near = max(buckets // 2, 1)
    growth = torch.log(distance.clamp(min=1).float() / near) / math.log(max(FURTHEST / near, 2.0)) * (buckets - near)
    far = (near + growth.to(torch.int64)).clamp(max=buckets - 1)
    return beyond + torch.where(distance < near, distance, far)


def biased_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Of heads [B, heads, S, head_dim], in eager kernels; the softmax is of fp32."""
    scores = q @ k.transpose(-1, -2)
    scores += bias
    return F.softmax(scores.float(), -1).to(q.dtype) @ v


class BiasedAttention(SelfAttention):
    """Self-attention whose scores have a bias, of which the first of a stack has the table."""

    def __init__(self, hidden_size: int, a: Attention) -> None:
        super().__init__(hidden_size, a)
        self.buckets, self.causal = a.relative_buckets, a.causal
        self.relative = nn.Embedding(a.relative_buckets, a.num_attention_heads) if a.has_table else None

    def bias(self, rows: int) -> torch.Tensor:
        """[1, heads, rows, rows]."""
        assert self.relative is not None
        values = self.relative(buckets_of(rows, self.buckets, causal=self.causal)).permute(2, 0, 1)[None]
        if not self.causal:
            return values
        return values + torch.full((rows, rows), -torch.inf, dtype=values.dtype).triu(1)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._heads(project(x)) for project in (self.wq, self.wk, self.wv))
        out: torch.Tensor = self.wo(biased_attention(q, k, v, bias).transpose(1, 2).flatten(2))
        return out


class CrossAttention(nn.Module):
    """Attention from the decoder's rows to what the encoder made."""

    def __init__(self, hidden_size: int, a: Attention) -> None:
        super().__init__()
        inner = a.num_attention_heads * a.head_dim
        self.head_dim = a.head_dim
        self.wq, self.wk, self.wv = (nn.Linear(hidden_size, inner, bias=a.qkv_bias) for _ in range(3))
        self.wo = nn.Linear(inner, hidden_size, bias=a.output_bias)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        q, k, v = self._heads(self.wq(x)), self._heads(self.wk(memory)), self._heads(self.wv(memory))
        out: torch.Tensor = self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class StackLayer(nn.Module):
    """A layer of either stack; the first of one makes its bias, and hands it on beside its output."""

    def __init__(self, m: Model, kind: Kind) -> None:
        super().__init__()
        assert isinstance(kind.attention, Attention)
        self.norm1, self.attention = new_norm(m), BiasedAttention(m.hidden_size, kind.attention)
        self.norm_cross = None if kind.cross is None else new_norm(m)
        self.cross = None if kind.cross is None else CrossAttention(m.hidden_size, kind.cross)
        self.norm2, self.mlp = new_norm(m), feed_forward(m.hidden_size, kind.mlp)
        self.makes_bias = kind.attention.has_table

    def forward(self, x: torch.Tensor, rows: int, bias: torch.Tensor | None, memory: torch.Tensor | None) -> Any:
        if bias is None:
            bias = self.attention.bias(rows)
        x = x + self.attention(self.norm1(x), bias)
        if self.cross is not None and self.norm_cross is not None:
            x = x + self.cross(self.norm_cross(x), memory)
        x = x + self.mlp(self.norm2(x))
        return (x, bias) if self.makes_bias else x


class EncoderDecoder(nn.Module):
    """A whole model: token ids [B, S], which both stacks are given, to logits [B, S, V]."""

    def __init__(self, m: Model) -> None:
        super().__init__()
        self.embedding = nn.Embedding(m.vocab_size, m.hidden_size)
        self.encoder_norm = new_norm(m)
        self.layers = nn.ModuleDict({str(i): StackLayer(m, kind) for i, kind in enumerate(m.layers)})
        self.norm = new_norm(m)
        self.head = nn.Linear(m.hidden_size, m.vocab_size, bias=False)
        self.encoder_layers, self.tied, self.scaled = m.encoder_layers, m.tie_word_embeddings, m.scaled_head
        self.tie()

    def tie(self) -> None:
        """One table for embedding and head, where the model shares it."""
        if self.tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        layers, n = list(self.layers.values()), self.encoder_layers
        # Not by a name of its own: it is let go when the decoder's layers have run.
        h = self.norm(self._stack(layers[n:], ids, self.encoder_norm(self._stack(layers[:n], ids, None))))
        logits: torch.Tensor = self.head(h * h.shape[-1] ** -0.5 if self.scaled else h)
        return logits

    def _stack(self, layers: Sequence[nn.Module], ids: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        x, rows = self.embedding(ids), ids.shape[1]
        x, bias = layers[0](x, rows, None, memory)
        for layer in layers[1:]:
            x = layer(x, rows, bias, memory)
        return x
