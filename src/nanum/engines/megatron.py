"""Megatron-LM: its own tensor parallelism, flat fp32 gradient buffers, and a distributed optimizer.

Read at Megatron-LM d98e8a6 (core 0.20.0): tensor_parallel/layers.py (a sequence-parallel input is gathered again in
backward), cross_entropy.py (a vocabulary-parallel loss), distributed/ (buffers, buckets of at least max(40e6, 1e6 x dp)
elements, exchanged during the last backward), transformer/ (fused kernels), arguments.py. bf16 parameters, fp32 main
gradients, fp32 master weights.
"""

from __future__ import annotations

from typing import Any

from nanum.conventions import ATTENTION_CORE, FUSABLE, Conventions, Kept, Numerics
from nanum.engines.engine import Engine, eager_rule, where_pipelined, zero_rule
from nanum.job import Job
from nanum.layout import Structure
from nanum.model import Model
from nanum.rules import Rule


def numerics(job: Job) -> Numerics:
    """Half-precision parameters have fp32 masters; AdamW keeps two states, SGD with momentum one."""
    states = {"adamw": 8, "sgd": 4}[job.optimizer]
    return Numerics(job.precision, job.precision, "fp32", states + (4 if job.precision != "fp32" else 0))


def conventions(model: Model, job: Job, structure: Structure) -> Conventions:
    return Conventions(
        numerics=numerics(job),
        fused=FUSABLE | {"optimizer"},
        dtensor=False,
        regather=True,
        tp_grads_at_once=False,
        loss_parallel=True,
        loss_reductions=2,
        recompute_stops_early=False,
        selective=Kept(rerun=ATTENTION_CORE),
        grads_resident=structure.zero < 2,
        stage_keeps_output=False,
        gathers_ahead=False,
        vocab_multiple_per_tp=128,
        bucket_elements=40_000_000,
        expert_weights="inside",  # moe_utils and experts.py: probabilities go along, and scale the activation
    )


def layers_of_stage(num_hidden_layers: int, pp: Any, stage: Any) -> Any:
    """Equal stages; `RULES` refuse what does not divide."""
    return where_pipelined(pp, num_hidden_layers // pp + 0 * stage, num_hidden_layers)


RULES = (
    Rule(
        "megatron's context parallelism is not modelled yet",
        lambda model, job, cluster, layout: layout.cp > 1,
        lambda model, job, cluster, layout: (
            f"cp={layout.cp}: megatron's context parallelism (the rings of Transformer Engine) is not modelled yet; "
            "torchtitan and torch have it"
        ),
    ),
    eager_rule("megatron", "its kernels are fused by themselves"),
    zero_rule("megatron", (0, 1, 2, 3), "0 is DDP, 1 the distributed optimizer, 2 and 3 Megatron-FSDP"),
    Rule(
        "pp does not divide num_hidden_layers (megatron)",
        lambda model, job, cluster, layout: model.num_hidden_layers % layout.pp != 0,
        lambda model, job, cluster, layout: (
            f"pp={layout.pp} does not divide num_hidden_layers={model.num_hidden_layers} (megatron)"
        ),
    ),
    Rule(
        "Megatron-FSDP without ZeRO-3 reshards always",
        lambda model, job, cluster, layout: (layout.structure.zero < 3) & (not layout.structure.reshard),
        lambda model, job, cluster, layout: (
            f"--no-reshard needs --zero 3; with zero={layout.structure.zero} megatron gathers nothing to reshard"
        ),
    ),
)

MEGATRON = Engine(
    name="megatron",
    version="core 0.20.0 (d98e8a6)",
    default_zero=1,
    searched_zero_stages=(0, 1),
    data_parallel="flat_buffers",
    conventions=conventions,
    layers_of_stage=layers_of_stage,
    rules=RULES,
    default_etp=lambda tp: tp,  # arguments.py: expert-tensor-parallel-size
)
