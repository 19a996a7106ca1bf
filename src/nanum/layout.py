"""A layout: how many ways each mesh axis divides the work, in which rank order, and what is done about memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first: the default rank order (the last one varies fastest, so its ranks are neighbours)."""

EXPERT_AXES = ("edp", "ep", "etp")
"""The axes of experts' own mesh, in place of those that it regroups: data parallel among their copies, expert parallel,
and tensor parallel within an expert."""
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
    loss: Loss = "full"
    loss_chunks: int = 8  # of a chunked loss
    fp8_gather: bool = False  # weights of fp8 products are gathered as such, and not in the precision of activations
    offload: tuple[Offload, ...] = ()  # to the host's memory
    offload_fraction: float = 1.0  # of what an optimizer updates, that it updates on the host

    @property
    def partly(self) -> bool:
        """Are some layers of a stage recomputed whole, and the others not?"""
        return self.recompute == "full" and self.recompute_layers > 0


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

    @property
    def edp(self) -> Any:
        """Ranks that have copies of the same experts, of those that `REGROUPED` multiply to."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

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
                sizes |= {name: getattr(self, name) for name in EXPERT_AXES}
        return sizes

    @property
    def mesh(self) -> dict[str, Any]:
        """Sizes of all axes that anything is split over."""
        return {**self.sizes, **(self.expert_sizes if self.structure.own_experts else {})}

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
