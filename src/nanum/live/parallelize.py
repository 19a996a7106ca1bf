"""A decoder divided by PyTorch's own engines. `parallelize` is the order of it, and all of it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nanum.layout import Structure
from nanum.live.context import Kind, context_attention
from nanum.live.counting import Ledger
from nanum.live.experts import Mixture
from nanum.live.pictures import PictureEncoder
from nanum.live.question import Question
from nanum.live.stacks import EncoderDecoder
from nanum.live.stage import Stage

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ZERO_AXES = ("dp_shard", "cp")
NORMS_OF_HEADS = ("q_norm", "k_norm")


def parallelize(model: Stage, asked: Question, mesh: DeviceMesh | None, ledger: Ledger) -> nn.Module:
    """From the inside out: split weights and sequences, attention over the context, recompute, then data parallel."""
    layout, structure = asked.layout, asked.layout.structure
    model = model.to(stored_dtype(asked))
    for parameter in model.parameters():
        if not parameter.requires_grad:  # as a checkpoint is loaded
            parameter.data = parameter.data.to(DTYPES[asked.job.precision])
    for name, table in model.named_buffers():
        if table.is_floating_point():  # rotary tables are in the dtype of what they turn
            setattr(model, name, table.to(DTYPES[asked.job.precision]))
    if layout.tp > 1 and mesh is not None:
        tensor_parallel(model, mesh["tp"], sequence=structure.tensor == "sequence")
    if structure.cp_kind != "none" and mesh is not None:
        context_parallel(model, mesh["cp"], structure.cp_kind)
    if structure.own_experts and mesh is not None:
        expert_parallel(model, asked, mesh["ep"])
    if structure.recompute != "none":
        checkpoint_layers(model, ledger, structure)
    if structure.zero == 3 and mesh is not None:
        return shard_fully(model, asked, mesh)
    axis = "dp_shard" if structure.zero == 1 else "dp_replicate"
    if mesh is not None and axis in asked.mesh:
        return replicate(model, asked, mesh[axis])
    return model


def stored_dtype(asked: Question) -> torch.dtype:
    """FSDP2 keeps fp32 and computes in less; a plain module is in one dtype."""
    return torch.float32 if asked.layout.structure.zero == 3 else DTYPES[asked.job.precision]


def tensor_parallel(model: Stage, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Columns, then rows, of attention and feed-forward; norms between them over split sequences, or whole."""
    stream = Shard(1) if sequence else Replicate()
    ends: dict[str, ParallelStyle] = (
        {}
        if isinstance(model, PictureEncoder)
        else {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
            "head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
        }
    )
    columns = ("attention.wq", "attention.wk", "attention.wv", "attention.wq_gate", "mlp.gate", "mlp.up")
    inside: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    inside |= {name: RowwiseParallel(output_layouts=stream) for name in ("attention.wo", "mlp.down")}
    whole = Replicate()
    if isinstance(model, EncoderDecoder):
        inside |= {f"cross.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        inside["cross.wo"] = RowwiseParallel(output_layouts=stream)
        inside["cross"] = PrepareModuleInput(input_layouts=(stream, stream), desired_input_layouts=(whole, whole))
        inside["attention.relative"] = ColwiseParallel()
    inside["attention"] = PrepareModuleInput(input_layouts=(stream, None), desired_input_layouts=(whole, None))
    inside["mlp"] = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,))
    if sequence:
        ends["norm"] = SequenceParallel()
        ends["positions"] = SequenceParallel(use_local_output=True)
        ends["embedding_norm"] = SequenceParallel(use_local_output=True)
        inside |= {name: SequenceParallel() for name in ("norm1", "norm_cross", "norm2")}
        if isinstance(model, EncoderDecoder):
            ends["encoder_norm"] = SequenceParallel(use_local_output=True)
        inside |= {name: SequenceParallel(use_local_output=True) for name in ("norm1_after", "norm2_after")}
    # Heads are split, and share the weights of their norm: [B, S, heads, head_dim].
    inside |= {f"attention.{name}": SequenceParallel(sequence_dim=2, use_local_output=True) for name in NORMS_OF_HEADS}
    parallelize_module(model, mesh, {name: how for name, how in ends.items() if getattr(model, name, None) is not None})
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {name: how for name, how in inside.items() if _has(layer, name)})
    model.tie()  # parallelize_module gives each its own


def _has(module: nn.Module, name: str) -> bool:
    return name in dict(module.named_modules())


def context_parallel(model: Stage, mesh: DeviceMesh, kind: Kind) -> None:
    for layer in model.layers.values():
        layer.attention.core = context_attention(kind, mesh.get_group())


def expert_parallel(model: Stage, asked: Question, mesh: DeviceMesh) -> None:
    """Each rank has some of the experts, and is sent the tokens of others for them."""
    for layer in model.layers.values():
        if mixture := mixture_of(layer):
            mixture.group = mesh.get_group()
            for name, weight in list(mixture.experts.named_parameters()):
                split = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
                setattr(mixture.experts, name, nn.Parameter(split))


def checkpoint_layers(model: Stage, ledger: Ledger, structure: Structure) -> None:
    """Each layer is run again in backward, or some of them, or several at once. Selective keeps matmuls, attention and
    reductions, and runs the rest.
    """
    selective = structure.recompute == "selective"
    aten, functional = torch.ops.aten, torch.ops._c10d_functional
    keep = {
        aten.mm.default,
        aten.addmm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        functional.reduce_scatter_tensor.default,
        functional.all_reduce.default,
    }

    def policy(_: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in keep else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> tuple[Any, Any]:
        if not selective:
            return contextlib.nullcontext(), Again(ledger, contextlib.nullcontext())
        first, second = create_selective_checkpoint_contexts(policy)
        return first, Again(ledger, second)

    if structure.in_chunks and not isinstance(model, EncoderDecoder):
        layers, size = list(model.layers.values()), structure.recompute_chunk
        how = {"use_reentrant": False, "context_fn": contexts, "preserve_rng_state": False}
        chunks = [partial(checkpoint, Chunk(layers[i : i + size]), **how) for i in range(0, len(layers), size)]
        model.runs = lambda: chunks
        return
    for i, (name, layer) in enumerate(model.layers.items()):
        first = structure.recompute_layers == 0 or i < structure.recompute_layers
        if first and (i + 1) % structure.recompute_every == 0:
            model.layers[name] = checkpoint_wrapper(layer, context_fn=contexts, preserve_rng_state=False)


@dataclass(frozen=True)
class Chunk:
    """Layers that are run again together."""

    layers: Sequence[nn.Module]

    def __call__(self, x: torch.Tensor, rotary: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, rotary)
        return x


class Again:
    """The second run of a layer, told to the ledger. It holds `context` for as long as PyTorch would."""

    def __init__(self, ledger: Ledger, context: Any) -> None:
        self.ledger, self.context = ledger, context
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self.stack.enter_context(self.ledger.during("recompute"))
        self.stack.enter_context(self.context)

    def __exit__(self, *error: Any) -> bool | None:
        return self.stack.__exit__(*error)


def shard_fully(model: Stage, asked: Question, mesh: DeviceMesh) -> nn.Module:
    """FSDP2: a unit for each layer, and a root of the rest, which is resharded like them."""
    compute = DTYPES[asked.job.precision]
    mixed = compute is not torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32) if mixed else MixedPrecisionPolicy()
    how = {
        "mesh": data_mesh(asked, mesh),
        "mp_policy": policy,
        "reshard_after_forward": asked.layout.structure.reshard,
    }
    for layer in model.layers.values():
        if mixture := mixture_of(layer):
            shard_with_experts(layer, mixture, asked, mesh, how)
        else:
            fully_shard(layer, **how)
    root = fully_shard(model, **how)
    if asked.layout.structure.own_experts:
        for unit in (root, *model.layers.values()):
            unit.set_gradient_divide_factor(1.0)  # `training.loss_share` divides: an expert has all ranks' tokens
            unit.set_force_sum_reduction_for_comms(True)
    return root


def mixture_of(layer: nn.Module) -> Mixture | None:
    feed_forward = layer.get_submodule("mlp")
    return feed_forward if isinstance(feed_forward, Mixture) else None


def shard_with_experts(
    layer: nn.Module, mixture: Mixture, asked: Question, mesh: DeviceMesh, how: dict[str, Any]
) -> None:
    """One unit, whose experts may lie on a mesh of their own; each expert's first dim is cut where there are fewer
    experts than ranks.
    """
    outer = ("dp_replicate",) if "dp_replicate" in asked.mesh else ()
    here: DeviceMesh = how["mesh"]
    if asked.layout.structure.own_experts:
        here = mesh[(*outer, "edp")]
    ranks = here.size() // (here.size(0) if outer else 1)
    cut = Shard(1) if ranks > mixture.num_experts // asked.layout.ep else Shard(0)
    info = HSDPMeshInfo(here, 1, 0) if outer else FSDPMeshInfo(here, 0)
    of_experts = {id(weight) for weight in mixture.experts.parameters()}

    def place(weight: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(cut, info) if id(weight) in of_experts else None

    fully_shard(layer, **how, shard_placement_fn=place if asked.layout.structure.own_experts else None)


def data_mesh(asked: Question, mesh: DeviceMesh) -> DeviceMesh:
    """Shards over dp_shard and cp, as one axis; copies over dp_replicate before it (HSDP). Experts' own axes are
    dp_shard, cut in two.
    """
    shard = (
        ("edp", "ep")
        if asked.layout.structure.own_experts
        else tuple(axis for axis in asked.layout.rank_order if axis in ZERO_AXES and axis in asked.mesh)
    )
    if len(shard) > 1:
        mesh[shard]._flatten("_".join(shard))
    outer = ("dp_replicate",) if "dp_replicate" in asked.mesh else ()
    return mesh[(*outer, "_".join(shard))]


def _share_again(model: Stage, _: object) -> None:
    """A shared table that is a DTensor again under the first of its names is one under the other too."""
    if model.tied and model.head is not None and model.embedding is not None and "weight" in model.head._parameters:
        del model.head.weight
        model.head.weight = model.embedding.weight


def replicate(model: Stage, asked: Question, mesh: DeviceMesh) -> nn.Module:
    """DDP, whose reducer fills buckets as gradients become ready."""
    if asked.layout.tp > 1:  # DDP refuses DTensors as they are
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(model)
        model.tie()  # it makes a shared table local under the first of its names alone
        model.register_forward_pre_hook(_share_again)
    cap = {} if asked.bucket_cap_mb is None else {"bucket_cap_mb": asked.bucket_cap_mb}
    replicated = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group(), **cap)
    if asked.bf16_exchange:
        # PyTorch's own hook, which DDP takes by its name for one of NCCL alone; gloo adds bf16 too.
        replicated.register_comm_hook(mesh.get_group(), lambda group, bucket: bf16_compress_hook(group, bucket))
    return replicated
