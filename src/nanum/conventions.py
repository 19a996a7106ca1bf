"""What an engine decides beyond the rules of sharding: dtypes, kernels, buffers, and when a pending sum is carried out.

An engine file fills one `Conventions`; every emitter reads it, and none asks for an engine by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from nanum.dtypes import NF4, Scales
from nanum.job import Job, Trained
from nanum.layout import Structure
from nanum.states import States

TARGETS = {"attention": ("wq", "wk", "wv", "wo", "wq_gate"), "qv": ("wq", "wv")}
"""The linear layers of a decoder's layer that have adapters, where not all have."""
LORA_A, LORA_B = "_lora_a", "_lora_b"
"""What the weights of an adapter are called, after the layer's own."""


def has_adapter(trained: Trained, name: str) -> bool:
    """Has the linear layer of this name, one of a decoder's layers, an adapter?"""
    return trained.lora_rank > 0 and (trained.lora_targets == "all" or name in TARGETS[trained.lora_targets])


def with_adapters(names: Iterable[str], trained: Trained) -> tuple[str, ...]:
    """The products of these linear layers in turn, and of their adapters."""
    return tuple(
        name + part for name in names for part in ("", LORA_A, LORA_B)[: 3 if has_adapter(trained, name) else 1]
    )


Fused = Literal["norm", "rotary", "activation", "loss", "optimizer", "residual", "softmax"]
"""`residual` is one kernel with the dropout before it; the `softmax` of eager scores knows which the mask hides."""
MorePasses = Literal["norm_grads", "qkv_bias", "heads"]
"""Kernels of an operation that go over its tensors once more: a norm's weights have their gradients from one of their
own; the bias of queries, keys and values is added to their product; the answers of eager attention are put in the order
of rows, and the gradients of queries, keys and values side by side."""
FUSABLE: frozenset[Fused] = frozenset({"norm", "rotary", "activation", "loss"})


@dataclass(frozen=True)
class Numerics:
    """The dtypes of a step, and what the optimizer keeps."""

    param_dtype: str  # as stored
    compute_dtype: str  # of gathered weights and activations
    grad_dtype: str  # in which gradients are reduced and kept
    states: States  # of the optimizer, master weights included
    frozen_dtype: str = ""  # of weights that are not trained, as stored; as computed with where nothing is said

    def stored_dtype(self, computed: str, *, trained: bool) -> str:
        """Of a weight that is `computed` with in this dtype. One that is quantized is so wherever it is."""
        if computed == NF4:
            return computed
        return self.param_dtype if trained else self.frozen_dtype or computed


@dataclass(frozen=True)
class Kept:
    """What of a layer's forward pass outlives it: outputs of the operations named, or all (None), but for those of
    regions of operations. `rerun` are run again whole, though their results are kept for those after them; of `remade`
    the results are made again too. They are run before backward begins, or each when backward comes to it (`in_turn`).
    """

    outputs: frozenset[str] | None = None
    rerun: frozenset[str] = frozenset()
    remade: frozenset[str] = frozenset()
    in_turn: bool = False

    def __or__(self, other: Kept) -> Kept:
        """Less is kept: the regions of both are run again."""
        return replace(self, rerun=self.rerun | other.rerun, remade=self.remade | other.remade)


EVERYTHING, NOTHING = Kept(), Kept(frozenset())

# Regions: parts of a layer that a recompute may name.
ATTENTION_CORE = "attention core"
"""Of an attention block between its projections."""
RING = "ring"
"""Of a ring's exchanges in the forward pass, which selective recompute runs again where it sees the ring as the kernels
that it is made of."""
LATENT_UP = "latent up"
"""Of latent attention from the vectors that all heads share to queries, keys and values."""
LATENT_NORM, EXPERTS_NORM = "norm before latent attention", "norm before experts"
ATTENTION_BLOCK = "attention block"
"""With its norm and its residual."""
FEED_FORWARD, EXPERTS, SHARED_EXPERTS = "feed-forward block", "experts", "shared experts"
ROUTER, SLOTS = "router", "slots of experts"
"""With the router what puts its choices in order, where that is done before tokens are sent; the rest of what is done
with choices is of slots."""
EXPERT_ACTIVATION = "activation of experts"
MTP_MODULE = "module of multi-token prediction"


@dataclass(frozen=True)
class Buckets:
    """DeepSpeed's `zero_optimization`, in elements (zero/config.py, its defaults)."""

    reduce: int = 500_000_000
    prefetch: int = 50_000_000
    reuse: int = 1_000_000_000  # a weight that is used again within so many stays gathered
    persist: int = 100_000  # a tensor up to this is not split
    update: int = 1_000_000_000  # of a rank's share that are updated at once
    overlaps: bool = False  # are gradients reduced beside backward, with two buckets in turn?
    contiguous: bool = True  # is there room for a bucket, or are gradients reduced where they are?


Fp8 = Literal["none", "remade", "kept"]
"""Linear layers of fp8: the input is quantized again in backward (torchao), or kept as it was (Transformer Engine)."""
NOT_IN_FP8 = frozenset({"head", "router", "shared_scale"})
"""Linear layers that stay in the precision of activations."""


def fp8_gather(job: Job, structure: Structure) -> bool:
    """Are weights gathered in fp8?"""
    return structure.fp8_gather and job.precision == "fp8"


TpBehind = Literal["none", "weights", "own", "all"]
"""`weights` are those of backward that a linear layer has beside the product of its other gradient: its input is
gathered beside the input's gradient, which is reduced beside the weight's. `own` are those of one product alone: its
result as it is, or its operand as it arrives. A sum of several results is not, nor what is quantized when it has been
gathered."""


@dataclass(frozen=True)
class Conventions:
    numerics: Numerics
    fused: frozenset[Fused]  # operators that are one kernel; the others are PyTorch's eager kernels
    dtensor: bool  # collectives work on dim 0, so any other dim costs a copy; an embedding's gradient is made whole
    regather: bool  # backward gathers a sequence-parallel input again (Megatron) instead of saving it whole (DTensor)
    tp_grads_at_once: (
        bool  # norm weights' sums over tp: in each backward, or when gradients are reduced over data ranks
    )
    loss_parallel: bool  # logits stay split over the vocabulary
    loss_reductions: int  # all-reduces of a vocabulary-parallel loss: 3, or 2 where two are sent as one
    recompute_stops_early: bool  # at the last tensor that backward needs (torch), or the whole forward again (Megatron)
    selective: Kept  # by selective recompute
    grads_resident: bool  # gradients live in a buffer for the whole run, and matmuls add into it
    adds_apart: bool = False  # are gradients added to these by kernels of their own, after the matmul's?
    loss_kernel: Literal["cross_entropy", "softmax", "in_place"] = (
        "cross_entropy"  # PyTorch's; the fp32 softmax is kept and becomes its gradient; the logits become it
    )
    stand_ins: bool = False  # an empty tensor for each shape of a weight, kept: see `parallel.stand_ins`
    flat_copies: tuple[int, int, int] = (
        0,
        0,
        0,
    )  # bytes beside flat buffers: an element, a shard's element, and in all
    stored_as_one: tuple[tuple[str, ...], ...] = ()  # weights that are one matrix together, by their rows: one product
    stage_keeps_output: bool = (
        True  # a pipeline stage holds its output until its backward (torch), or frees it (Megatron)
    )
    sends_after_reductions: bool = False  # does a stage's last backward end, and then send, when gradients are reduced?
    sends_parts: bool = (
        False  # each tensor-parallel rank sends its part of what they share, which the next stage gathers
    )
    stage_keeps_buffers: bool = False  # a stage has room for what it receives of each micro-batch, for the whole run
    chunk_weights: Literal["window", "aligned"] = "window"  # of several chunks of a rank: see `schedule.turns`
    optimizer_sums: int = 1  # how often the optimizer carries out a sum over tp that backward left pending
    step_keeps_logits: bool = False  # the caller's frame holds them until the step's end
    rope_in_forward: bool = (
        False  # rotary tables are made in each forward pass, and saved; otherwise each stage has them
    )
    vocab_multiple_per_tp: int = 1  # the vocabulary is padded to a multiple of this times tp
    units: Literal["root", "ends"] = "ends"  # FSDP units beside the layers: one root, or the two ends each their own
    root_reshards: bool = False  # are the root's (or the head's) weights freed after the forward pass?
    backward_reshards: bool = False  # are gathered weights freed after a pipeline's backward too, where they reshard?
    parks: Literal["none", "layer ahead", "as needed"] = "none"  # how offloaded activations travel: `parallel.parked`
    fp8: Fp8 = "none"
    fp8_gather: bool = False  # weights of linear layers are gathered in fp8, quantized before, with a scale each
    fp8_scales: Scales = "tensor"
    fp8_exchanges: bool = False  # what tensor parallelism gathers for such layers is quantized before, by one scale
    values_are_views: bool = True  # latent attention's values lie in what they were projected to, with keys beside them
    prefetches_units: bool = False  # backward gathers the whole next unit ahead; else of several groups the last alone
    ring_overlaps: bool = False  # a ring's exchanges run beside its attention (Transformer Engine), or are waited for
    ring_gathers: bool = True  # a ring's keys and values come by one gather, or are passed on rank by rank
    attention_library: Literal["flash", "cudnn", "triton"] = (
        "flash"  # FlashAttention 2, cuDNN's (Transformer Engine's choice), or FlashAttention 1 in Triton
    )
    repeats_keys: bool = False  # keys and values are copied for each head of queries before attention
    gathers_keys_again: bool = False  # gathered keys are gathered again in backward (Transformer Engine), or kept
    cpu_attention: bool = False  # PyTorch's flash kernel of CPUs: it has scratch, and wants a mask of gathered keys
    reduce_copies: bool = False  # gloo reduces a copy of what it scatters
    gather_copies: bool = False  # and gathers into a buffer of its own, which it copies out of
    stores_products: bool = False  # a backward's second half is products of weights' gradients alone: `halves`
    half_statistics: bool = False  # a LayerNorm's mean and deviation are kept in its own dtype (CPU), else in fp32
    device_is_host: bool = False  # numbers that autograd saves lie in the memory that is counted (CPU)
    optimizer_at_once: bool = True  # roots of all second moments together (foreach), or tensor by tensor
    expert_weights: Literal["before", "inside", "after"] = "after"  # an expert's input, activation or output is scaled
    syncs_last: bool = False  # gradients are reduced over data ranks in the last micro-batch alone, pipelined or not
    reduces_whole: bool = False  # a flat dim's gradients are all-reduced over ZeRO's ranks, which update but a share
    buckets: Buckets = Buckets()
    gathers_to_lists: bool = False  # what ZeRO-3 gathers, or scatters, is copied to or from a list, rank by rank
    reduces_beside: bool = True  # do Megatron's buckets, and ZeRO-3's weights, travel beside the passes?
    tp_behind: TpBehind = "none"  # which of tensor parallelism's exchanges are beside products
    ep_behind: bool = False  # do experts' exchanges run beside the compute of another micro-batch?
    more_passes: frozenset[MorePasses] = frozenset()
    calls: int = 1  # kernels launched for an operation that a step counts as one: casts, transposes, biases
    graphed: frozenset[str] = frozenset()  # regions of which a CUDA graph has the kernels: the host launches none
    experts_apart: bool = False  # does the host go through slots by expert (Transformer Engine), or launch all as one?
    shards_over_replicas: bool = False  # ZeRO splits over dp_replicate too
    slots_sorted: bool = False  # slots that arrive are copied in the experts' order, and back before they are returned
    bucket_elements: int = 0  # of a flat buffer: 0 is one exchange a unit
    bucket_bytes: tuple[int, int] = (0, 0)  # of DDP: what closes the first bucket, and what the others
