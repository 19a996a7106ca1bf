"""A training job: what is asked of the model, whatever the machine and the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
"""fp8 is of the operands of linear layers alone; all else is bf16."""
Optimizer = Literal["adamw", "adamw-bf16", "adamw-8bit", "sgd", "adafactor", "lion", "muon"]


@dataclass(frozen=True)
class Job:
    """`seq_len` tokens a sequence, `global_batch_size` sequences a step."""

    seq_len: int
    global_batch_size: int
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"

    @property
    def dtype(self) -> str:
        """Of activations, and of weights as they are computed with, but for what a product of fp8 makes of them."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.global_batch_size

    def num_microbatches(self, micro_batch_size: Any, data_ranks: Any) -> Any:
        """Micro-batches of `micro_batch_size` sequences that each of `data_ranks` does in a step: ints or arrays, for
        sizes whose product divides `global_batch_size` (what does not is refused by `rules`).
        """
        return self.global_batch_size // (micro_batch_size * data_ranks)


def default_seq_len(max_position_embeddings: int) -> int:
    """The smaller of the model's context and 8192."""
    return min(max_position_embeddings, 8192)


def default_global_batch_size(seq_len: int) -> int:
    """4 Mi tokens' worth of sequences, at least one."""
    return max(1, 4 * 2**20 // max(1, seq_len))
