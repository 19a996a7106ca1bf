"""Every layout of a cluster, as arrays: one group for each structure, with the impossible counted by their reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import product
from math import gcd
from typing import Any

import numpy as np

from nanum.cluster import Cluster
from nanum.engines.engine import Engine
from nanum.engines.evened import to_be_evened
from nanum.job import Job
from nanum.layout import Layout, Recompute, Schedule, Structure, TensorParallel
from nanum.model import Experts, Model
from nanum.rules import GENERAL, WORLD, Rule
from nanum.rules.dispatch import sharing_a_node
from nanum.search.names import plainer

SIZES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "micro_batch_size", "ep")
SCHEDULES: dict[bool, tuple[Schedule, ...]] = {True: ("1f1b", "gpipe"), False: ("1f1b",)}
LARGEST_MICRO_BATCH = 16
"""Sequences of one micro-batch that are tried, in powers of two."""
SHORTEST_PART = 4096
"""Tokens of a sequence that a rank of context parallelism has at least: less leaves its kernels little to do. Published
recipes have as many (two ranks for 8192 tokens: NVIDIA's of Llama 3.1)."""


@dataclass(frozen=True)
class Group:
    """Possible layouts of one structure."""

    layout: Layout

    def __len__(self) -> int:
        return len(self.layout.tp)

    def at(self, chosen: np.ndarray) -> Group:
        sizes = {f: getattr(self.layout, f)[chosen] for f in (*SIZES, "etp", "ep_intra")}
        return Group(Layout(**sizes, structure=self.layout.structure))


@dataclass
class Candidates:
    groups: list[Group] = field(default_factory=list)
    impossible: Counter[str] = field(default_factory=Counter)


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def splits(gpus: int, seq_len: int) -> np.ndarray:
    """[n, 5]: every way to write `gpus` as dp_replicate · dp_shard · cp · tp · pp, with so long parts of sequences."""
    rows = [
        (r, gpus // (r * c * t * p), c, t, p)
        for c in divisors(gpus)
        if c == 1 or seq_len >= c * SHORTEST_PART
        for t in divisors(gpus // c)
        for p in divisors(gpus // (c * t))
        for r in divisors(gpus // (c * t * p))
    ]
    return np.array(rows, np.int64)


UNDIVIDED: dict[str, Any] = {
    "first_stage_layers": 0, "last_stage_layers": 0, "embedding_weight": None, "head_weight": None, "evens_ends": False,
}  # fmt: skip
"""What is not said of a pipeline that is none."""


def structures(
    engine: Engine, like: Structure, *, contexts: bool = False, experts: bool = False, evened: bool = False
) -> list[Structure]:
    """Every structure of the ways that the engine has, with the kernels of `like`. With one stage a schedule is none,
    with tp = 1 there is nothing to split; `contexts` are parallel too, `experts` that are spread have a mesh of their
    own, and `evened` are pipelines whose ends make up for layers that do not divide.
    """
    kinds = engine.searched_cp_kinds if like.cp_kind == "none" else (like.cp_kind,)
    tensors: tuple[TensorParallel, ...] = ("none", "tensor", "sequence")
    recomputes: tuple[Recompute, ...] = ("none", "selective", "full")
    return [
        replace(
            like,
            zero=zero,
            reshard=reshard,
            tensor=tensor,
            tp_overlap=like.tp_overlap and tensor == "sequence" and engine.tp_overlap != "none",
            cp_kind=cp_kind,
            recompute=recompute,
            recompute_modules=(),
            recompute_layers=0,
            recompute_every=1,
            recompute_chunk=1,
            schedule=schedule,
            virtual_stages=1,
            pipelined=pipelined,
            own_experts=own,
            hpz=False,
            dispatcher=like.dispatcher if own else "alltoall",
            dispatch_dtype=like.dispatch_dtype if own else "bf16",
            **({"evens_ends": evens} if pipelined else UNDIVIDED),
        )
        for own, zero, tensor, recompute, pipelined in product(
            (False, True) if experts else (False,), engine.searched_zero_stages, tensors, recomputes, (False, True)
        )
        for cp_kind in ("none", *(kinds if contexts else ()))
        for reshard in ((True, False) if zero == 3 else (True,))
        for schedule in SCHEDULES[pipelined]
        for evens in ((False, True) if evened and pipelined else (False,))
    ]


def spread(model: Model, gpus: int) -> np.ndarray:
    """The sizes of expert parallelism that are tried: what divides the experts of every kind of layer, and the GPUs."""
    common = gcd(*(layer.mlp.num_experts for layer in model.kinds if isinstance(layer.mlp, Experts)))
    return np.array([n for n in divisors(common) if gpus % n == 0] if common else [1], np.int64)


def candidates(model: Model, job: Job, cluster: Cluster, engine: Engine, like: Structure | None = None) -> Candidates:
    """All layouts over the whole cluster, in the default rank order, with the kernels of `like` (flash, not compiled).
    Each impossible one is counted once, under its first reason; one that is possible by a plainer name is left out.
    """
    found = Candidates()
    micro = 2 ** np.arange(int(np.log2(LARGEST_MICRO_BATCH)) + 1)
    table = splits(cluster.gpus, job.seq_len)
    for tried in (micro, spread(model, cluster.gpus)):
        table = np.concatenate([np.repeat(table, len(tried), 0), np.tile(tried, len(table))[:, None]], axis=1)
    of = dict(zip(SIZES, table.T, strict=True))
    tp, pp, cp, ep = of["tp"], of["pp"], of["cp"], of["ep"]
    rules = [rule for rule in (*GENERAL, *engine.refuses) if rule is not WORLD]
    like = like or Structure()
    evened = _evened(model, engine, like, pp)
    several: Any = {"contexts": cp.max() > 1, "experts": ep.max() > 1, "evened": evened.any()}
    for structure in structures(engine, like, **several):
        here = (
            ((cp > 1) == (structure.cp_kind != "none"))
            & ((tp > 1) == (structure.tensor != "none"))
            & ((pp > 1) == structure.pipelined)
        )
        here &= evened == structure.evens_ends
        here &= (ep > 1) == structure.own_experts
        rows = table[here]
        if not len(rows):
            continue
        one = np.ones(len(rows), np.int64)
        sizes = dict(zip(SIZES, rows.T, strict=True))
        within = engine.default_etp(sizes["tp"]) if structure.own_experts else sizes["tp"]
        layout = Layout(**sizes, etp=one * within, ep_intra=one, structure=structure)
        if structure.dispatcher == "flex":
            layout = replace(layout, ep_intra=sharing_a_node(layout, cluster.gpus_per_node))
        group = Group(layout)
        possible = _possible(rules, model, job, cluster, group, found.impossible)
        if possible.any():
            found.groups.append(group.at(possible))
    return _once(found, engine, job)


def _evened(model: Model, engine: Engine, like: Structure, pp: np.ndarray) -> np.ndarray:
    """Which pipelines have ends that make up for layers that do not divide: none, where it is said how they are cut."""
    if not engine.evens_ends or like.sets_stages or like.weighs_ends or model.encoder_layers:
        return np.zeros(pp.shape, bool)
    evened: np.ndarray = to_be_evened(model.num_hidden_layers, pp)
    return evened


def _once(found: Candidates, engine: Engine, job: Job) -> Candidates:
    """Without what is there by a plainer name too."""
    names = {group.layout.structure: _names(group.layout) for group in found.groups}
    groups = []
    for group in found.groups:
        again = np.zeros(len(group), bool)
        for renamed, plain in plainer(group.layout, engine, job):
            if renamed.any() and plain.structure in names:
                again |= renamed & np.isin(_names(plain), names[plain.structure])
        if not again.all():
            groups.append(group.at(~again) if again.any() else group)
    return replace(found, groups=groups)


def _names(layout: Layout) -> np.ndarray:
    """A layout's sizes as one word, to be looked up."""
    rows = np.stack([getattr(layout, size) for size in SIZES], axis=1)
    return np.ascontiguousarray(rows, np.int64).view(f"S{8 * len(SIZES)}").ravel()


def _possible(
    rules: list[Rule], model: Model, job: Job, cluster: Cluster, group: Group, impossible: Counter[str]
) -> np.ndarray:
    possible = np.ones(len(group), bool)
    for rule in rules:
        found = rule.broken(model, job, cluster, group.layout)
        if found is False:  # as most rules of a structure say
            continue
        broken = np.broadcast_to(found, possible.shape) & possible
        if broken.any():
            impossible[rule.why] += int(broken.sum())
            possible &= ~broken
    return possible
