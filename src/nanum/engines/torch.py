"""Plain PyTorch 2.13: `fully_shard` on each layer and on the root, DTensor tensor parallelism, eager kernels as its CPU
build has them.

The conventions that recorded PyTorch steps follow to the byte; `verify` will run them. ZeRO-1 is its
ZeroRedundancyOptimizer in DDP, and without ZeRO several data ranks are DDP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanum.cluster import Cluster
from nanum.conventions import RING, Conventions, Kept, Numerics, fp8_gather, with_adapters
from nanum.engines import pipelining
from nanum.engines.engine import (
    Engine,
    eager_rule,
    fsdp_numerics,
    muon_rule,
    one_group_rule,
    unsharded_rule,
    weighed_layers,
    zero_rule,
)
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Model
from nanum.rules import Rule
from nanum.rules.offload import offload_rule, policy_rules
from nanum.states import States

PRODUCTS = (
    *("wq", "wk", "wv", "wo", "wq_gate", "gate", "up", "down"),
    *("cross_wq", "cross_wk", "cross_wv", "cross_wo"),
    *("wq_down", "wq_up", "wkv_down", "wkv_up", "wqkv", "wgate", "wrates"),
    *("router", "shared_gate", "shared_up", "shared_down", "shared_scale"),
)
"""Of a layer's linear layers: what selective recompute keeps, with attention and reductions."""


def whole_numerics(job: Job) -> Numerics:
    """A module in one dtype: parameters, gradients and states alike."""
    dtype = job.dtype
    return Numerics(dtype, dtype, dtype, States(job.optimizer, dtype, counters=True))


def conventions(model: Model, job: Job, structure: Structure) -> Conventions:
    return Conventions(
        numerics=fsdp_numerics(job) if structure.zero == 3 else whole_numerics(job),
        fused=frozenset(),
        dtensor=True,
        regather=False,
        # Gradients stay Partial over tp until they are reduced over data ranks or, where they are not, until AdamW
        # reads them: three times, or once where it is fused.
        tp_grads_at_once=structure.zero == 3 and not structure.pipelined and structure.grad_sync == "each",
        optimizer_sums=3,
        loss_parallel=False,
        loss_reductions=3,
        recompute_stops_early=True,
        selective=Kept(
            frozenset({*with_adapters(PRODUCTS, job.trained), "attention", "reduce_scatter", "all_reduce"}),
            rerun=frozenset({RING}),
        ),
        grads_resident=False,
        step_keeps_logits=True,
        rope_in_forward=False,
        stage_keeps_buffers=True,
        # DDP's hook at the end of backward waits for its buckets (reducer.cpp: finalize_backward).
        sends_after_reductions=structure.zero != 3,
        units="root",
        root_reshards=True,
        bucket_bytes=(2**20, 25 * 2**20),  # `bucket_cap_mb` would be both
        fp8="remade" if job.precision == "fp8" else "none",  # torchao's convert_to_float8_training
        fp8_gather=fp8_gather(job, structure),  # its enable_fsdp_float8_all_gather
    )


def _backwards_in_a_row(model: Model, job: Job, cluster: Cluster, layout: Layout) -> Any:
    """Does a stage's first backward in DDP have another one after it, without a forward pass between?"""
    m = job.num_microbatches(layout.micro_batch_size, layout.data_ranks)
    in_a_row = {"gpipe": m > 1, "1f1b": (m > 1) & (m <= layout.pp)}.get(layout.structure.schedule, False)
    return in_a_row & (layout.pp > 1) & (layout.structure.zero < 3) & (layout.data_ranks > 1)


RULES = (
    Rule(
        "weights are gathered in fp8 by FSDP2",
        lambda model, job, cluster, layout: layout.structure.fp8_gather & (layout.structure.zero != 3),
        lambda model, job, cluster, layout: (
            f"--fp8-gather with zero={layout.structure.zero}: FSDP2 is what gathers weights (torch): use --zero 3"
        ),
    ),
    offload_rule(
        "torch",
        lambda layout: layout.structure.zero != 3,
        "FSDP2's CPUOffloadPolicy is what offloads (--zero 3); DDP keeps all on the device",
    ),
    *policy_rules(
        "torch",
        "offload_policy",
        "torch.autograd.graph.save_on_cpu copies each tensor that is saved, weights among them, while the device "
        "waits, which is not modelled; megatron and deepspeed have it",
    ),
    muon_rule(
        "torch",
        lambda layout: layout.tp > 1,
        "torch.optim.Muon gathers those that tp cuts for each of its products, which is not modelled",
    ),
    muon_rule(
        "torch",
        lambda layout: (layout.structure.zero == 3) & (layout.dp_shard * layout.cp > 1),
        "torch.optim.Muon gathers FSDP2's shards for each of its products, which is not modelled; torchtitan's Muon "
        "brings each to one rank",
    ),
    muon_rule(
        "torch", lambda layout: layout.structure.zero == 1, "ZeroRedundancyOptimizer holds Muon or AdamW, not both"
    ),
    Rule(
        "torch.optim.Adafactor fails on DTensors",
        lambda model, job, cluster, layout: (
            (job.optimizer == "adafactor") & ((layout.structure.zero == 3) | (layout.tp > 1))
        ),
        lambda model, job, cluster, layout: (
            f"--optimizer adafactor with zero={layout.structure.zero} and tp={layout.tp}: PyTorch 2.13's Adafactor "
            "fails on the DTensors of FSDP2 and of tensor parallelism (torch)"
        ),
    ),
    Rule(
        "torch's context parallelism is with FSDP2",
        lambda model, job, cluster, layout: (layout.cp > 1) & (layout.structure.zero != 3),
        lambda model, job, cluster, layout: (
            f"cp={layout.cp} leaves gradients that are sums over its ranks, and with zero={layout.structure.zero} "
            "nothing here reduces them (torch): use --zero 3"
        ),
    ),
    Rule(
        "torch's expert parallelism is with FSDP2",
        lambda model, job, cluster, layout: (layout.ep > 1) & (layout.structure.zero != 3),
        lambda model, job, cluster, layout: (
            f"ep={layout.ep} with zero={layout.structure.zero}: gradients of experts are added among fewer ranks than "
            "others, which FSDP2 alone does (torch): use --zero 3"
        ),
    ),
    Rule(
        "a loss outside the root unit needs the head's weights",
        lambda model, job, cluster, layout: (layout.structure.loss == "chunked") & (layout.structure.zero == 3),
        lambda model, job, cluster, layout: (
            "--loss chunked with zero=3: the head is of the root unit here, which is resharded before a loss outside "
            "the model (torch); torchtitan keeps it gathered"
        ),
    ),
    eager_rule("torch", "it states eager kernels, as recorded; torchtitan takes it"),
    zero_rule("torch", (0, 1, 3), "it has no engine for ZeRO-2; ZeRO-1 is ZeroRedundancyOptimizer, and 3 is FSDP2"),
    unsharded_rule("torch", lambda dp_shard: f"DDP is --dp-replicate {dp_shard} --dp-shard 1"),
    one_group_rule("torch", (1,), "splits the optimizer over all ranks that add gradients"),
    Rule(
        "PyTorch's pipelining does not tie embeddings across stages",
        lambda model, job, cluster, layout: (layout.pp > 1) & model.tie_word_embeddings,
        lambda model, job, cluster, layout: (
            f"{model.name} ties its embeddings, and with pp={layout.pp} PyTorch's pipelining would train two tables"
        ),
    ),
    *pipelining.RULES,
    Rule(
        "DDP around tensor parallelism loses gradients in a pipeline",
        lambda model, job, cluster, layout: (
            (layout.pp > 1) & (layout.tp > 1) & (layout.structure.zero < 3) & (layout.data_ranks > 1)
        ),
        lambda model, job, cluster, layout: (
            f"zero={layout.structure.zero} with tp={layout.tp} and pp={layout.pp}: PyTorch 2.13's DDP replaces "
            "tensor-parallel weights at each forward pass, and of all passes in flight but one loses the gradients: "
            "use --zero 3"
        ),
    ),
    Rule(
        "DDP fails where a pipeline's first two backwards follow each other",
        _backwards_in_a_row,
        lambda model, job, cluster, layout: (
            f"schedule={layout.structure.schedule} with pp={layout.pp} has a stage whose first two backwards come in a "
            f"row, and PyTorch 2.13's DDP then fails as it rebuilds its buckets: use 1f1b with more than {layout.pp} "
            "micro-batches, or --zero 3"
        ),
    ),
)

TORCH = Engine(
    name="torch",
    version="2.13.0",
    default_zero=0,
    searched_zero_stages=(0, 1, 3),
    data_parallel="plain_or_fully_shard",
    conventions=conventions,
    layers_of_stage=weighed_layers,
    rules=RULES,
    schedules=pipelining.SCHEDULES,
    losses=("full", "chunked", "fused"),  # as a user writes it, or takes it from Liger
    sets_stages=True,  # a stage is the layers that its user gives it
    end_weights=(1, 1),
    recomputes=("first", "every", "chunk"),  # torch.utils.checkpoint is the user's own to put around layers
    fp8=True,
    fp8_gathers=True,
)


def on_gloo(bucket_cap_mb: float | None = None) -> Engine:
    """The same on a CPU: its own flash kernel, gloo, which gathers and scatters through copies, and AdamW tensor by
    tensor, PyTorch's default there. `bucket_cap_mb` is DDP's, in MiB, of the first bucket too.
    """

    def on_cpu(model: Model, job: Job, structure: Structure) -> Conventions:
        stated = conventions(model, job, structure)
        if bucket_cap_mb is not None:
            stated = replace(stated, bucket_bytes=(int(bucket_cap_mb * 2**20),) * 2)
        cpu = replace(stated, cpu_attention=True, half_statistics=True, optimizer_at_once=False)
        return replace(cpu, gather_copies=True, reduce_copies=True, device_is_host=True)

    return replace(TORCH, conventions=on_cpu)
