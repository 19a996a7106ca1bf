"""Every flag, stated once: its name, its help, and nothing else. All are taken as text; `words` reads them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer


def _text(flag: str, metavar: str, help: str) -> object:
    return typer.Option(flag, metavar=metavar, help=help, show_default=False)


ModelWord = Annotated[
    str, typer.Argument(metavar="MODEL", help="A preset (`nanum models`), a config.json, or its folder.")
]
ClusterWord = Annotated[
    str,
    typer.Argument(
        metavar="CLUSTER", help="NODESxGPUSxCHIP (8x8xh100-sxm), a preset (`nanum clusters`), or a TOML file."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]

SeqLen = Annotated[
    str | None, _text("--seq-len", "N", "Tokens in a sequence. [the smaller of the model's context and 8192]")
]
GlobalBatchSize = Annotated[
    str | None,
    _text("--global-batch-size", "N", "Sequences in a step. [4 Mi (4,194,304) tokens' worth, a multiple of the GPUs]"),
]
Precision = Annotated[str | None, _text("--precision", "fp32|bf16|fp16|fp8", "What the layers are computed in. [bf16]")]
Optimizer = Annotated[
    str | None, _text("--optimizer", "adamw|adamw-bf16|adamw-8bit|sgd|adafactor|lion|muon", "[adamw]")
]
Train = Annotated[
    str | None,
    _text("--train", "all|layers|ends|none", "The model's own weights that are trained. [all; beside adapters none]"),
]
MtpLayers = Annotated[
    str | None,
    _text("--mtp-layers", "N", "Modules of multi-token prediction after the last layer, which are trained too. [0]"),
]
LoraRank = Annotated[
    str | None, _text("--lora-rank", "N", "LoRA: adapters of rank N beside linear layers, which are frozen. [none]")
]
LoraTargets = Annotated[
    str | None,
    _text(
        "--lora-targets",
        "all|attention|qv",
        "Which linear layers of each layer have adapters; qv: of queries and values. [all]",
    ),
]
Quantize = Annotated[
    str | None, _text("--quantize", "none|nf4", "QLoRA: how frozen weights of linear layers are stored. [none]")
]
Engine = Annotated[
    str | None,
    _text(
        "--engine",
        "torchtitan|megatron|torch|deepspeed|accelerate|nanotron",
        "Whose conventions fix the bytes; plan also takes any. [torchtitan]",
    ),
]

DpReplicate = Annotated[str | None, _text("--dp-replicate", "N", "Data parallel, each holding a copy. [1]")]
DpShard = Annotated[
    str | None, _text("--dp-shard", "N", "Data parallel, sharded by --zero. [the GPUs that the others leave]")
]
Cp = Annotated[str | None, _text("--cp", "N", "Context parallel: ranks that share each sequence. [1]")]
Tp = Annotated[str | None, _text("--tp", "N", "Tensor parallel. [1]")]
Pp = Annotated[str | None, _text("--pp", "N", "Pipeline stages. [1]")]
Ep = Annotated[
    str | None, _text("--ep", "N", "Expert parallel: ranks with different experts, of dp_shard, cp and tp. [1]")
]
Etp = Annotated[
    str | None, _text("--etp", "N", "Tensor parallel within an expert. [as --tp; with --ep the engine's own]")
]
ExpertImbalance = Annotated[
    str | None,
    _text("--expert-imbalance", "X", "Of --ep, the fullest rank's token slots over its even share. [1]"),
]
ExpertCapacity = Annotated[
    str | None,
    _text("--expert-capacity", "X", "Slots that an expert takes, over its even share; others are dropped. [all]"),
]
PadExperts = Annotated[
    bool | None,
    typer.Option("--pad-experts", help="Each expert has as many slots as it may take. [no]", show_default=False),
]
RouterGroups = Annotated[
    str | None, _text("--router-groups", "N", "Equal groups of experts, of which a token's are chosen. [the model's]")
]
RouterGroupTopk = Annotated[
    str | None, _text("--router-group-topk", "M", "How many of the groups a token is sent to. [the model's]")
]
Dispatcher = Annotated[
    str | None,
    _text(
        "--dispatcher",
        "alltoall|flex",
        "How tokens come to experts on other ranks: each to all of its experts, or once to each node that has some and "
        "on to their ranks (DeepEP). [alltoall]",
    ),
]
DispatchDtype = Annotated[
    str | None, _text("--dispatch-dtype", "bf16|fp8", "Of --dispatcher flex, what tokens are sent in. [bf16]")
]
RankOrder = Annotated[
    str | None, _text("--rank-order", "AXES", "Mesh axes, outermost first. [pp,dp_replicate,dp_shard,cp,tp]")
]
Zero = Annotated[
    str | None,
    _text(
        "--zero",
        "0|1|2|3",
        "What is sharded over dp_shard and cp: nothing, optimizer states, gradients, weights. [the engine's own]",
    ),
]
Reshard = Annotated[
    bool | None,
    typer.Option(
        "--reshard/--no-reshard",
        help="ZeRO-3: drop the gathered weights after the forward pass. [the engine's own]",
        show_default=False,
    ),
]
Hpz = Annotated[
    bool | None,
    typer.Option(
        "--hpz/--no-hpz",
        help="ZeRO-3 over dp_replicate too, with a second copy of the weights among dp_shard and cp. [no]",
        show_default=False,
    ),
]
Sp = Annotated[
    bool | None,
    typer.Option(
        "--sp/--no-sp", help="Sequence parallel beside tensor parallel. [yes where --tp is over 1]", show_default=False
    ),
]
TpOverlap = Annotated[
    bool | None,
    typer.Option(
        "--tp-overlap/--no-tp-overlap",
        help="Sequence parallel's exchanges in pieces beside products: Megatron's --tp-comm-overlap, torchtitan's "
        "asynchronous tensor parallelism (with --compile). [no]",
        show_default=False,
    ),
]
CpKind = Annotated[str | None, _text("--cp-kind", "ring|allgather|ulysses", "How context parallel exchanges. [ring]")]
Schedule = Annotated[
    str | None,
    _text(
        "--schedule",
        "gpipe|1f1b|interleaved|looped-bfs|zb-h1|zb-h2|zbv|dualpipe|dualpipev",
        "Order of the pipeline's work; an engine that has no such schedule says so. [1f1b]",
    ),
]
VirtualStages = Annotated[
    str | None, _text("--virtual-stages", "N", "Stages held by one rank. [1, or 2 by a schedule of several]")
]
FirstStageLayers = Annotated[
    str | None,
    _text("--first-stage-layers", "N", "Layers of the first pipeline rank, beside which others share the rest."),
]
LastStageLayers = Annotated[str | None, _text("--last-stage-layers", "N", "Layers of the last pipeline rank.")]
EmbeddingWeight = Annotated[
    str | None,
    _text("--embedding-weight", "N", "Layers that the embedding counts as in the cut into stages. [the engine's own]"),
]
HeadWeight = Annotated[
    str | None, _text("--head-weight", "N", "Layers that the head counts as in the cut. [the engine's own]")
]
Recompute = Annotated[
    str | None,
    _text(
        "--recompute",
        "none|selective|full|MODULES",
        "What is computed again in the backward pass, not kept; or modules by the engine's names, with commas between "
        "(megatron: core_attn, layernorm, mla_up_proj, mlp, moe, moe_act, shared_experts). [none]",
    ),
]
RecomputeLayers = Annotated[
    str | None, _text("--recompute-layers", "N", "Full recompute of the first N layers of each stage alone. [all]")
]
RecomputeEvery = Annotated[str | None, _text("--recompute-every", "N", "Full recompute of each N-th layer alone. [1]")]
RecomputeChunk = Annotated[
    str | None,
    _text("--recompute-chunk", "N", "Full recompute of N layers at once, of which the first's input is kept. [1]"),
]
MicroBatchSize = Annotated[str | None, _text("--micro-batch-size", "N", "Sequences a rank computes at once. [1]")]
Attention = Annotated[str | None, _text("--attention", "flash|eager", "The attention kernel. [flash]")]
Compile = Annotated[
    bool | None,
    typer.Option("--compile/--no-compile", help="torch.compile. [no]", show_default=False),
]
Fp8Gather = Annotated[
    bool | None,
    typer.Option(
        "--fp8-gather/--no-fp8-gather",
        help="With --precision fp8: weights of linear layers are gathered in fp8 too. [no]",
        show_default=False,
    ),
]
Loss = Annotated[
    str | None,
    _text(
        "--loss",
        "full|chunked|fused",
        "Logits of all tokens at once, or of some after others, by a loop or by Liger's fused kernel. [full]",
    ),
]
LossChunks = Annotated[str | None, _text("--loss-chunks", "N", "Chunks of a chunked loss. [8]")]
Offload = Annotated[
    str | None,
    _text(
        "--offload",
        "none|optimizer|params|activations",
        "What is kept in the host's memory; several with a plus between, where the engine has them. [none]",
    ),
]
OffloadFraction = Annotated[
    str | None,
    _text("--offload-fraction", "X", "Of --offload optimizer, the part that the host updates (megatron). [1]"),
]

Top = Annotated[str | None, _text("--top", "N", "How many layouts to show. [10]")]
Ties = Annotated[
    bool,
    typer.Option("--ties", help="List near ties (at most 1 % slower, no less memory) as layouts of their own."),
]

Observed = Annotated[
    list[str] | None,
    typer.Option(
        "--observed",
        metavar="TIME",
        help="What a step of this layout really took (3.2s, 850ms): the machine is taken for what that shows. Said "
        "again: of another run of it.",
        show_default=False,
    ),
]
ObservedOutput = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE.toml",
        help="With --observed: write the machine so, as a cluster file.",
        show_default=False,
    ),
]

Gpus = Annotated[
    str | None,
    _text("--gpus", "N,N,…", "Counts of GPUs; beyond CLUSTER, with more of its nodes. [doubling up to all of CLUSTER]"),
]
Best = Annotated[bool, typer.Option("--best", help="The best layout for each count, in place of one that grows.")]

Ranks = Annotated[str | None, _text("--ranks", "N", "How many ranks train: processes of this machine.")]
Layers = Annotated[str | None, _text("--layers", "N", "The model with N layers. [its own]")]
Hidden = Annotated[
    str | None, _text("--hidden", "N", "The model with a hidden size of N, all else in proportion. [its own]")
]
Vocab = Annotated[str | None, _text("--vocab", "N", "The model with N tokens. [its own]")]
Steps = Annotated[str | None, _text("--steps", "N", "Steps to train, 4 or more; the third is counted. [4]")]
GradSyncFlag = Annotated[
    str | None,
    _text("--grad-sync", "each|last", "Gradients are reduced in each micro-batch, or in the last one alone. [each]"),
]
BucketCapMb = Annotated[str | None, _text("--bucket-cap-mb", "MiB", "DDP's buckets. [PyTorch's own: 1, then 25]")]
TorchEngine = Annotated[str | None, _text("--engine", "torch", "What is run is PyTorch itself. [torch]")]
Output = Annotated[
    str | None, typer.Option("-o", "--output", metavar="FILE.toml", help="Where to.", show_default=False)
]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]

SmallSeqLen = Annotated[str | None, _text("--seq-len", "N", "Tokens in a sequence. [64]")]
SmallGlobalBatchSize = Annotated[
    str | None,
    _text(
        "--global-batch-size", "N", "Sequences in a step. [a micro-batch a data rank; twice its stages in a pipeline]"
    ),
]
SmallMicroBatchSize = Annotated[str | None, _text("--micro-batch-size", "N", "Sequences a rank computes at once. [2]")]
RunPrecision = Annotated[str | None, _text("--precision", "fp32|bf16", "What the layers are computed in. [fp32]")]
RunSchedule = Annotated[
    str | None,
    _text(
        "--schedule",
        "gpipe|1f1b|interleaved|looped-bfs|zb-h1|zbv|dualpipev",
        "Order of the pipeline's work. [1f1b]",
    ),
]

OF_JOB: dict[str, Any] = {
    "seq_len": SeqLen,
    "global_batch_size": GlobalBatchSize,
    "precision": Precision,
    "optimizer": Optimizer,
    "mtp_layers": MtpLayers,
    "train": Train,
    "lora_rank": LoraRank,
    "lora_targets": LoraTargets,
    "quantize": Quantize,
    "expert_imbalance": ExpertImbalance,
    "expert_capacity": ExpertCapacity,
    "pad_experts": PadExperts,
    "router_groups": RouterGroups,
    "router_group_topk": RouterGroupTopk,
    "engine": Engine,
}
"""What is asked of a cluster, whatever the layout, by the names that `words` reads."""
OF_PLAN: dict[str, Any] = {
    "dispatcher": Dispatcher, "dispatch_dtype": DispatchDtype, "tp_overlap": TpOverlap, "compile": Compile
}  # fmt: skip
"""Of a layout, what a plan takes as it is said, and does not search."""
OF_LAYOUT: dict[str, Any] = {
    "dp_replicate": DpReplicate,
    "dp_shard": DpShard,
    "tp": Tp,
    "sp": Sp,
    "tp_overlap": TpOverlap,
    "pp": Pp,
    "schedule": Schedule,
    "zero": Zero,
    "reshard": Reshard,
    "hpz": Hpz,
    "recompute": Recompute,
    "recompute_layers": RecomputeLayers,
    "recompute_every": RecomputeEvery,
    "recompute_chunk": RecomputeChunk,
    "micro_batch_size": MicroBatchSize,
    "attention": Attention,
    "rank_order": RankOrder,
    "cp": Cp,
    "cp_kind": CpKind,
    "ep": Ep,
    "etp": Etp,
    "dispatcher": Dispatcher,
    "dispatch_dtype": DispatchDtype,
    "virtual_stages": VirtualStages,
    "first_stage_layers": FirstStageLayers,
    "last_stage_layers": LastStageLayers,
    "embedding_weight": EmbeddingWeight,
    "head_weight": HeadWeight,
    "loss": Loss,
    "loss_chunks": LossChunks,
    "fp8_gather": Fp8Gather,
    "offload": Offload,
    "offload_fraction": OffloadFraction,
    "compile": Compile,
}
"""What one layout is asked by."""


def taking(*tables: Mapping[str, Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Gives a command the flags of these tables in place of its `**`, before its last parameter. It reads them out of
    its context.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        several = {name: kind for table in tables for name, kind in table.items()}
        kind = inspect.Parameter.KEYWORD_ONLY
        added = [inspect.Parameter(name, kind, default=None, annotation=each) for name, each in several.items()]
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        last = own[-1].replace(kind=kind)
        command.__signature__ = inspect.Signature([*own[:-1], *added, last])  # type: ignore[attr-defined]
        command.__annotations__ = {**{p.name: p.annotation for p in own}, **several, "return": int}
        return command

    return decorate
