"""Megatron-LM: its own tensor parallelism, flat fp32 gradient buffers, and a distributed optimizer.

Read at Megatron-LM d98e8a6 (core 0.20.0): tensor_parallel/layers.py (a sequence-parallel input is gathered again in
backward), cross_entropy.py (a vocabulary-parallel loss), distributed/ (buffers, buckets of at least max(40e6, 1e6 x dp)
elements, exchanged during the last backward), pipeline_parallel/schedules.py (its interleaved schedule), transformer/
(fused kernels), arguments.py. bf16 parameters, fp32 main gradients, fp32 master weights. What its kernels hold is
Transformer Engine's: an empty tensor for each shape of a weight in the place of its gradient, which is in the buffer.
Its own loss keeps an fp32 softmax, whatever tp. Where `dp_replicate` is over 1 the distributed optimizer has so many
instances (--num-distributed-optimizer-instances): its shards are of dp_shard and cp, and gradients are reduce-scattered
among these, then all-reduced among the instances.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

from nanum.cluster import Cluster
from nanum.conventions import (
    ATTENTION_CORE,
    EXPERT_ACTIVATION,
    EXPERTS,
    EXPERTS_NORM,
    FEED_FORWARD,
    FUSABLE,
    LATENT_NORM,
    LATENT_UP,
    SHARED_EXPERTS,
    Conventions,
    Kept,
    Numerics,
    fp8_gather,
)
from nanum.engines.engine import (
    Engine,
    eager_rule,
    muon_rule,
    optimizer_rule,
    two_blocks_rule,
    where_pipelined,
    zero_rule,
)
from nanum.engines.evened import evened_ends, to_be_evened
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Layer, Model
from nanum.rules import Rule
from nanum.rules.dispatch import fp8_dispatch_rule
from nanum.rules.mtp import chunked_mtp_rule, sharded_mtp_rule
from nanum.rules.offload import activations_rule, no_muon_rule, offload_rule
from nanum.rules.recompute import has_experts, has_latent_attention, has_shared_experts, module_rule
from nanum.rules.rule import fails_to_divide
from nanum.rules.stacks import regathering_rule
from nanum.rules.trained import frozen_rule, quantized_rule
from nanum.states import States

STORED_AS_ONE = (
    ("wq", "wq_gate", "wk", "wv"),
    ("cross_wk", "cross_wv"),
    ("gate", "up"),
    ("shared_gate", "shared_up"),
    ("expert_gate", "expert_up"),
)
"""linear_qkv, linear_kv and linear_fc1 (core/transformer/attention.py, mlp.py)."""


def numerics(job: Job) -> Numerics:
    """Half-precision parameters have fp32 masters, and states of theirs."""
    states = States(job.optimizer, "fp32", masters=job.dtype != "fp32")
    return Numerics(job.dtype, job.dtype, "fp32", states)


def _again(*regions: str) -> Kept:
    return Kept(rerun=frozenset(regions), in_turn=True)


def _made_again(*regions: str) -> Kept:
    return Kept(remade=frozenset(regions), in_turn=True)


MODULES = {
    "core_attn": _again(ATTENTION_CORE),
    "layernorm": _made_again(LATENT_NORM, EXPERTS_NORM),
    "mla_up_proj": _made_again(LATENT_UP),
    "mlp": _again(FEED_FORWARD),
    "moe": _again(EXPERTS),
    "moe_act": _made_again(EXPERT_ACTIVATION),
    "shared_experts": _again(SHARED_EXPERTS),
}
"""What --recompute-modules may name (transformer_config.py): a checkpoint of a module, or one that discards its output
too (tensor_parallel.CheckpointWithoutOutput). layernorm is of norms that stand alone: the others are in Transformer
Engine's projections (gpt_layer_specs.py). mlp is of dense layers.
"""


def selective(modules: tuple[str, ...]) -> Kept:
    return reduce(or_, (MODULES[name] for name in modules or ("core_attn",) if name in MODULES), Kept(in_turn=True))


def conventions(model: Model, job: Job, structure: Structure) -> Conventions:
    return Conventions(
        numerics=numerics(job),
        fused=FUSABLE | {"optimizer", "residual"},
        dtensor=False,
        regather=True,
        tp_grads_at_once=False,
        loss_parallel=True,
        loss_reductions=2,
        loss_kernel="softmax",
        stand_ins=structure.zero < 2,
        stored_as_one=STORED_AS_ONE,
        recompute_stops_early=False,
        selective=selective(structure.recompute_modules),
        grads_resident=structure.zero < 2,
        stage_keeps_output=False,
        chunk_weights="aligned",
        vocab_multiple_per_tp=128,
        bucket_elements=40_000_000,
        tp_behind="all" if structure.tp_overlap else "weights",  # LinearWithGradAccumulationAndAsyncCommunication
        parks="layer ahead",  # --cpu-offloading-num-layers, all but two
        fp8="kept" if job.precision == "fp8" else "none",  # Transformer Engine, module/linear.py
        fp8_gather=fp8_gather(job, structure),
        fp8_exchanges=True,  # Transformer Engine, distributed.py: `gather_along_first_dim` with a quantizer
        backward_reshards=True,  # Megatron-FSDP
        values_are_views=False,  # multi_latent_attention.py makes them contiguous
        expert_weights="inside",  # moe_utils and experts.py: probabilities go along, and scale the activation
        ring_overlaps=True,  # --cp-comm-type p2p
        attention_library="cudnn",
        # Assumed: casts, transposes and bias kernels that a Program leaves out. Chosen with the runs in view that are
        # bound by launches; the fitted seconds of a launch take up what it is off by.
        calls=2,
        experts_apart=True,  # Transformer Engine's GroupedLinear: general_grouped_gemm, one cuBLAS call an expert
        gathers_keys_again=True,  # --cp-comm-type all_gather
        slots_sorted=True,  # token_dispatcher.py: dispatch_postprocess, combine_preprocess
    )


def layers_of_stage(num_hidden_layers: int, pp: Any, stage: Any) -> Any:
    """Equal stages; `RULES` refuse what does not divide, as arguments.py does where no flag cuts the first or the last
    stage otherwise.
    """
    return where_pipelined(pp, num_hidden_layers // pp + 0 * stage, num_hidden_layers)


def _within(layout: Layout) -> list[str]:
    """Modules that are named beside the one that they are in."""
    named = layout.structure.recompute_modules
    return [name for name in ("moe_act", "shared_experts") if name in named and "moe" in named]


def _sees_a_window(layer: Layer) -> bool:
    return getattr(layer.attention, "window", None) is not None


def _interleaves(layout: Layout) -> Any:
    return (layout.pp > 1) & (layout.structure.schedule == "interleaved")


def _stages(layout: Layout) -> Any:
    return layout.pp * (layout.structure.virtual_stages if layout.structure.pipelined else 1)


def _micro_batches(job: Job, layout: Layout) -> Any:
    return job.num_microbatches(layout.micro_batch_size, layout.data_ranks)


def _uneven(model: Model, job: Job, cluster: Cluster, layout: Layout) -> Any:
    """Do layers, with what the ends weigh, not divide among the stages; or those that the ends leave among the other
    ranks, or a rank's among its stages?
    """
    s, layers = layout.structure, model.num_hidden_layers
    if s.evens_ends:
        return False
    if not s.sets_stages:
        return fails_to_divide(_stages(layout), layers + (s.embedding_weight or 0) + (s.head_weight or 0))
    first, last, chunks = s.first_stage_layers, s.last_stage_layers, s.virtual_stages if s.pipelined else 1
    others, rest = layout.pp - (first > 0) - (last > 0), layers - first - last
    within = fails_to_divide(chunks, first) | fails_to_divide(chunks, last)
    return within | ((rest > 0) & fails_to_divide(others * chunks, rest))


def _say_uneven(model: Model, job: Job, cluster: Cluster, layout: Layout) -> str:
    s, layers = layout.structure, model.num_hidden_layers
    chunks = s.virtual_stages if s.pipelined else 1
    stages = f"pp·virtual_stages = {layout.pp}·{chunks}" if chunks > 1 else f"pp={layout.pp}"
    if s.sets_stages:
        return (
            f"first_stage_layers={s.first_stage_layers} and last_stage_layers={s.last_stage_layers} of "
            f"num_hidden_layers={layers} do not divide among {stages}: what they leave must be even over the other "
            "ranks, and each rank's over its stages (megatron)"
        )
    weights = (s.embedding_weight or 0) + (s.head_weight or 0)
    with_ends = f" and the {weights} that its ends weigh" if weights else ""
    if fails_to_divide(layout.pp, layers + weights):
        stages = f"pp={layout.pp}"
    instead = "--first-stage-layers, --last-stage-layers, --embedding-weight 1 or --head-weight 1 cut them otherwise"
    if chunks == 1 and not weights and to_be_evened(layers, layout.pp):
        first, last = evened_ends(layers, layout.pp)
        instead = f"--first-stage-layers {first} --last-stage-layers {last} leave the others as many each"
    return f"{stages} does not divide num_hidden_layers={layers}{with_ends} (megatron): {instead}"


EQUAL_STAGES = Rule(
    "pp does not divide num_hidden_layers, and too few are left for the first and the last stage to even it out "
    "(megatron): predict cuts them otherwise by --first-stage-layers, --last-stage-layers, --embedding-weight or "
    "--head-weight",
    _uneven,
    _say_uneven,
)
RULES = (
    offload_rule(
        "megatron",
        lambda layout: "params" in layout.structure.offload,
        "parameters stay on the device; --optimizer-cpu-offload takes the optimizer's states (--offload optimizer)",
    ),
    offload_rule(
        "megatron",
        lambda layout: ("optimizer" in layout.structure.offload) & (layout.structure.zero != 1),
        "--optimizer-cpu-offload needs the precision-aware optimizer of its distributed optimizer: use --zero 1",
    ),
    Rule(
        "megatron updates with AdamW alone on the host",
        lambda model, job, cluster, layout: (
            ("optimizer" in layout.structure.offload) & (job.optimizer not in ("adamw", "muon"))
        ),
        lambda model, job, cluster, layout: (
            f"--optimizer {job.optimizer} with --offload optimizer: --use-precision-aware-optimizer is of Adam alone "
            "(megatron)"
        ),
    ),
    no_muon_rule("megatron"),
    activations_rule("megatron", "none", "--cpu-offloading-num-layers is not for a model that recomputes"),
    Rule(
        "--fp8-param-gather is of the distributed optimizer (megatron)",
        lambda model, job, cluster, layout: layout.structure.fp8_gather & (layout.structure.zero != 1),
        lambda model, job, cluster, layout: (
            f"--fp8-gather with zero={layout.structure.zero}: --fp8-param-gather is of the distributed optimizer, and "
            "Megatron-FSDP's is not modelled: use --zero 1 (megatron)"
        ),
    ),
    frozen_rule(
        "megatron",
        lambda layout: layout.structure.zero > 1,
        "how Megatron-FSDP keeps frozen weights is not modelled: use --zero 0 or 1",
    ),
    quantized_rule("megatron", "Megatron-Bridge's adapters stand beside weights in the job's precision"),
    optimizer_rule(
        "megatron",
        {
            "adamw-8bit": "its precision-aware optimizer has moments in fp16, bf16 or fp8 and no blocks of 8 bits",
            "adafactor": "it has none, and its flat buffers keep no rows and columns",
        },
    ),
    muon_rule("megatron", lambda layout: layout.tp > 1, "how its Muon gathers those that tp cuts is not modelled"),
    muon_rule(
        "megatron",
        lambda layout: layout.structure.zero > 0,
        "a flat buffer cuts them anywhere; the layer-wise distributed optimizer is not modelled: use --zero 0",
    ),
    Rule(
        "Megatron's Muon is not for fp16",
        lambda model, job, cluster, layout: (job.optimizer == "muon") & (job.precision == "fp16"),
        lambda model, job, cluster, layout: "--optimizer muon is not for --precision fp16 (megatron)",
    ),
    Rule(
        "megatron's eager attention has no context parallelism",
        lambda model, job, cluster, layout: (
            (layout.cp > 1) & (layout.structure.attention == "eager") & (layout.structure.cp_kind != "ring")
        ),
        lambda model, job, cluster, layout: (
            f"cp={layout.cp} is of Transformer Engine's attention, and --attention eager is megatron's own"
        ),
    ),
    Rule(
        "megatron's ring has no sliding windows",
        lambda model, job, cluster, layout: (
            (layout.cp > 1) & (layout.structure.cp_kind == "ring") & any(map(_sees_a_window, model.kinds))
        ),
        lambda model, job, cluster, layout: (
            f"cp={layout.cp} by a ring: {model.name} has layers with a sliding window, which Transformer Engine's p2p "
            "refuses: use --cp-kind allgather or ulysses (megatron)"
        ),
    ),
    two_blocks_rule("megatron", "megatron takes two blocks of a sequence for each cp rank"),
    module_rule("mla_up_proj", has_latent_attention, "has no latent attention"),
    *(module_rule(name, has_experts, "has no experts") for name in ("moe", "moe_act")),
    module_rule("shared_experts", has_shared_experts, "has no shared experts"),
    module_rule(
        "layernorm",
        lambda layer: has_experts(layer) or has_latent_attention(layer),
        "has no norm of its own kernel: megatron's are in the projections after them, but before experts and latent "
        "attention",
    ),
    Rule(
        "recompute within a recomputed module",
        lambda model, job, cluster, layout: bool(_within(layout)),
        lambda model, job, cluster, layout: (
            f"--recompute {','.join(layout.structure.recompute_modules)}: moe recomputes "
            f"{' and '.join(_within(layout))} already, and twice over is not modelled (megatron)"
        ),
    ),
    fp8_dispatch_rule(
        "megatron",
        lambda job: job.precision != "fp8",
        "NCCL EP's MXFP8 is read by the experts' products as it is, so that these are of fp8 too: add --precision fp8",
    ),
    eager_rule("megatron", "its kernels are fused by themselves"),
    sharded_mtp_rule("megatron"),
    chunked_mtp_rule("megatron"),
    regathering_rule("megatron", "Megatron-FSDP would gather it once more for the decoder: use --zero 2"),
    zero_rule("megatron", (0, 1, 2, 3), "0 is DDP, 1 the distributed optimizer, 2 and 3 Megatron-FSDP"),
    EQUAL_STAGES,
    Rule(
        "megatron's ends weigh a layer or none",
        lambda model, job, cluster, layout: (
            max(layout.structure.embedding_weight or 0, layout.structure.head_weight or 0) > 1
        ),
        lambda model, job, cluster, layout: (
            f"embedding_weight={layout.structure.embedding_weight or 0} and head_weight="
            f"{layout.structure.head_weight or 0}: megatron counts an end as one layer or none; torchtitan as many"
        ),
    ),
    Rule(
        "megatron's interleaved schedule takes micro-batches in groups of pp",
        lambda model, job, cluster, layout: (
            _interleaves(layout) & (_micro_batches(job, layout) % (layout.pp + (layout.pp < 1)) != 0)
        ),
        lambda model, job, cluster, layout: (
            f"schedule=interleaved takes micro-batches in groups of pp={layout.pp}, which does not divide the "
            f"{_micro_batches(job, layout)} of global_batch_size={job.global_batch_size} over {layout.data_ranks} data "
            f"ranks of micro_batch_size={layout.micro_batch_size} (megatron)"
        ),
    ),
    Rule(
        "megatron interleaves two stages a rank or more",
        lambda model, job, cluster, layout: _interleaves(layout) & (layout.structure.virtual_stages == 1),
        lambda model, job, cluster, layout: (
            "schedule=interleaved with virtual_stages=1 is 1f1b in megatron: use that, or more stages a rank"
        ),
    ),
    Rule(
        "Megatron-FSDP's pipelines of several stages a rank are not modelled yet",
        lambda model, job, cluster, layout: _interleaves(layout) & (layout.structure.zero >= 2),
        lambda model, job, cluster, layout: (
            f"schedule=interleaved with zero={layout.structure.zero}, Megatron-FSDP, is not modelled yet: use --zero 0 "
            "or 1 (megatron)"
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
    schedules=("gpipe", "1f1b", "interleaved"),
    default_etp=lambda tp: tp,  # arguments.py: expert-tensor-parallel-size
    fp8=True,
    fp8_gathers=True,
    recompute_modules=tuple(MODULES),
    dispatchers=("alltoall", "flex"),  # --moe-token-dispatcher-type; flex's backends are DeepEP, and for fp8 NCCL EP
    drops_tokens=True,  # --moe-expert-capacity-factor, --moe-pad-expert-input-to-capacity
    tp_overlap="all",  # --tp-comm-overlap: Transformer Engine's user buffers
    evens_ends=True,
    sets_stages=True,  # --decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers
    end_weights=(0, 0),  # --account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split
    lacks_mtp="",
    recomputes=("first", "chunk"),  # recompute.py: --recompute-method block, or uniform
)
