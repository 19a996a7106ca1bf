"""A mixture of experts that is run for real: what `nanum.operators.experts` states, as PyTorch modules with eager
kernels.

Routing is even whatever the router says: the choices of the tokens go round the experts in turn, so that shapes are
those of the derivation; a choice's weight is the router's own score, through which the router learns. Experts are
batched matmuls over [experts, slots, D].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from nanum.live.context import exchanged
from nanum.model import Experts

Feed = Callable[[Any, Any], nn.Module]


class ExpertWeights(nn.Module):
    """The routed experts, each a feed-forward block of its own."""

    def __init__(self, hidden_size: int, e: Experts) -> None:
        super().__init__()
        width, count = e.expert.intermediate_size, e.num_experts
        if e.expert.gated:
            self.gate = nn.Parameter(torch.empty(count, hidden_size, width))
        self.up = nn.Parameter(torch.empty(count, hidden_size, width))
        self.down = nn.Parameter(torch.empty(count, width, hidden_size))
        self.gated = e.expert.gated
        self.activation: Any = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}[e.expert.activation]

    def forward(self, slots: torch.Tensor) -> torch.Tensor:
        """slots [experts here, N, D] to as many answers."""
        if self.gated:
            inner = self.activation(times(slots, self.gate)) * times(slots, self.up)
        else:
            inner = self.activation(times(slots, self.up))
        return times(inner, self.down)


def times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each expert's rows by its own matrix, of which this rank may have some experts'."""
    own = weight.to_local() if isinstance(weight, DTensor) else weight
    return torch.bmm(x, own)


class Mixture(nn.Module):
    def __init__(self, hidden_size: int, e: Experts, feed_forward: Feed) -> None:
        super().__init__()
        self.num_experts, self.choices = e.num_experts, e.num_experts_per_tok
        self.router = nn.Linear(hidden_size, e.num_experts, bias=False)
        self.experts = ExpertWeights(hidden_size, e)
        self.shared = feed_forward(hidden_size, e.shared) if e.shared else None
        self.group: dist.ProcessGroup | None = None  # of ranks with different experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, order = self.route(tokens)
        y = self.answers(tokens, weights, order).view_as(x)
        return y if self.shared is None else y + self.shared(x)

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 weights [T, choices], and the slots' places [T * choices] among the choices, by expert."""
        scores = self.router(tokens).softmax(-1, dtype=torch.float32)
        chosen = torch.arange(len(tokens) * self.choices).view(len(tokens), self.choices) % self.num_experts
        return scores.gather(-1, chosen), chosen.flatten().argsort(stable=True)

    def answers(self, tokens: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        rows = order // self.choices
        slots = tokens[rows].view(self.num_experts, -1, tokens.shape[-1])
        if self.group is None:
            made = self.experts(slots)
        else:
            made = Return.apply(self.experts(Dispatch.apply(slots, self.group)), self.group)
        by = weights.flatten()[order].unsqueeze(1).to(tokens.dtype)
        scaled = made.flatten(0, 1) * by
        return torch.zeros_like(tokens).scatter_add(0, rows.unsqueeze(1).expand_as(scaled), scaled)


class Dispatch(torch.autograd.Function):
    """Slots of a rank's tokens [E, n, D] become those of its experts [E / ranks, ranks * n, D]."""

    @staticmethod
    def forward(ctx: Any, slots: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return to_experts(slots, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return to_tokens(grad, ctx.group), None


class Return(torch.autograd.Function):
    """The other way."""

    @staticmethod
    def forward(ctx: Any, slots: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return to_tokens(slots, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return to_experts(grad, ctx.group), None


def to_experts(slots: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    arrived = exchanged(slots.contiguous().view(group.size(), -1, *slots.shape[1:]), group)
    return arrived.transpose(0, 1).flatten(1, 2)  # of each expert the slots of all ranks


def to_tokens(slots: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    apart = slots.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    return exchanged(apart, group).flatten(0, 1)
