"""The encoder of pictures that is run for real: what `nanum.blocks.pictures` states around the decoder's layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from nanum.live.decoder import new_layer
from nanum.live.layer import new_norm
from nanum.model import Model


class PictureEncoder(nn.Module):
    """Layers `layers` of a model, with its patches where `embeds` and its last norm and classifier where `heads`."""

    def __init__(self, m: Model, layers: Sequence[int], *, embeds: bool, heads: bool) -> None:
        super().__init__()
        if m.patches is None:
            raise ValueError(f"{m.name} has no patches")
        wide, p = m.hidden_size, m.patches
        self.class_token = nn.Parameter(torch.zeros(1, 1, wide)) if embeds else None
        self.positions = nn.Parameter(torch.zeros(1, p.seq_len, wide)) if embeds else None
        self.patches = nn.Linear(p.numbers, wide) if embeds else None
        self.layers = nn.ModuleDict({str(i): new_layer(m, m.layers[i]) for i in layers})
        self.norm = new_norm(m) if heads and m.final_norm else None
        self.classifier = nn.Linear(wide, m.vocab_size, bias=m.head_bias) if heads and m.vocab_size else None
        self.heads = heads
        self.runs: Callable[[], Iterable[Any]] = self.layers.values  # layers in turn, or several at once

    def tie(self) -> None:
        """Nothing is shared."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Patches [B, patches, numbers], or the stage before's activations [B, S, D], to logits [B, V] or activations;
        without a classifier to the class token's row [B, D].
        """
        if self.patches is not None and self.class_token is not None and self.positions is not None:
            x = self.patches(x)
            x = torch.cat((self.class_token.expand(len(x), -1, -1), x), 1)
            x = x + self.positions
        for run in self.runs():
            x = run(x, None)
        if not self.heads:
            return x
        h = x if self.norm is None else self.norm(x)
        if self.classifier is None:
            return h[:, 0].contiguous()
        logits: torch.Tensor = self.classifier(h[:, 0])
        return logits
