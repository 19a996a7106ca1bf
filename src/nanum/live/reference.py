"""The same training in one process: what losses and gradients of a divided run must equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanum.live.adapters import train
from nanum.live.decoder import named_parameters, seed_weights
from nanum.live.parallelize import DTYPES, stored_dtype
from nanum.live.question import Question
from nanum.live.stage import Stage, new_stage
from nanum.live.training import batch, cross_entropy, new_optimizer


@dataclass(frozen=True)
class Reference:
    losses: list[float]  # of each step, over the whole batch
    gradients: dict[str, torch.Tensor]  # of the first step, fp32, by the parameter's name


def reference(asked: Question, tell: Callable[[str], None]) -> Reference:
    """Train the whole model on the whole batch, in the job's precision. Weights are kept as the divided run keeps them
    (in fp32 where FSDP2 does), and micro-batches are added up in that dtype.
    """
    kept, computes = _model(asked), _model(asked)
    kept, computes = kept.to(stored_dtype(asked)), computes.to(DTYPES[asked.job.precision])
    named = dict(named_parameters(kept))
    optimizer = new_optimizer(asked, [p for p in named.values() if p.requires_grad], None)
    size = asked.layout.micro_batch_size
    inputs, targets = (whole.split(size) for whole in batch(asked))
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for step in range(asked.steps):
        total = 0.0
        with torch.no_grad():
            for name, parameter in named_parameters(computes):
                parameter.copy_(named[name])
        for i, (x, target) in enumerate(zip(inputs, targets, strict=True)):
            tell(f"one process alone, to compare with: step {step}, micro-batch {i}")
            loss = cross_entropy(computes(x), target) / len(inputs)
            loss.backward()
            total += float(loss.detach())
            for name, parameter in named_parameters(computes):
                if parameter.grad is not None:
                    _add(named[name], parameter.grad)
                    parameter.grad = None
        if step == 0:
            gradients = {name: p.grad.float().clone() for name, p in named.items() if p.grad is not None}
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return Reference(losses, gradients)


def _model(asked: Question) -> Stage:
    layers, places = range(asked.model.num_hidden_layers), torch.arange(asked.job.seq_len)
    model = new_stage(asked.model, layers, embeds=True, heads=True, positions=places)
    train(model, asked.job.trained)
    seed_weights(model, asked.seed)
    return model


def _add(parameter: torch.nn.Parameter, grad: torch.Tensor) -> None:
    added = grad.to(parameter.dtype)
    parameter.grad = added.clone() if parameter.grad is None else parameter.grad + added


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """|g - g0| / |g0| of each gradient; one that is all but zero (a key's bias moves no softmax) is measured by a
    tenth of what all gradients of its size have.
    """
    if not expected:
        return {}
    each = sum(float(g.square().sum()) for g in expected.values()) / sum(g.numel() for g in expected.values())
    return {
        name: float((found[name] - g).norm()) / max(float(g.norm()), 0.1 * (each * g.numel()) ** 0.5)
        for name, g in expected.items()
        if name in found
    }
