"""Every layout of a cluster, as arrays: one group for each structure, with the impossible counted by their reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from nanum.cluster import Cluster
from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import Layout, Recompute, Schedule, Structure, TensorParallel
from nanum.model import Model
from nanum.rules import GENERAL, WORLD, Rule

SIZES = ("dp_replicate", "dp_shard", "tp", "pp", "micro_batch_size")
SCHEDULES: dict[bool, tuple[Schedule, ...]] = {True: ("1f1b", "gpipe"), False: ("1f1b",)}
LARGEST_MICRO_BATCH = 16
"""Sequences of one micro-batch that are tried, in powers of two."""


@dataclass(frozen=True)
class Group:
    """Possible layouts of one structure."""

    layout: Layout

    def __len__(self) -> int:
        return len(self.layout.tp)

    def at(self, chosen: np.ndarray) -> Group:
        return Group(
            Layout(**{f: getattr(self.layout, f)[chosen] for f in (*SIZES, "cp")}, structure=self.layout.structure)
        )


@dataclass
class Candidates:
    groups: list[Group] = field(default_factory=list)
    enumerated: int = 0
    impossible: Counter[str] = field(default_factory=Counter)


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def splits(gpus: int) -> np.ndarray:
    """[n, 4]: every way to write `gpus` as dp_replicate · dp_shard · tp · pp."""
    rows = [
        (r, gpus // (r * t * p), t, p)
        for t in divisors(gpus)
        for p in divisors(gpus // t)
        for r in divisors(gpus // (t * p))
    ]
    return np.array(rows, np.int64)


def structures(engine: Engine, like: Structure) -> list[Structure]:
    """Every structure of the ways that the engine has, with the kernels of `like`. With one stage a schedule is none,
    with tp = 1 there is nothing to split.
    """
    tensors: tuple[TensorParallel, ...] = ("none", "tensor", "sequence")
    recomputes: tuple[Recompute, ...] = ("none", "selective", "full")
    return [
        Structure(zero, reshard, tensor, recompute, schedule, pipelined, like.attention, like.compile)
        for zero, tensor, recompute, pipelined in product(
            engine.searched_zero_stages, tensors, recomputes, (False, True)
        )
        for reshard in ((True, False) if zero == 3 else (True,))
        for schedule in SCHEDULES[pipelined]
    ]


def candidates(model: Model, job: Job, cluster: Cluster, engine: Engine, like: Structure | None = None) -> Candidates:
    """All layouts over the whole cluster, in the default rank order, with the kernels of `like` (flash, not compiled).
    Each impossible one is counted once, under its first reason.
    """
    found = Candidates()
    micro = 2 ** np.arange(int(np.log2(LARGEST_MICRO_BATCH)) + 1)
    table = splits(cluster.gpus)
    table = np.concatenate([np.repeat(table, len(micro), 0), np.tile(micro, len(table))[:, None]], axis=1)
    tp, pp = table[:, 2], table[:, 3]
    rules = [rule for rule in (*GENERAL, *engine.rules) if rule is not WORLD]
    for structure in structures(engine, like or Structure()):
        here = ((tp > 1) == (structure.tensor != "none")) & ((pp > 1) == structure.pipelined)
        rows = table[here]
        if not len(rows):
            continue
        found.enumerated += len(rows)
        group = Group(
            Layout(**dict(zip(SIZES, rows.T, strict=True)), cp=np.ones(len(rows), np.int64), structure=structure)
        )
        possible = _possible(rules, model, job, cluster, group, found.impossible)
        if possible.any():
            found.groups.append(group.at(possible))
    return found


def _possible(
    rules: list[Rule], model: Model, job: Job, cluster: Cluster, group: Group, impossible: Counter[str]
) -> np.ndarray:
    possible = np.ones(len(group), bool)
    for rule in rules:
        broken = np.broadcast_to(rule.broken(model, job, cluster, group.layout), possible.shape) & possible
        if broken.any():
            impossible[rule.why] += int(broken.sum())
            possible &= ~broken
    return possible
