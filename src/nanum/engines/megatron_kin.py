"""Megatron-LM as published runs had it: its older code, forks of it, and flags that change what is held.

They are asked for by `validate` alone; whoever plans a run takes `megatron`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from nanum.conventions import ATTENTION_BLOCK, EXPERTS_NORM, ROUTER, SHARED_EXPERTS, Conventions, Fused, Numerics
from nanum.engines.deepspeed import DEEPSPEED
from nanum.engines.deepspeed import conventions as deepspeed
from nanum.engines.engine import Engine, weighed_layers, where_pipelined
from nanum.engines.megatron import EQUAL_STAGES, MEGATRON, conventions
from nanum.job import Job
from nanum.layout import Structure
from nanum.model import Model
from nanum.states import States

UNEVEN = tuple(rule for rule in MEGATRON.rules if rule is not EQUAL_STAGES)
"""Its rules where a flag, or a fork, lays out layers that do not divide."""


def even_layers(num_hidden_layers: int, pp: Any, stage: Any) -> Any:
    """What does not divide goes to the first stages, one layer each."""
    return where_pipelined(pp, num_hidden_layers // pp + (stage < num_hidden_layers % pp), num_hidden_layers)


def equal_or_weighed(num_hidden_layers: int, pp: Any, stage: Any) -> Any:
    """Equal stages; where layers do not divide, embedding and head weigh a layer each."""
    equal = num_hidden_layers % pp == 0
    even = where_pipelined(pp, num_hidden_layers // pp + 0 * stage, num_hidden_layers)
    return equal * even + (1 - equal) * weighed_layers(num_hidden_layers, pp, stage)


def _changed(change: Callable[[Conventions, Job], Conventions]) -> Callable[[Model, Job, Structure], Conventions]:
    def changed(model: Model, job: Job, structure: Structure) -> Conventions:
        return change(conventions(model, job, structure), job)

    return changed


def _of_2021(stated: Conventions, job: Job) -> Conventions:
    """Apex's fused norm and optimizer, its own softmax, and kernels that the JIT makes of bias, GELU and dropout; a
    loss of three reductions; stages send in parts (Megatron's scatter/gather, DeepSpeed's `PartitionedTensor` in
    pipe/engine.py); a hook adds each gradient to its buffer (`main_grad.add_`), which a matmul did from 2022 on.
    """
    fused: frozenset[Fused] = frozenset({"norm", "activation", "optimizer", "residual", "softmax"})
    return replace(
        stated,
        fused=fused,
        more_passes=frozenset({"norm_grads", "qkv_bias", "heads"}),
        loss_reductions=3,
        stand_ins=False,
        reduces_beside=False,
        attention_library="flash",
        tp_behind="none",  # since 2022
        sends_parts=True,
        adds_apart=True,
    )


def _in_half(stated: Conventions, job: Job) -> Conventions:
    """Gradients are added and reduced in half precision (fp16 without `--accumulate-allreduce-grads-in-fp32`)."""
    return replace(_of_2021(stated, job), numerics=Numerics(job.dtype, job.dtype, job.dtype, _states(job)))


def _sc21(model: Model, job: Job, structure: Structure) -> Conventions:
    """Without a pipeline it has PyTorch's DDP, which reduces beside the backward (examples/sc21/run_table_1.sh)."""
    return replace(_in_half(conventions(model, job, structure), job), reduces_beside=not structure.pipelined)


IPG_BYTES = 2 * 500_000_000
"""A bucket of half-precision gradients on their way (`reduce_bucket_size`, 5e8 elements)."""


def _of_deepspeed(stated: Conventions, job: Job) -> Conventions:
    """DeepSpeed's optimizers beside that. ZeRO-1 keeps fp16 gradients in fp16; its step flattens a rank's shard of them
    and makes that fp32, each in one piece (runtime/zero/stage_1_and_2.py: `step`). PyTorch's caching allocator finds no
    room for such a piece in what smaller tensors have left, since segments do not merge, and never gives it back: what
    the device shows has it all along. bf16 gradients are added into fp32 ones of the whole rank, and stay until a
    backward has ended (runtime/bf16_optimizer.py).
    """
    fp16 = job.precision == "fp16"
    numerics = Numerics(job.dtype, job.dtype, "fp16" if fp16 else "fp32", _states(job))
    return replace(_of_2021(stated, job), numerics=numerics, flat_copies=(0, 2 + 4, IPG_BYTES) if fp16 else (2, 0, 0))


def _states(job: Job) -> States:
    return States(job.optimizer, "fp32", masters=True)


OF_2021 = replace(
    MEGATRON,
    version="v2 (2021), without Transformer Engine",
    conventions=_changed(_of_2021),
    layers_of_stage=even_layers,
    rules=UNEVEN,
    fp8=False,
)
SC21 = replace(OF_2021, conventions=_sc21)
ZERO_3_OF_2021 = replace(
    DEEPSPEED,
    version="of 2021",
    conventions=lambda model, job, structure: replace(
        deepspeed(model, job, structure), reduces_beside=False, gathers_to_lists=True
    ),
)
MEGATRON_DEEPSPEED = replace(OF_2021, version="Megatron-DeepSpeed (2021 to 2022)", conventions=_changed(_of_deepspeed))
ZERO_BUBBLE = replace(
    OF_2021,
    version="sail-sg/zero-bubble-pipeline-parallelism (2023)",
    conventions=_changed(lambda stated, job: replace(_in_half(stated, job), adds_apart=False, stores_products=True)),
    layers_of_stage=weighed_layers,
    end_weights=(1, 1),
    schedules=("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv"),
)


_ROUTED = frozenset({EXPERTS_NORM, ROUTER, SHARED_EXPERTS})
GRAPHED = {"router": _ROUTED, "partial": _ROUTED | {ATTENTION_BLOCK}}
"""By the scopes of `cuda_graph_scope`: `moe_router` and `moe_preprocess`, without and with `attn`. Shared experts are
in the router's where they do not run beside the exchange (transformer_layer.py: `_forward_mlp_router`)."""


@cache
def bridge(*, overlaps: str, graphs: str, grads: str, blocks: bool = False) -> Engine:
    """Megatron-Bridge, as its recipes set it (scripts/performance). Exchanges of experts run beside another micro-batch
    (`overlap_moe_expert_parallel_comm`; here beside its own pass's compute, which is as long, and is there too where
    there is but one micro-batch). Gradients are reduced in fp32, or in `grads`; fp8 has scales of `blocks` (MXFP8), or
    of tensors. Kernels in a CUDA graph are not launched one by one: those of `GRAPHED`, or all in a `full` one.
    """

    def recipe(stated: Conventions, job: Job) -> Conventions:
        return replace(
            stated,
            ep_behind="overlap_moe_expert_parallel_comm" in overlaps,
            calls=0 if graphs == "full" else stated.calls,
            graphed=GRAPHED.get(graphs, frozenset()),
            fp8_scales="blocks" if blocks else "tensor",
            numerics=replace(stated.numerics, grad_dtype=grads or stated.numerics.grad_dtype),
        )

    return replace(
        MEGATRON,
        version="Megatron-Bridge",
        conventions=_changed(recipe),
        layers_of_stage=equal_or_weighed,
        end_weights=(1, 1),
        rules=UNEVEN,
    )


BRIDGE = bridge(overlaps="", graphs="none", grads="")


def _loss_of_te(stated: Conventions, job: Job) -> Conventions:
    """`--cross-entropy-loss-fusion --cross-entropy-fusion-impl te` with Transformer Engine before 2.16: the gradient is
    written over the logits in forward (pytorch/triton/cross_entropy.py).
    """
    return replace(stated, loss_kernel="in_place", reduces_beside=False)


SIMUMAX: Engine = replace(
    MEGATRON, version="core 0.14 (23e00ed), Transformer Engine 2.11 and its loss", conventions=_changed(_loss_of_te)
)
