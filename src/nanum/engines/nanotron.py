"""nanotron: Megatron-like tensor parallelism, fp32 gradients added up beside half-precision weights, ZeRO-1.

Read at nanotron 2411b02 (0.4, April 2026): parallel/tensor_parallel (REDUCE_SCATTER is sequence parallel, of which
backward gathers the input again; ALL_REDUCE is not), models/base.py (`build_model`: blocks go to stages by what they
compute), parallel/pipeline_parallel/engine.py (1f1b, and afab, which is GPipe), optim. Its published runs hold what an
unfused SwiGLU and an fp32 norm save, so both are taken to be PyTorch's eager kernels; rotary positions and AdamW are
fused. Its optimizer with ZeRO, fp32 gradients and several data ranks cannot run at this commit (the hook of DDP raises
NotImplementedError): what is stated is the way before, which the trainer still has.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, get_args

import numpy as np

from nanum.conventions import Conventions, Kept, Numerics
from nanum.engines.engine import (
    Engine,
    eager_rule,
    one_group_rule,
    optimizer_rule,
    rank_rule,
    recompute_rule,
    unsharded_rule,
    weighed_layers,
    zero_rule,
)
from nanum.job import Job, Optimizer
from nanum.layout import Structure
from nanum.model import Attention, Mlp, Model
from nanum.rules import Rule
from nanum.rules.offload import offload_rule
from nanum.rules.trained import frozen_rule
from nanum.states import States


def conventions(model: Model, job: Job, structure: Structure) -> Conventions:
    half = job.dtype != "fp32"
    return Conventions(
        numerics=Numerics(job.dtype, job.dtype, "fp32", States(job.optimizer, "fp32", masters=half)),
        fused=frozenset({"rotary", "optimizer"}),
        dtensor=False,
        regather=True,
        tp_grads_at_once=False,
        loss_parallel=True,
        loss_reductions=3,
        recompute_stops_early=False,
        selective=Kept(),
        grads_resident=False,
        reduces_whole=True,
        bucket_bytes=(25 * 2**20,) * 2,
    )


def layers_of_stage(model: Model, stages: Any, stage: Any) -> Any:
    """Blocks in order, each to the stage whose share of the work the blocks before it have not passed (models/base.py:
    `build_model`); a layer weighs its matrices' parameters, the head its own, the embedding and the last norm nothing.
    """
    if not isinstance(stages, np.ndarray) and not isinstance(stage, np.ndarray):
        return _shares(model, int(stages))[int(stage)]
    pairs = np.broadcast(np.asarray(stages), np.asarray(stage))
    return np.array([_shares(model, int(p))[int(s)] for p, s in pairs]).reshape(pairs.shape)


@lru_cache(maxsize=256)
def _shares(model: Model, stages: int) -> tuple[int, ...]:
    """Layers of each stage."""
    a, mlp, d = model.attention, model.mlp, model.hidden_size
    width = mlp.intermediate_size if isinstance(mlp, Mlp) else 0  # of others a model is refused
    layer = 4 * a.num_attention_heads * a.head_dim * d + 3 * d * width
    head = model.vocab_size * d
    costs = [0] + [layer] * model.num_hidden_layers + [0, head]
    shares, rank, done = [0] * stages, 0, 0
    for i, cost in enumerate(costs):
        done += cost
        shares[rank] += 1 <= i <= model.num_hidden_layers
        if done > sum(costs) * (rank + 1) / stages:
            rank = min(rank + 1, stages - 1)
    return tuple(shares)


def _of_llamas_kind(model: Model) -> bool:
    plain = all(isinstance(k.mlp, Mlp) and k.mlp.gated and isinstance(k.attention, Attention) for k in model.kinds)
    return plain and len(model.kinds) == 1 and model.position == "rotary"


RULES = (
    offload_rule("nanotron", lambda layout: True, "it keeps all on the device"),
    frozen_rule("nanotron", lambda layout: True, "it trains all weights"),
    rank_rule("nanotron", "ep", "it cannot run with ep above 1 at this version"),
    zero_rule("nanotron", (0, 1), "zero_stage above 0 is ZeRO-1: use --zero 1"),
    eager_rule("nanotron", "it states the kernels that its own runs had"),
    recompute_rule("nanotron", "recompute_layer is of whole layers: use --recompute full"),
    optimizer_rule(
        "nanotron",
        {o: "it has AdamW, and SGD without momentum" for o in get_args(Optimizer) if o not in ("adamw",)},
    ),
    rank_rule("nanotron", "cp", "its ring attention is not modelled"),
    one_group_rule("nanotron", (1,), "splits the optimizer over all data ranks"),
    unsharded_rule("nanotron"),
    Rule(
        "nanotron's models are of Llama's kind",
        lambda model, job, cluster, layout: not _of_llamas_kind(model),
        lambda model, job, cluster, layout: (
            f"{model.name} is no model of Llama's kind (rotary, gated, equal layers, no experts), as nanotron's are"
        ),
    ),
    Rule(
        "1F1B needs a micro-batch for each stage but one (nanotron)",
        lambda model, job, cluster, layout: (
            (layout.pp > 1)
            & (layout.structure.schedule == "1f1b")
            & (job.num_microbatches(layout.micro_batch_size, layout.data_ranks) < layout.pp - 1)
        ),
        lambda model, job, cluster, layout: (
            f"schedule=1f1b with pp={layout.pp} needs at least {layout.pp - 1} micro-batches, and there are "
            f"{job.num_microbatches(layout.micro_batch_size, layout.data_ranks)} (nanotron)"
        ),
    ),
)

NANOTRON = Engine(
    name="nanotron",
    version="0.4 (2411b02)",
    default_zero=1,
    searched_zero_stages=(0, 1),
    data_parallel="accumulated",
    conventions=conventions,
    layers_of_stage=weighed_layers,
    rules=RULES,
    layers_by_model=layers_of_stage,
    schedules=("1f1b", "gpipe"),
)
