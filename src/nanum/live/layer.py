"""The frame of a layer that is run for real: its norms, and the residual stream around its two blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nanum.model import Model


def new_norm(m: Model, size: int | None = None) -> nn.Module:
    size = size or m.hidden_size
    if m.norm == "rms_norm":
        return nn.RMSNorm(size)
    return nn.LayerNorm(size, elementwise_affine=m.norm != "layer_norm_no_weight", bias=m.norm == "layer_norm")


class Layer(nn.Module):
    """Attention and a feed-forward block, with norms where the model has them (`nanum.blocks.layer`)."""

    norm2: nn.Module | None
    norm1_after: nn.Module | None
    norm2_after: nn.Module | None

    def __init__(self, m: Model, attention: nn.Module, mlp: nn.Module, *, turns: bool) -> None:
        super().__init__()
        self.norm1, self.attention = new_norm(m), attention
        self.norm2, self.mlp = None if m.placement == "parallel" else new_norm(m), mlp
        sandwich = m.placement == "sandwich"
        self.norm1_after, self.norm2_after = (new_norm(m) if sandwich else None for _ in range(2))
        self.placement, self.turns = m.placement, turns

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        rotary = rotary if self.turns else None
        if self.placement.startswith("parallel"):
            return self._side_by_side(x, rotary)
        attend: Any = lambda h: self.attention(h, rotary)  # noqa: E731
        x = self._around(attend, x, self.norm1, self.norm1_after)
        return self._around(self.mlp, x, self.norm2, self.norm2_after)

    def _around(self, block: Any, x: torch.Tensor, norm: Any, after: Any) -> torch.Tensor:
        if self.placement == "post":
            return x + norm(block(x))
        if self.placement == "post_residual":
            y: torch.Tensor = norm(x + block(x))
            return y
        return x + (block(norm(x)) if after is None else after(block(norm(x))))

    def _side_by_side(self, x: torch.Tensor, rotary: Any) -> torch.Tensor:
        h = self.norm1(x)
        g = h if self.norm2 is None else self.norm2(x)
        # Not the sum of both blocks first: where a run again stops within the second, nobody would wait for the first's
        # exchange.
        y = x + self.attention(h, rotary)
        return y + self.mlp(g)
