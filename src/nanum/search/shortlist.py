"""The fastest layouts, with near ties folded: what differs from a faster one in nothing of consequence is with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from nanum.engines.engine import Engine
from nanum.layout import Layout
from nanum.search.rank import Candidate

NEAR = 0.01
"""Of a step: times that are this close are equal, by what predictions miss (README, the errors of left-out sources)."""


@dataclass(frozen=True)
class Listed:
    """A layout with its place among all, from 1, and the near ties that are folded into it, with theirs."""

    place: int
    engine: Engine
    candidate: Candidate
    near_ties: tuple[tuple[int, Candidate], ...] = ()


def alike(engine: Engine, layout: Layout) -> tuple[Any, ...]:
    """What near ties have in common: the engine, what each axis but the data-parallel ones divides by, the micro-batch
    and what is recomputed. They may differ in how data-parallel ranks are split into replicas and shards, in what ZeRO
    shards and keeps gathered, in sequence parallelism, and in the order of a pipeline's passes.
    """
    s = layout.structure
    axes = layout.data_ranks, layout.cp, layout.tp, layout.pp, layout.ep, layout.etp if s.own_experts else layout.tp
    return engine.name, *map(int, axes), int(layout.micro_batch_size), s.recompute


def shortlist(fastest: Sequence[tuple[Engine, Candidate]], top: int, *, fold: bool = True) -> tuple[Listed, ...]:
    """The first `top` of candidates that are given fastest first; with `fold`, near ties of one before are with it and
    have no place of their own: those slower by at most `NEAR`, with no less memory, and alike.

    The candidates must be complete up to what `needed_seconds` says of them.
    """
    listed: list[Listed] = []
    ties: list[list[tuple[int, Candidate]]] = []
    first_of: dict[tuple[Any, ...], list[int]] = {}
    for place, (engine, c) in enumerate(fastest, start=1):
        if len(listed) == top and (not fold or c.step_seconds > listed[-1].candidate.step_seconds * (1 + NEAR)):
            break
        same = first_of.setdefault(alike(engine, c.layout), [])
        into = next((i for i in same if _near(listed[i].candidate, c)), None) if fold else None
        if into is not None:
            ties[into].append((place, c))
        elif len(listed) < top:
            same.append(len(listed))
            listed.append(Listed(place, engine, c))
            ties.append([])
    return tuple(Listed(one.place, one.engine, one.candidate, tuple(t)) for one, t in zip(listed, ties, strict=True))


def _near(better: Candidate, c: Candidate) -> bool:
    return c.step_seconds <= better.step_seconds * (1 + NEAR) and c.device_bytes >= better.device_bytes


def needed_seconds(engine: Engine, fastest: Sequence[Candidate], top: int, *, fold: bool = True) -> float:
    """Up to which step all candidates must be known for the shortlist of these to be that of all."""
    listed = shortlist([(engine, c) for c in fastest], top, fold=fold)
    if len(listed) < top:
        return inf
    return listed[-1].candidate.step_seconds * (1 + NEAR if fold else 1)
