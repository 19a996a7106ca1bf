"""Hugging Face accelerate: FSDP2 around a model of transformers, as its mixed-precision policy has it.

Read at accelerate 16cb6eb (1.15.0.dev0): utils/fsdp_utils.py (`fsdp2_prepare_model`: trained parameters are made fp32;
each layer is a unit, and so are the embedding, and the last norm with the head, which stays gathered after forward),
utils/dataclasses.py (`set_mixed_precision`: gradients are reduced in the dtype of the computation), accelerator.py
(`no_sync`: they are reduced in the last micro-batch of a step). Kernels are PyTorch's eager ones, and so is AdamW, as
they are unless a user says otherwise. Tensor parallelism is transformers' plan, without sequence parallel; that it
leaves the embedding whole is not modelled.
"""

from __future__ import annotations

from dataclasses import replace

from nanum.conventions import FUSABLE, Conventions, Kept, Numerics
from nanum.engines import torch
from nanum.engines.engine import Engine, muon_rule, rank_rule, recompute_rule, weighed_layers, zero_rule
from nanum.job import Job
from nanum.layout import Structure
from nanum.model import Model
from nanum.rules import Rule
from nanum.rules.offload import policy_rules
from nanum.states import States


def conventions(model: Model, job: Job, structure: Structure) -> Conventions:
    reduced = job.dtype
    return replace(
        torch.conventions(model, job, structure),
        numerics=Numerics("fp32", job.dtype, reduced, States(job.optimizer, "fp32", counters=True)),
        fused=FUSABLE if structure.compile else frozenset(),
        tp_grads_at_once=False,  # unsynced gradients stay Partial over tp until they are reduced
        selective=Kept(),
        units="root" if model.tie_word_embeddings or model.encoder_layers else "ends",
        root_reshards=False,
        syncs_last=True,
    )


RULES = (
    *policy_rules(
        "accelerate", "fsdp_offload_params", "it has no way to offload activations; megatron and deepspeed have it"
    ),
    rank_rule("accelerate", "ep", "its ParallelismConfig has no experts"),
    rank_rule("accelerate", "pp", "its ParallelismConfig has dp_replicate, dp_shard, cp, sp and tp"),
    zero_rule("accelerate", (3,), "FSDP2 is ZeRO-3 (--zero 3); plain DDP under autocast is not modelled"),
    Rule(
        "tp or cp with dp_replicate needs dp_shard (accelerate)",
        lambda model, job, cluster, layout: (
            (layout.dp_replicate > 1) & (layout.dp_shard == 1) & ((layout.tp > 1) | (layout.cp > 1))
        ),
        lambda model, job, cluster, layout: (
            f"dp_replicate={layout.dp_replicate} with tp={layout.tp} and cp={layout.cp} needs dp_shard > 1 (accelerate)"
        ),
    ),
    Rule(
        "accelerate's tensor parallelism is not sequence parallel",
        lambda model, job, cluster, layout: layout.structure.tensor == "sequence",
        lambda model, job, cluster, layout: (
            f"tp={layout.tp} with sequence parallel is not in transformers' plans: use --no-sp (accelerate)"
        ),
    ),
    Rule(
        "accelerate's context parallelism is a ring",
        lambda model, job, cluster, layout: (layout.cp > 1) & (layout.structure.cp_kind != "ring"),
        lambda model, job, cluster, layout: (
            f"--cp-kind {layout.structure.cp_kind} is not accelerate's cp, which is PyTorch's ring: use --cp-kind ring"
        ),
    ),
    recompute_rule("accelerate", "fsdp_activation_checkpointing is of whole layers: use --recompute full"),
    muon_rule(
        "accelerate",
        lambda layout: (layout.dp_shard * layout.cp > 1) | (layout.tp > 1),
        "torch.optim.Muon gathers shards for each of its products, which is not modelled",
    ),
)

ACCELERATE = Engine(
    name="accelerate",
    losses=("full", "fused"),  # of transformers' models, by Liger's kernel
    version="1.15.0.dev0 (16cb6eb), torch 2.13",
    default_zero=3,
    searched_zero_stages=(3,),
    data_parallel="fully_shard",
    conventions=conventions,
    layers_of_stage=weighed_layers,
    rules=RULES,
    default_sp=False,
)
