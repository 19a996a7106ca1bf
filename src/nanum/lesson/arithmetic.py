"""The lesson's arithmetic, by its loose counting.

The loose counting is that of the shorter lesson that this one grew from, kept so that figures compare: the all-reduce
of the gradients as twice their bytes, a tensor-parallel all-reduce as its payload once, and of the activations the
forward pass only. What one rank really sends is read off the Program, in `lesson.ledger`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import log2

BF16_BYTES, FP32_BYTES = 2, 4
NOMINAL_PARAMETERS = 7 * 10**9
ZERO_GPUS = (1, 4, 8, 32)
SERIAL_FRACTIONS = (0.0, 0.02, 0.05, 0.10, 0.20)
DIVISIONS = (2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Dimensions:
    """The 7B-class training step of the lesson: bf16, a micro-batch of 4 sequences of 2048 tokens."""

    num_hidden_layers: int = 32
    hidden_size: int = 4096
    seq_len: int = 2048
    micro_batch_size: int = 4

    @property
    def activation_bytes(self) -> int:
        """One block's output for one micro-batch, in bf16."""
        return self.micro_batch_size * self.seq_len * self.hidden_size * BF16_BYTES


def data_parallel_bytes(parameters: int = NOMINAL_PARAMETERS) -> int:
    """Once a step: the gradients, all-reduced, counted twice (a reduce-scatter and an all-gather), in bf16."""
    return 2 * parameters * BF16_BYTES


def tensor_parallel_bytes(dimensions: Dimensions) -> int:
    """In each layer of the forward pass two all-reduces of a block's output, each counted once."""
    return dimensions.num_hidden_layers * 2 * dimensions.activation_bytes


def pipeline_bytes(dimensions: Dimensions) -> int:
    """At one boundary between stages, in the forward pass: a block's output."""
    return dimensions.activation_bytes


@dataclass(frozen=True)
class Growth:
    """How one way's bytes answer to one dimension made twice as large."""

    dimension: str
    ratio: float

    @property
    def exponent(self) -> float:
        return log2(self.ratio)

    @property
    def kind(self) -> str:
        """`independent`, `proportional`, `square`, or `between` where the exponent is more than a tenth from each."""
        named = {"independent": 0, "proportional": 1, "square": 2}
        return next((name for name, power in named.items() if abs(self.exponent - power) < 0.1), "between")


SWEPT = ("hidden_size", "micro_batch_size", "num_hidden_layers")


def sweep(parameters: Callable[[Dimensions], int]) -> dict[str, list[Growth]]:
    """Double hidden size, batch and layers, one at a time, and see what each way's bytes do.

    `parameters` counts the model of such dimensions.
    """
    base = Dimensions()
    ways: dict[str, Callable[[Dimensions], int]] = {
        "data_parallel": lambda dimensions: data_parallel_bytes(parameters(dimensions)),
        "tensor_parallel": tensor_parallel_bytes,
        "pipeline": pipeline_bytes,
    }
    doubled = {name: replace(base, **{name: 2 * getattr(base, name)}) for name in SWEPT}
    return {
        way: [Growth(name, count(larger) / count(base)) for name, larger in doubled.items()]
        for way, count in ways.items()
    }


SHARDED = ("none", "optimizer", "optimizer+grads", "optimizer+grads+params")
"""What ZeRO's stages 0, 1, 2 and 3 divide (Rajbhandari et al. 2019, figure 1)."""


def zero_bytes_per_gpu(sharded: str, gpus: int, parameters: int = NOMINAL_PARAMETERS) -> int | float:
    """Parameters, gradients and AdamW's two moments in fp32 on one GPU; whole bytes where they divide evenly."""
    state_bytes = {"params": FP32_BYTES, "grads": FP32_BYTES, "optimizer": 2 * FP32_BYTES}
    divided = sharded.split("+")
    ways = {state: gpus if state in divided else 1 for state in state_bytes}
    gpu_bytes = sum((Fraction(parameters * size, ways[state]) for state, size in state_bytes.items()), Fraction())
    return gpu_bytes.numerator if gpu_bytes.denominator == 1 else float(gpu_bytes)
