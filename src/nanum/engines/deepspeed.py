"""DeepSpeed: ZeRO of all stages around a model of PyTorch's eager kernels, Ulysses, and a pipeline of its own.

Read at DeepSpeed edaa722 (0.19.6, August 2026), with the defaults of its configuration: half-precision gradients
(`grad_accum_dtype` is the model's), fp32 masters, buckets of 5e8 elements, `overlap_comm` in ZeRO-3 alone
(zero/config.py). ZeRO-3 among `dp_shard` ranks, of which there are `dp_replicate` groups, is MiCS (`mics_shard_size`,
gathers not hierarchical), or with `hpz` a second partition (`zero_hpz_partition_size`). Tensor parallelism is
Megatron-DeepSpeed's or AutoTP's, and neither is modelled.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from nanum.conventions import Buckets, Conventions, Kept, Numerics
from nanum.engines.engine import (
    Engine,
    eager_rule,
    muon_rule,
    one_group_rule,
    rank_rule,
    recompute_rule,
    unsharded_rule,
    weighed_layers,
)
from nanum.job import Job
from nanum.layout import Structure
from nanum.model import LatentAttention, Layer, LinearAttention, Mlp, Model
from nanum.rules import Rule
from nanum.rules.offload import activations_rule, no_muon_rule, offload_rule, whole_optimizer_rule
from nanum.rules.trained import frozen_rule, quantized_rule
from nanum.states import States


def conventions(model: Model, job: Job, structure: Structure) -> Conventions:
    masters = structure.zero > 0 or job.dtype != "fp32"  # ZeRO copies fp32 parameters too
    return Conventions(
        numerics=Numerics(job.dtype, job.dtype, job.dtype, States(job.optimizer, "fp32", masters=masters)),
        fused=frozenset({"optimizer"}),
        dtensor=False,
        regather=False,
        tp_grads_at_once=False,
        loss_parallel=False,
        loss_reductions=3,
        recompute_stops_early=False,
        selective=Kept(),
        grads_resident=False,
        reduces_whole=True,
        parks="as needed",  # activation_checkpointing.cpu_checkpointing
        buckets=Buckets(overlaps=structure.zero == 3),
        shards_over_replicas=structure.hpz,
    )


def layers_of_stage(model: Model, stages: Any, stage: Any) -> Any:
    """By parameters (pipe/module.py: `partition_method`)."""
    if not isinstance(stages, np.ndarray) and not isinstance(stage, np.ndarray):
        return _shares(model, int(stages))[int(stage)]
    pairs = np.broadcast(np.asarray(stages), np.asarray(stage))
    return np.array([_shares(model, int(p))[int(s)] for p, s in pairs]).reshape(pairs.shape)


@lru_cache(maxsize=256)
def _shares(model: Model, stages: int) -> tuple[int, ...]:
    """Layers of each stage."""
    table = model.vocab_size * model.hidden_size
    positions = model.max_position_embeddings * model.hidden_size * (model.position == "learned")
    kinds = [_parameters(model, kind) for kind in model.kinds]
    layers = [kinds[kind] for times, several in model.runs for _ in range(times) for kind in several]
    ends = balanced([table + positions, *layers, model.hidden_size, table], stages)
    first, last = 1, len(layers) + 1  # where layers begin and end among the modules
    return tuple(max(0, min(b, last) - max(a, first)) for a, b in pairwise(ends))


def _parameters(model: Model, layer: Layer) -> int:
    """Of a layer's matrices, which is all that tells layers from ends."""
    a, mlp, d = layer.attention, layer.mlp, model.hidden_size
    if isinstance(a, LinearAttention):
        keys, values = a.num_key_heads * a.key_head_dim, a.num_value_heads * a.value_head_dim
        attention = d * (2 * keys + 3 * values + 2 * a.num_value_heads * (a.rule == "delta"))
    elif isinstance(a, LatentAttention):
        keys = (d + a.num_attention_heads * (a.qk_nope_head_dim + a.v_head_dim)) * a.kv_lora_rank
        queries = a.num_attention_heads * a.head_dim
        down = a.q_lora_rank and (d + queries) * a.q_lora_rank
        attention = keys + d * a.qk_rope_head_dim + (down or d * queries) + d * a.num_attention_heads * a.v_head_dim
    else:
        attention = 2 * d * (a.num_attention_heads + a.num_key_value_heads) * a.head_dim

    def width(block: Mlp | None) -> int:
        return 0 if block is None else (3 if block.gated else 2) * block.intermediate_size

    if isinstance(mlp, Mlp):
        return attention + d * width(mlp)
    return attention + d * (mlp.num_experts * (width(mlp.expert) + 1) + width(mlp.shared))


def balanced(weights: list[int], parts: int) -> list[int]:
    """Where each part begins, and where the last ends: the least difference between the heaviest and the lightest part,
    as `partition_balanced` (runtime/utils.py) finds it part by part, of equal ones the last.
    """
    n, sums = len(weights), np.concatenate([[0.0], np.cumsum(weights)])
    heavy, light, cost = (np.full((n + 1, parts + 1), np.inf) for _ in range(3))
    begin = np.zeros((n + 1, parts + 1), int)
    heavy[0, 0] = cost[0, 0] = 0
    for i in range(1, n + 1):
        for j in range(1, min(i, parts) + 1):
            part = sums[i] - sums[:i]
            high, low = np.maximum(heavy[:i, j - 1], part), np.minimum(light[:i, j - 1], part)
            found = high - low
            k = i - 1 - int(np.argmin(found[::-1]))
            cost[i, j], heavy[i, j], light[i, j], begin[i, j] = found[k], high[k], low[k], k
    ends = [n]
    for j in range(parts, 0, -1):
        ends.append(int(begin[ends[-1], j]))
    return ends[::-1]


RULES = (
    offload_rule(
        "deepspeed",
        lambda layout: ("optimizer" in layout.structure.offload) & (layout.structure.zero == 0),
        "offload_optimizer is of ZeRO: use --zero 1, 2 or 3",
    ),
    offload_rule(
        "deepspeed",
        lambda layout: ("params" in layout.structure.offload) & (layout.structure.zero != 3),
        "offload_param is of ZeRO-3: use --zero 3",
    ),
    Rule(
        "DeepSpeed updates with Adam alone on the host",
        lambda model, job, cluster, layout: (
            ("optimizer" in layout.structure.offload) & (job.optimizer not in ("adamw", "muon"))
        ),
        lambda model, job, cluster, layout: (
            f"--optimizer {job.optimizer} with --offload optimizer: of DeepSpeed's optimizers of the host its "
            "CPUAdam is modelled: use adamw (deepspeed)"
        ),
    ),
    no_muon_rule("deepspeed"),
    activations_rule("deepspeed", "full", "cpu_checkpointing is of what activation checkpointing keeps"),
    whole_optimizer_rule("deepspeed"),
    frozen_rule(
        "deepspeed",
        lambda layout: layout.structure.zero == 3,
        "which frozen weights ZeRO-3 keeps gathered is not modelled: use --zero 0, 1 or 2",
    ),
    quantized_rule("deepspeed", "how its flat buffers go with quantized weights is not modelled: use --engine torch"),
    rank_rule("deepspeed", "ep", "its expert parallelism (AutoEP, and MoE layers of its own) is not modelled"),
    rank_rule(
        "deepspeed",
        "tp",
        "it is Megatron-DeepSpeed's or AutoTP's, which are not modelled: use megatron",
    ),
    Rule(
        "DeepSpeed's context parallelism is Ulysses",
        lambda model, job, cluster, layout: (layout.cp > 1) & (layout.structure.cp_kind != "ulysses"),
        lambda model, job, cluster, layout: (
            f"--cp-kind {layout.structure.cp_kind} is not deepspeed's, which is Ulysses: use --cp-kind ulysses"
        ),
    ),
    Rule(
        "DeepSpeed's pipeline needs ZeRO below 2",
        lambda model, job, cluster, layout: (layout.pp > 1) & (layout.structure.zero > 1),
        lambda model, job, cluster, layout: (
            f"zero={layout.structure.zero} with pp={layout.pp}: deepspeed's pipeline needs --zero 0 or 1"
        ),
    ),
    Rule(
        "DeepSpeed's pipeline without ZeRO has an optimizer of its own in bf16",
        lambda model, job, cluster, layout: (layout.pp > 1) & (layout.structure.zero == 0) & (job.precision == "bf16"),
        lambda model, job, cluster, layout: (
            f"zero=0 with pp={layout.pp} in bf16 is deepspeed's BF16_Optimizer, which is not modelled: use --zero 1"
        ),
    ),
    one_group_rule("deepspeed", (1, 2), "shards over all data ranks", "; MiCS and hpZ are of --zero 3"),
    Rule(
        "MiCS beside Ulysses is not modelled",
        lambda model, job, cluster, layout: (
            (layout.structure.zero == 3) & (not layout.structure.hpz) & (layout.dp_replicate > 1) & (layout.cp > 1)
        ),
        lambda model, job, cluster, layout: (
            f"zero=3 of dp_replicate={layout.dp_replicate} groups is deepspeed's MiCS (mics_shard_size="
            f"{layout.dp_shard}), which is not modelled beside cp={layout.cp}: use --hpz, or dp_shard alone"
        ),
    ),
    unsharded_rule("deepspeed"),
    Rule(
        "DeepSpeed says itself what stays gathered",
        lambda model, job, cluster, layout: not layout.structure.reshard,
        lambda model, job, cluster, layout: (
            "--no-reshard is not for deepspeed, where stage3_max_reuse_distance says what stays gathered"
        ),
    ),
    eager_rule("deepspeed", "it states eager kernels"),
    recompute_rule("deepspeed", "activation checkpointing is of whole layers: use --recompute full"),
    muon_rule(
        "deepspeed", lambda layout: layout.structure.zero == 3, "how ZeRO-3 gathers them is not modelled: use --zero 2"
    ),
)

DEEPSPEED = Engine(
    name="deepspeed",
    version="0.19.6 (edaa722)",
    default_zero=3,
    searched_zero_stages=(0, 1, 2, 3),
    data_parallel="partitioned",
    conventions=conventions,
    layers_of_stage=weighed_layers,
    rules=RULES,
    layers_by_model=layers_of_stage,
    hpz=True,
    searched_cp_kinds=("ulysses",),
    schedules=("1f1b",),
)
