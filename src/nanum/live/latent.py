"""Latent attention that is run for real: what `nanum.blocks.latent` states, as PyTorch modules with eager kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from nanum.model import LatentAttention

Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class LatentSelfAttention(nn.Module):
    """Its rotary entries are the last of each head. PyTorch's flash kernel of CPUs wants values as wide as keys."""

    def __init__(self, hidden_size: int, a: LatentAttention, core: Core, rotate: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        heads = a.num_attention_heads
        self.parts = a.qk_nope_head_dim, a.qk_rope_head_dim
        self.key_and_value = a.qk_nope_head_dim, a.v_head_dim
        self.latent = a.kv_lora_rank, a.qk_rope_head_dim
        if a.q_lora_rank:
            self.wq_down = nn.Linear(hidden_size, a.q_lora_rank, bias=a.bias)
            self.q_norm = nn.RMSNorm(a.q_lora_rank)
            self.wq_up = nn.Linear(a.q_lora_rank, heads * a.head_dim, bias=False)
        else:
            self.wq = nn.Linear(hidden_size, heads * a.head_dim, bias=False)
        self.wkv_down = nn.Linear(hidden_size, sum(self.latent), bias=a.bias)
        self.kv_norm = nn.RMSNorm(a.kv_lora_rank)
        self.wkv_up = nn.Linear(a.kv_lora_rank, heads * sum(self.key_and_value), bias=False)
        self.wo = nn.Linear(heads * a.v_head_dim, hidden_size, bias=a.bias)
        self.heads, self.core, self.rotate = heads, core, rotate

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        q = self.turned(self.queries(x), rotary)
        k, v = self.keys_and_values(x, rotary)
        out: torch.Tensor = self.wo(self.core(q, k, v).transpose(1, 2).flatten(2))
        return out

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.wq(x) if hasattr(self, "wq") else self.wq_up(self.q_norm(self.wq_down(x)))
        return flat.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def turned(self, q: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        nope, rope = q.split(self.parts, -1)
        return joined(nope, self.rotate(rope, *rotary))

    def keys_and_values(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latent, rope = self.wkv_down(x).split(self.latent, -1)
        rope = self.rotate(rope.contiguous().unsqueeze(1), *rotary)
        both = self.wkv_up(self.kv_norm(latent.contiguous())).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        nope, v = both.split(self.key_and_value, -1)
        return joined(nope, rope.expand(-1, self.heads, -1, -1)), v


def joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Heads [B, heads, S, entries] side by side, in memory [B, S, heads, entries] as a projection leaves them."""
    return torch.cat((first.transpose(1, 2), second.transpose(1, 2)), -1).transpose(1, 2)
