"""torchtitan: FSDP2 around DTensor tensor parallelism and torch.distributed.pipelining.

Read at torchtitan b5bcd76 (August 2026): parallelize.py (units: embedding, each layer, norm and head),
pipeline_parallel.py (layers of a stage), activation_checkpoint.py (selective: every second matmul, attention and
reduce-scatters are kept), config/configs.py. Parameters are fp32 shards, gathered and computed in bf16, reduced in
fp32. nn.RMSNorm is one kernel on CUDA; the rest is eager unless compiled. The optimizer is fused. Context parallelism:
this version gathers keys and values around FlexAttention (allgather), 0.2 ran PyTorch's ring, and Ulysses is not its
own; each rank takes a block from both ends of a sequence, so that causal attention is even. Its optimizers are AdamW
and, for Muon, DistMuon; another is taken to be one that works on each rank's shards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanum.conventions import FUSABLE, Conventions, Kept, with_adapters
from nanum.engines import pipelining
from nanum.engines.engine import Engine, fsdp_numerics, muon_rule, two_blocks_rule, weighed_layers, zero_rule
from nanum.job import Job
from nanum.layout import ONE_STAGE, Layout, Structure
from nanum.model import Model
from nanum.rules import Rule
from nanum.rules.offload import policy_rules
from nanum.rules.trained import quantized_rule


def conventions(model: Model, job: Job, structure: Structure) -> Conventions:
    crosses = ("cross_wq", "cross_wk", "cross_wv", "cross_wo") if model.cross else ()
    layers = ("wq", "wk", "wv", "wo", *crosses, *(("gate",) if model.mlp.gated else ()), "up", "down")
    kept = {*with_adapters(layers, job.trained)[::2], "attention", "attended", "reduce_scatter"}
    return Conventions(
        numerics=replace(fsdp_numerics(job), frozen_dtype="fp32"),  # components/lora.py leaves them as they are
        fused=FUSABLE | {"optimizer"} if structure.compile else frozenset({"norm", "optimizer"}),
        dtensor=True,
        regather=False,
        tp_grads_at_once=not structure.pipelined,  # unsynced gradients stay Partial over tp until they are reduced
        loss_parallel=True,
        loss_reductions=3,
        recompute_stops_early=True,
        selective=Kept(frozenset(kept)),
        grads_resident=False,
        units="root" if model.tie_word_embeddings or model.encoder_layers else "ends",
        root_reshards=False,
        fp8="remade" if job.precision == "fp8" else "none",  # torchao, float8_linear.py; weights are gathered in bf16
        fp8_scales="rows",  # components/quantization/float8.py: recipe_name
        tp_behind="own" if structure.tp_overlap else "none",
        prefetches_units=True,  # parallelize.py: set_modules_to_backward_prefetch, of layers of experts
        expert_weights="before",  # models/moe: score_before_experts
    )


def _num_microbatches(job: Job, layout: Layout) -> Any:
    return job.num_microbatches(layout.micro_batch_size, layout.data_ranks)


RULES = (
    *policy_rules(
        "torchtitan",
        "training.enable_cpu_offload",
        "offloading activations is of its experiment graph_trainer, which is not modelled; megatron and deepspeed have "
        "it",
    ),
    quantized_rule("torchtitan", "its adapters stand beside weights as they are: use --engine torch"),
    muon_rule(
        "torchtitan",
        lambda layout: layout.tp > 1,
        "DistMuon's way with those that tp cuts too is not modelled: use --tp 1",
    ),
    zero_rule(
        "torchtitan",
        (0, 3),
        "FSDP2 is ZeRO-3 (--zero 3, with --reshard or --no-reshard), and --dp-shard 1 is plain data parallel",
    ),
    Rule(
        "torchtitan has no tensor parallel within experts that are spread",
        lambda model, job, cluster, layout: (layout.ep > 1) & (layout.etp > 1),
        lambda model, job, cluster, layout: (
            f"etp={layout.etp} beside ep={layout.ep} is not in this version of torchtitan (0.2.2 had it)"
        ),
    ),
    Rule(
        "zero 0 with dp_shard > 1",
        lambda model, job, cluster, layout: (layout.structure.zero == 0) & (layout.dp_shard * layout.cp > 1),
        lambda model, job, cluster, layout: (
            f"zero=0 shards nothing, but dp_shard={layout.dp_shard}: use dp_replicate (torchtitan)"
            if layout.cp == 1
            else f"zero=0 shards nothing, but FSDP2 is what reduces over cp={layout.cp}: use --zero 3 (torchtitan)"
        ),
    ),
    two_blocks_rule("torchtitan", "torchtitan's head-tail balance needs two blocks of a sequence for each cp rank"),
    Rule(
        "torchtitan does not tie embeddings across a pipeline",
        lambda model, job, cluster, layout: (layout.pp > 1) & model.tie_word_embeddings,
        lambda model, job, cluster, layout: (
            f"{model.name} ties its embeddings, which torchtitan refuses with pp={layout.pp}"
        ),
    ),
    Rule(
        "a pipeline needs as many micro-batches as stages (torch)",
        lambda model, job, cluster, layout: (layout.pp > 1) & (_num_microbatches(job, layout) < layout.pp),
        lambda model, job, cluster, layout: (
            f"pp={layout.pp} needs at least {layout.pp} micro-batches, and there are {_num_microbatches(job, layout)}: "
            f"global_batch_size={job.global_batch_size} over {layout.data_ranks} data ranks of "
            f"micro_batch_size={layout.micro_batch_size} (torch.distributed.pipelining)"
        ),
    ),
    *pipelining.RULES_OF_SEVERAL_CHUNKS,
    Rule(
        "a schedule of several stages a rank has two or more (torchtitan)",
        lambda model, job, cluster, layout: (
            (layout.pp > 1) & (layout.structure.schedule not in ONE_STAGE) & (layout.structure.virtual_stages == 1)
        ),
        lambda model, job, cluster, layout: (
            f"schedule={layout.structure.schedule} needs --virtual-stages 2 or more (torchtitan)"
        ),
    ),
)

TORCHTITAN = Engine(
    name="torchtitan",
    version="b5bcd76 (2026-08), torch 2.13",
    default_zero=3,
    searched_zero_stages=(3,),
    data_parallel="fully_shard",
    conventions=conventions,
    layers_of_stage=weighed_layers,
    rules=RULES,
    schedules=pipelining.SCHEDULES,
    losses=("full", "chunked"),
    searched_cp_kinds=("allgather",),  # its own
    tp_overlap="own",  # parallelism.enable_async_tensor_parallel: `_micro_pipeline_tp` with symmetric memory
    end_weights=(1, 1),  # pipeline_parallel_first_stage_less_layers, _last_stage_less_layers
    lacks_mtp="its deepseek_v3 has it, without pipelines and context parallelism, which is not modelled; megatron's is",
    default_reshard=lambda pp: pp == 1,  # parallelize.py: "default" keeps weights gathered under a pipeline
    fp8=True,
)
