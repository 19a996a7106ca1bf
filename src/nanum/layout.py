"""A layout: how many ways each mesh axis divides the work, in which rank order, and what is done about memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first: the default rank order (the last one varies fastest, so its ranks are neighbours)."""

EXPERT_AXES = ("edp", "ep", "ep_inter", "ep_intra", "etp")
"""The axes of experts' own mesh, in place of those that it regroups: data parallel among their copies, expert parallel,
and tensor parallel within an expert. Where tokens go through nodes, expert parallel is two axes: among nodes, and among
the ranks of a node."""
REGROUPED = ("dp_shard", "cp", "tp")

Schedule = Literal[
    "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev"
]  # fmt: skip
ONE_CHUNK: tuple[Schedule, ...] = ("gpipe", "1f1b")
"""Schedules of which a rank holds one stage, whose passes come in runs of like ones (`schedule.runs`)."""
ONE_STAGE: tuple[Schedule, ...] = (*ONE_CHUNK, "zb-h2")
"""All of which a rank holds one stage; of the others it may hold several, its virtual stages."""
V_SHAPED: tuple[Schedule, ...] = ("zbv", "dualpipev")
"""Schedules of two stages a rank, of which the second go back up the ranks: the first rank holds both ends."""
TWO_WAY: tuple[Schedule, ...] = ("dualpipe",)
"""Schedules of two stages a rank, of which the second are the whole model again, up the ranks."""
SPLITS_BACKWARD: tuple[Schedule, ...] = ("zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev")
"""Schedules of which some backwards are done in two halves."""
Recompute = Literal["none", "selective", "full"]
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Parts of a layer that a selective recompute may name, by Megatron-LM's words."""
Loss = Literal["full", "chunked", "fused"]
"""All logits at once, or of some rows after others: by a loop around the head and the loss, or by Liger's kernel."""
Dispatcher = Literal["alltoall", "flex"]
"""By Megatron-LM's words: a token is sent to each of its experts, or once to each node that has some of them and on to
each of their ranks (DeepEP)."""
DispatchDtype = Literal["bf16", "fp8"]
Offload = Literal["optimizer", "params", "activations"]
"""What is kept in the host's memory: the optimizer's states, which the host then updates; stored parameters; what a
forward pass saves for its backward."""
TensorParallel = Literal["none", "tensor", "sequence"]
ContextParallel = Literal["none", "ring", "allgather", "ulysses"]
GradSync = Literal["each", "last"]


@dataclass(frozen=True)
class Structure:
    """What an emitter may branch on. Layouts of one structure are emitted and read together, as arrays."""

    zero: int = 3
    reshard: bool = True
    tensor: TensorParallel = "none"  # tp = 1; tp > 1 without, and with sequence parallel
    recompute: Recompute = "none"
    schedule: Schedule = "1f1b"
    pipelined: bool = False  # pp > 1
    attention: Literal["flash", "eager"] = "flash"
    compile: bool = False
    virtual_stages: int = 1  # chunks of one pipeline rank
    cp_kind: ContextParallel = "none"  # none where cp = 1
    grad_sync: GradSync = "each"  # gradients are reduced over data ranks in each micro-batch, or in the last alone
    own_experts: bool = False  # experts have a mesh of their own; otherwise tp divides each, as it does all else
    recompute_modules: tuple[str, ...] = ()  # of selective recompute, by the engine's names; none: its own choice
    recompute_layers: int = 0  # full recompute of the first so many layers of each stage; 0: of all
    recompute_every: int = 1  # full recompute of each so-manieth layer of a stage
    recompute_chunk: int = 1  # layers of a stage that full recompute takes at once: the first's input alone is kept
    loss: Loss = "full"
    loss_chunks: int = 8  # of a chunked loss
    hpz: bool = False  # ZeRO-3 over replicas too, with a second copy of the weights among dp_shard and cp (DeepSpeed)
    dispatcher: Dispatcher = "alltoall"  # of tokens to experts that are spread
    dispatch_dtype: DispatchDtype = "bf16"  # in which tokens are sent to experts; what comes back is in bf16
    first_stage_layers: int = 0  # of the first pipeline rank, and of the last; 0: what the others leave, or their share
    last_stage_layers: int = 0
    evens_ends: bool = False  # of a search's arrays: the ends have what leaves the others even (`engines.evened`)
    embedding_weight: int | None = None  # layers that it counts as where layers are cut into stages; None: the engine's
    head_weight: int | None = None
    tp_overlap: bool = False  # tensor parallelism's gathers and scatters are in pieces, each beside another's product
    fp8_gather: bool = False  # weights of fp8 products are gathered as such, and not in the precision of activations
    offload: tuple[Offload, ...] = ()  # to the host's memory
    offload_fraction: float = 1.0  # of what an optimizer updates, that it updates on the host

    @property
    def partly(self) -> bool:
        """Are some layers of a stage recomputed whole, and the others not?"""
        return self.recompute == "full" and (self.recompute_layers > 0 or self.recompute_every > 1)

    @property
    def in_chunks(self) -> bool:
        """Are several layers recomputed at once?"""
        return self.recompute == "full" and self.recompute_chunk > 1

    @property
    def sets_stages(self) -> bool:
        """Are the layers of an end of the pipeline said?"""
        return bool(self.first_stage_layers or self.last_stage_layers)

    @property
    def weighs_ends(self) -> bool:
        """Is it said what its ends weigh?"""
        return self.embedding_weight is not None or self.head_weight is not None


@dataclass(frozen=True)
class Layout:
    """One layout. A size is an int; `plan` holds the same fields as arrays over many layouts of one structure."""

    dp_replicate: Any = 1
    dp_shard: Any = 1
    cp: Any = 1
    tp: Any = 1
    pp: Any = 1
    micro_batch_size: Any = 1
    structure: Structure = field(default_factory=Structure)
    rank_order: tuple[str, ...] = AXES
    ep: Any = 1  # ranks that have different experts; they multiply no world
    etp: Any = 1  # ranks that have parts of an expert, where experts have a mesh of their own
    ep_intra: Any = 1  # of ep, the ranks that share a node, where tokens go through nodes

    @property
    def edp(self) -> Any:
        """Ranks that have copies of the same experts, of those that `REGROUPED` multiply to."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def ep_inter(self) -> Any:
        """Nodes that ranks with different experts are on, where tokens go through nodes."""
        return self.ep // self.ep_intra

    @property
    def sizes(self) -> dict[str, Any]:
        return {axis: getattr(self, axis) for axis in self.rank_order}

    @property
    def expert_sizes(self) -> dict[str, Any]:
        """As `sizes`, with experts' axes in place of those that they regroup, which are neighbours."""
        sizes: dict[str, Any] = {}
        for axis in self.rank_order:
            if axis not in REGROUPED:
                sizes[axis] = getattr(self, axis)
            elif "edp" not in sizes:
                within = ("ep_inter", "ep_intra") if self.structure.dispatcher == "flex" else ("ep",)
                sizes |= {name: getattr(self, name) for name in ("edp", *within, "etp")}
        return sizes

    @property
    def mesh(self) -> dict[str, Any]:
        """Sizes of all axes that anything is split over."""
        return {**self.sizes, **({**self.expert_sizes, "ep": self.ep} if self.structure.own_experts else {})}

    def named(self, axes: Iterable[str]) -> str:
        """Those of `axes` that have more than one rank, outermost first, joined: what a ledger calls a group."""
        wanted = set(axes)
        return "+".join(axis for axis, size in self.mesh.items() if axis in wanted and size > 1)

    def place(self, rank: int) -> dict[str, int]:
        """A rank's index along each axis, of one layout."""
        found = {}
        for sizes in (self.sizes, *([self.expert_sizes] if self.structure.own_experts else [])):
            stride = self.world
            for axis, size in sizes.items():
                stride //= size
                found[axis] = rank // stride % size
        return found

    @property
    def world(self) -> Any:
        return prod(self.sizes.values())

    @classmethod
    def from_document(cls, table: Mapping[str, Any]) -> Layout:
        """A layout out of the plain values that `dataclasses.asdict` made of it."""
        modules = tuple(table["structure"].get("recompute_modules", ()))
        offload = tuple(table["structure"].get("offload", ()))
        structure = Structure(**{**table["structure"], "recompute_modules": modules, "offload": offload})
        order = tuple(table["rank_order"])
        return cls(**{**table, "structure": structure, "rank_order": order})

    @property
    def data_ranks(self) -> Any:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard
