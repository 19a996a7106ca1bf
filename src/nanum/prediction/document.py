"""A prediction as one document of plain Python values: what `--json` prints and a table is laid out from."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nanum.cluster import Cluster, Link
from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import Layout
from nanum.model import Model
from nanum.prediction.reference import reference
from nanum.schedule import SPLITS_BACKWARD

if TYPE_CHECKING:
    from nanum.prediction import Prediction

UNMODELLED = (
    "other rank orders, kernels, micro-batches and schedules than a plan tries (flash attention, powers of two up to "
    "16, 1F1B, GPipe and interleaved)",
    "optimizers that keep states in fp8, and fp4",
    "experts that some tokens prefer to others, unless --expert-imbalance says by how much",
    "which algorithm NCCL picks: one ring of all ranks or, of an all-reduce, a tree of nodes is assumed, whichever is "
    "faster; switches add up inside a node alone (no NVLSTree, no SHARP)",
    "gradient clipping's scalar all-reduce, and data loading",
    "which kernels lose more to an exchange beside them, and which less (one share is taken of all); GPUs that are "
    "slower than those of their kind usually are, and jitter",
    "a host that launches kernels faster or slower than those that its seconds were read off",
    "fragmentation beyond the stated reserve",
)
OF_CONTEXT_PARALLEL = (
    "uneven ranks of context parallelism: causal attention is counted as their average (PyTorch's load balancer and "
    "Megatron even them out; without one, the last rank has up to twice that)",
)
OF_HALVES = (
    "the order of parameters in which PyTorch makes weights' gradients apart (what is held in passing differs), and "
    "kernels of a forward and a backward that overlap (DualPipeV): they take as long as one after the other",
)
OF_A_RING = ("a ring's exchanges beside its attention (each is waited for, but Megatron's)",)
OF_NODES = (
    "DeepEP's buffers in transit, and the multiprocessors that it takes; routers are taken to choose all experts alike",
)
OF_ALL_EXPERTS = (
    "--expert-imbalance changes nothing here: it is of ranks with different experts (--ep), and each rank has them all",
)
OF_ADAPTERS = (
    "adapters' dropout, and adapters in another dtype than their engine's trained weights (PEFT may keep them in fp32, "
    "and multiply in it); torchtitan's converter gives the head one too",
)
OF_QUANTIZED = (
    "quantized weights were not run: their bytes are QLoRA's by its paper, and what dequantizes them is one kernel for "
    "each product; paged optimizers",
)
OF_OFFLOAD = ("whether the host's memory is enough, and what else its processors do; pinning, and offload to NVMe",)
OF_STACKS = (
    "an encoder and a decoder of unlike lengths, and padding: both are given seq_len tokens a sequence, and throughput "
    "counts the decoder's",
    "flash kernels of scores with a bias of the distance: self-attention runs eager kernels, its softmax in fp32",
)
OF_STACKS_REGATHERED = ("the table of the vocabulary, which DeepSpeed's ZeRO-3 gathers once more for the decoder",)
OF_OTHER_STEPS = (
    "what steps of other models, engines or precisions say of this one: those that were observed here were such, and "
    "published runs were no better predicted for that",
)
OF_BLOCKED_LAUNCHES = ("that exchanges run beside no kernel where launches block: they are taken to",)
CATEGORIES = ("params", "grads", "optimizer_states", "activations", "buffers")


def document(p: Prediction, *, communication: bool = True) -> dict[str, Any]:
    """`predict`'s document; without its ledger where that is not asked for."""
    worst = p.worst
    return {
        **question_document(p.model, p.job, p.cluster, p.engine),
        "layout": layout_document(p.layout, p.num_microbatches),
        "fits": p.fits,
        "memory": {
            "capacity_bytes": int(p.cluster.chip.memory_bytes.value),
            "worst": {
                "stage": worst.stage, "moment": worst.moment.name, "allocated_bytes": worst.moment.bytes,
                "reserved_bytes": worst.reserved_bytes, "device_bytes": worst.device_bytes,
                "context_bytes": worst.context_bytes, "communicator_bytes": worst.communicator_bytes,
                "device_bytes_low": worst.device_bytes_at("low"), "device_bytes_high": worst.device_bytes_at("high"),
            },
            "stages": [
                {
                    "stage": m.stage, "moment": m.moment.name, "allocated_peak_bytes": m.moment.bytes,
                    "by_category": {c: m.moment.by_category.get(c, 0) for c in CATEGORIES},
                    "host_bytes": m.host_bytes,
                }
                for m in p.memory
            ],
        },
        "communication": [asdict(row) for row in p.communication] if communication else [],
        "time": {**asdict(p.time), "bubble_fraction": p.time.bubble_fraction, "launch_seconds": p.launch_seconds},
        "throughput": p.throughput,
        "assumptions": p.assumptions,
        "unmodelled": [*p.model.left_out, *of_stacks(p), *of_other_steps(p), *unmodelled(p.layout, p.job, p.cluster)],
    }  # fmt: skip


def of_stacks(p: Prediction) -> tuple[str, ...]:
    """What an answer about an encoder with a decoder takes for granted, and leaves out."""
    if not p.model.encoder_layers:
        return ()
    again = p.engine.data_parallel == "partitioned" and p.layout.structure.zero == 3
    return (*OF_STACKS, *(OF_STACKS_REGATHERED if again else ()))


def of_other_steps(p: Prediction) -> tuple[str, ...]:
    """What an answer about a machine takes for granted on which only steps of something else were observed."""
    own = p.cluster.in_a_step
    unlike = own is not None and own.observations and not own.seen(p.model.name, p.engine.name, p.job.precision)
    return OF_OTHER_STEPS if unlike else ()


def unmodelled(layout: Layout, job: Job, cluster: Cluster) -> list[str]:
    """What an answer about this layout leaves out."""
    of_context = OF_CONTEXT_PARALLEL if layout.cp > 1 else ()
    of_ring = OF_A_RING if layout.structure.cp_kind == "ring" else ()
    splits = layout.structure.pipelined and layout.structure.schedule in SPLITS_BACKWARD
    of_nodes = OF_NODES if layout.structure.dispatcher == "flex" else ()
    adapters = OF_ADAPTERS if job.trained.lora_rank else ()
    quantized = OF_QUANTIZED if job.trained.quantize != "none" else ()
    offload = OF_OFFLOAD if layout.structure.offload else ()
    alone = OF_ALL_EXPERTS if job.expert_imbalance > 1 and layout.ep == 1 else ()
    return [
        *alone,
        *UNMODELLED,
        *(OF_BLOCKED_LAUNCHES if cluster.launch_blocking else ()),
        *of_context,
        *of_ring,
        *of_nodes,
        *(OF_HALVES if splits else ()),
        *adapters,
        *quantized,
        *offload,
    ]


def question_document(model: Model, job: Job, cluster: Cluster, engine: Engine) -> dict[str, Any]:
    """What was asked, whatever the layout."""
    counted = reference(model, job.seq_len, job.trained)
    return {
        "engine": {"name": engine.name, "version": engine.version},
        "model": {
            "name": model.name,
            "mtp_layers": model.mtp_layers,
            "parameters": counted.parameters,
            "active_parameters": counted.active_parameters,
            "trained_parameters": counted.trained_parameters,
        },
        "job": asdict(job),
        "cluster": {
            "name": cluster.name,
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.gpus_per_node,
            "gpus": cluster.gpus,
            "chip": cluster.chip.name,
            "launch_blocking": cluster.launch_blocking,
            "doubts": list(cluster.doubts),
            "links": [_link(link) for link in (cluster.intra_node, cluster.inter_node)[: 1 + (cluster.nodes > 1)]],
        },
    }


def _link(link: Link) -> dict[str, Any]:
    rate = link.bytes_per_second
    return {
        "name": link.name,
        "bytes_per_second": rate.value,
        "tag": rate.tag,
        "efficiency": link.efficiency.value,
        "efficiency_group_size": link.group_size,
        "efficiency_tag": link.efficiency.tag,
    }


def summary(p: Prediction, candidate: Any) -> dict[str, Any]:
    """What a table of layouts shows of one, from a search's candidate, without predicting it in full."""
    return {
        "engine": {"name": p.engine.name, "version": p.engine.version},
        "layout": layout_document(p.layout, p.num_microbatches),
        "fits": True,
        "memory": {
            "capacity_bytes": int(p.cluster.chip.memory_bytes.value),
            "worst": {"device_bytes": candidate.device_bytes, "device_bytes_high": p.worst.device_bytes_at("high")},
        },
        "time": {
            "step_seconds": candidate.step_seconds,
            "bubble_fraction": candidate.bubble_seconds / candidate.step_seconds,
        },
        "throughput": p.rates(candidate.step_seconds),
    }


def layout_document(layout: Layout, num_microbatches: int) -> dict[str, Any]:
    """The layout in the words of the command line's flags."""
    s = layout.structure
    return {
        **{a: int(getattr(layout, a)) for a in ("dp_replicate", "dp_shard", "cp", "tp", "pp")},
        "ep": int(layout.ep),
        "etp": int(layout.etp if s.own_experts else layout.tp),
        "ep_intra": int(layout.ep_intra),
        "dispatcher": s.dispatcher,
        "dispatch_dtype": s.dispatch_dtype,
        "micro_batch_size": int(layout.micro_batch_size),
        "num_microbatches": int(num_microbatches),
        "zero": s.zero,
        "reshard": s.reshard,
        "hpz": s.hpz,
        "sp": s.tensor == "sequence",
        "tp_overlap": s.tp_overlap,
        "cp_kind": s.cp_kind,
        "schedule": s.schedule,
        "virtual_stages": s.virtual_stages,
        "first_stage_layers": s.first_stage_layers,
        "last_stage_layers": s.last_stage_layers,
        "embedding_weight": s.embedding_weight,
        "head_weight": s.head_weight,
        "recompute": s.recompute,
        "recompute_modules": ",".join(s.recompute_modules),
        "recompute_layers": s.recompute_layers,
        "recompute_every": s.recompute_every,
        "recompute_chunk": s.recompute_chunk,
        "fp8_gather": s.fp8_gather,
        "offload": "+".join(s.offload) or "none",
        "offload_fraction": s.offload_fraction,
        "loss": s.loss,
        "loss_chunks": s.loss_chunks if s.loss == "chunked" else 1,
        "attention": s.attention,
        "compile": s.compile,
        "rank_order": ",".join(layout.rank_order),
    }
