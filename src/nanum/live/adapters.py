"""What of a decoder is trained: adapters beside its linear layers (LoRA), and which of its own weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from nanum.job import Trained
from nanum.live.stage import Stage

SCALE = 2.0
"""Of what an adapter adds: PEFT's lora_alpha / r."""

TARGETED: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "attention": lambda name: name.startswith("attention."),
    "qv": lambda name: name in ("attention.wq", "attention.wv"),
}
"""Of a layer's linear layers, by their names."""


class AdaptedLinear(nn.Linear):
    """`W x + s B A x`, in the order of PEFT and torchtitan."""

    lora_a: nn.Linear
    lora_b: nn.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = super().forward(x)
        return base + self.lora_b(self.lora_a(x)) * SCALE


def train(model: Stage, trained: Trained) -> None:
    """Give the layers their adapters, and freeze what is not trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained.layers if name.startswith("layers.") else trained.ends)
    if trained.lora_rank:
        for layer in model.layers.values():
            linears = [(name, module) for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
            for name, linear in linears:
                if TARGETED[trained.lora_targets](name):
                    adapt(linear, trained.lora_rank)


def adapt(linear: nn.Linear, rank: int) -> None:
    """Make it an adapted one, whose own weight keeps its name."""
    linear.__class__ = AdaptedLinear
    linear.lora_a = nn.Linear(linear.in_features, rank, bias=False)
    linear.lora_b = nn.Linear(rank, linear.out_features, bias=False)
