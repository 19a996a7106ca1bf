"""A training job: what is asked of the model, whatever the machine and the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
Optimizer = Literal["adamw", "sgd"]


@dataclass(frozen=True)
class Job:
    """`seq_len` tokens a sequence, `global_batch_size` sequences a step."""

    seq_len: int
    global_batch_size: int
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.global_batch_size


def default_seq_len(max_position_embeddings: int) -> int:
    """The smaller of the model's context and 8192."""
    return min(max_position_embeddings, 8192)


def default_global_batch_size(seq_len: int) -> int:
    """4 Mi tokens' worth of sequences, at least one."""
    return max(1, 4 * 2**20 // max(1, seq_len))
