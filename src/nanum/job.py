"""A training job: what is asked of the model, whatever the machine and the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
"""fp8 is of the operands of linear layers alone; all else is bf16."""
Optimizer = Literal["adamw", "adamw-bf16", "adamw-8bit", "sgd", "adafactor", "lion", "muon"]

TrainedWeights = Literal["all", "layers", "ends", "none"]
LoraTargets = Literal["all", "attention", "qv"]
Quantized = Literal["none", "nf4"]


@dataclass(frozen=True)
class Trained:
    """What of a model is trained. `weights` are the model's own: all of them, those of the layers, those of the two
    ends (the embedding, and the last norm with the head), or none; the others are frozen.

    Where `lora_rank` r is not 0, linear layers of the decoder's layers (`lora_targets`: all of them, attention's, or
    those of queries and values, which is PEFT's default for Llama) have an adapter each, y = W x + s B A x with
    A [r, in] and B [out, r] (Hu et al. 2021, arXiv 2106.09685). Frozen weights of linear layers may be quantized
    (QLoRA, arXiv 2305.14314).
    """

    weights: TrainedWeights = "all"
    lora_rank: int = 0
    lora_targets: LoraTargets = "all"
    quantize: Quantized = "none"

    @property
    def layers(self) -> bool:
        """Are the layers' own weights trained?"""
        return self.weights in ("all", "layers")

    @property
    def ends(self) -> bool:
        """Are those of the embedding, the last norm and the head?"""
        return self.weights in ("all", "ends")


ALL = Trained()


@dataclass(frozen=True)
class Routing:
    """How tokens come to experts. An expert takes at most `capacity` times its even share of each rank's slots, the
    others are dropped (GShard, arXiv 2006.16668); None drops none. Where experts are `padded`, each has so many slots
    whatever is sent to it. A token's experts are of `group_topk` of `groups` equal runs; where these are 0, as many as
    the model says.
    """

    capacity: float | None = None
    padded: bool = False
    groups: int = 0
    group_topk: int = 0

    def share(self, imbalance: float) -> float:
        """Of its even share, what the fullest rank of expert parallelism is sent, where tokens would send it
        `imbalance` times that. A rank's experts are taken to be sent alike.
        """
        if self.capacity is None:
            return imbalance
        return self.capacity if self.padded else min(imbalance, self.capacity)


DROPLESS = Routing()


@dataclass(frozen=True)
class Job:
    """`seq_len` tokens a sequence, `global_batch_size` sequences a step. Of the slots that tokens choose, the fullest
    rank of expert parallelism would get `expert_imbalance` times its even share.
    """

    seq_len: int
    global_batch_size: int
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    trained: Trained = ALL
    expert_imbalance: float = 1.0
    routing: Routing = DROPLESS

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Job:
        """As `dataclasses.asdict` and JSON have it."""
        nested = {"trained": Trained(**document.get("trained", {})), "routing": Routing(**document.get("routing", {}))}
        return cls(**{**document, **nested})

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


def default_global_batch_size(seq_len: int, *, fixed: bool = False, gpus: int = 1) -> int:
    """4 Mi tokens' worth of sequences, at least one; where these are no fewer than the GPUs, the next multiple of them,
    so that any layout may divide them. Where the length is `fixed` by the model, as that of a picture is, it is the
    next power of two below that is made one.
    """
    sequences = max(1, 4 * 2**20 // max(1, seq_len))
    sequences = 1 << sequences.bit_length() - 1 if fixed else sequences
    return sequences + -sequences % gpus if gpus <= sequences else sequences
