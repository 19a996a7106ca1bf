"""The same training in one process: what losses and gradients of a divided run must equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanum.live.decoder import Decoder, named_parameters, seed_weights
from nanum.live.parallelize import DTYPES, stored_dtype
from nanum.live.question import Question
from nanum.live.training import batch, cross_entropy


@dataclass(frozen=True)
class Reference:
    loss: float
    gradients: dict[str, torch.Tensor]  # fp32, by the parameter's name


def reference(asked: Question) -> Reference:
    """One step of the whole model on the whole batch, in the job's precision."""
    alone = Decoder(
        asked.model,
        range(asked.model.num_hidden_layers),
        embeds=True,
        heads=True,
        positions=torch.arange(asked.job.seq_len),
    )
    seed_weights(alone, asked.seed)
    alone = alone.to(stored_dtype(asked)).to(DTYPES[asked.job.precision])
    ids = batch(asked).split(asked.layout.micro_batch_size)
    total = 0.0
    sums: dict[str, torch.Tensor] = {}
    for x in ids:
        loss = cross_entropy(alone(x), x) / len(ids)
        loss.backward()
        total += float(loss.detach())
        for name, parameter in named_parameters(alone):
            if parameter.grad is not None:  # summed in fp32, whatever the model is in
                sums[name] = sums.get(name, 0.0) + parameter.grad.float()
                parameter.grad = None
    return Reference(total, sums)


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """|g - g0| / |g0| of each gradient; one that is all but zero (a key's bias moves no softmax) is measured by a
    hundredth of what all gradients of its size have.
    """
    if not expected:
        return {}
    each = sum(float(g.square().sum()) for g in expected.values()) / sum(g.numel() for g in expected.values())
    return {
        name: float((found[name] - g).norm()) / max(float(g.norm()), 1e-2 * (each * g.numel()) ** 0.5)
        for name, g in expected.items()
        if name in found
    }
