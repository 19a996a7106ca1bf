"""Read memory and time of many layouts at once, and find the fastest that fit.

All are ranked by a bound below their exact time; exact times are then worked out for the most promising, until no bound
that is left could beat the slowest of those that are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from nanum.account.cost import Cost
from nanum.account.device import context_bytes, reserved_bytes
from nanum.account.memory import Use, peak
from nanum.account.step_time import bound, cut, stage_bound, stage_time
from nanum.account.timeline import TimeMap
from nanum.account.totals import Totals
from nanum.account.traffic import Groups, groups_of
from nanum.build import assemble, build
from nanum.cluster import Cluster
from nanum.division.parts import BODY_FIELDS, Bodies, Parts, body_space, emit_parts
from nanum.division.stages import Staged, place_stages
from nanum.engines.engine import Engine
from nanum.engines.evened import saying_ends
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Model
from nanum.once import Once
from nanum.search.candidates import Group

Progress = Callable[[int, int], None]
BATCH = 16
"""Layouts whose exact time is worked out together."""


@dataclass(frozen=True)
class Question:
    model: Model
    job: Job
    cluster: Cluster
    engine: Engine


@dataclass(frozen=True, eq=False)
class Ranked:
    """Layouts of one structure that fit, with the bytes of their fullest device and the bound of their step."""

    group: Group
    device_bytes: np.ndarray
    bound_seconds: np.ndarray
    shared: Shared
    bodies: Bodies


@dataclass(frozen=True, eq=False)
class Shared:
    """What structures with the same bodies share: their cost, and what has been folded of them."""

    cost: Cost
    maps: Once[TimeMap]


@dataclass(frozen=True)
class Candidate:
    """One layout with its exact time, cut as a prediction cuts it."""

    layout: Layout
    device_bytes: int
    step_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    bubble_seconds: float
    optimizer_seconds: float


def _stages(layout: Layout) -> tuple[Layout, np.ndarray]:
    """One entry for each stage of each layout, in order."""
    pp = layout.pp
    entry = np.repeat(np.arange(len(pp)), pp)
    stage = np.arange(len(entry)) - np.repeat(np.cumsum(pp) - pp, pp)
    fields: dict[str, Any] = {f: getattr(layout, f)[entry] for f in (*BODY_FIELDS, "pp")}
    return Layout(**fields, structure=layout.structure, rank_order=layout.rank_order), stage


@dataclass(frozen=True)
class TooLarge:
    """How many layouts do not fit, and the one of them that comes nearest."""

    count: int = 0
    device_bytes: int = 0
    layout: Layout | None = None

    def __add__(self, other: TooLarge) -> TooLarge:
        count = self.count + other.count
        if self.layout is None or (other.layout is not None and other.device_bytes < self.device_bytes):
            return replace(other, count=count)
        return replace(self, count=count)


def read(question: Question, found: list[Group], progress: Progress | None = None) -> tuple[list[Ranked], TooLarge]:
    """Memory and bound of every group: those that fit, and those that are too large. What is there by a plainer name
    is neither.
    """
    ranked: list[Ranked] = []
    too_large, done = TooLarge(), 0
    total = sum(map(len, found))
    for _, sharing in groupby(
        sorted(found, key=lambda g: _emission(g.layout.structure)), lambda g: _emission(g.layout.structure)
    ):
        several = list(sharing)
        for one, large in _read_sharing(question, several):
            ranked.append(one)
            too_large += large
        done += sum(map(len, several))
        if progress:
            progress(done, total)
    return ranked, too_large


def _emission(s: Structure) -> tuple[Any, ...]:
    """Structures of equal keys have the same bodies, but for what a layer keeps."""
    defers = s.pipelined or s.grad_sync == "last"
    return (
        s.zero,
        s.tensor,
        s.tp_overlap,
        s.cp_kind,
        s.attention,
        s.compile,
        s.own_experts,
        defers and s.tensor == "sequence",
    )


def _same_actions(s: Structure) -> tuple[Any, ...]:
    """Structures of equal keys have the same actions, in whatever order."""
    return s.recompute, s.reshard, s.pipelined, s.grad_sync


def _read_sharing(question: Question, found: list[Group]) -> Iterable[tuple[Ranked, TooLarge]]:
    expanded = [_stages(g.layout) for g in found]
    fields: dict[str, Any] = {f: np.concatenate([getattr(e, f) for e, _ in expanded]) for f in (*BODY_FIELDS, "pp")}
    joined = Layout(**fields, structure=found[0].layout.structure)
    at, distinct_layout = body_space(joined)
    assert at is not None
    parts = emit_parts(question.model, question.job, distinct_layout, question.engine)
    modes: dict[str, Parts] = {parts.structure.recompute: parts}
    shared = Shared(Cost(question.cluster, distinct_layout), Once())
    memory_known, groups_known, time_known = Once[Use](), Once[Groups](), Once[Totals]()
    placed: dict[tuple[bytes, bytes, bool], tuple[Staged, Cost]] = {}
    steps: dict[tuple[Any, ...], Any] = {}
    start = 0
    for group, (entries, stage) in zip(found, expanded, strict=True):
        stop = start + len(stage)
        mode = group.layout.structure.recompute
        if mode not in modes:
            modes[mode] = parts.recomputing(mode)
        bodies = Bodies(modes[mode], distinct_layout, at[start:stop])
        start = stop
        structure = group.layout.structure
        here = bodies.at.tobytes(), entries.pp.tobytes(), structure.evens_ends  # type: ignore[union-attr]
        if here not in placed:
            staged = place_stages(question.model, question.job, entries, question.engine, stage, bodies)
            placed[here] = staged, Cost(question.cluster, staged.layout)
        staged, cost = placed[here]
        # What a stage keeps of what it sends is told by the schedule, where it keeps any.
        sends = structure.schedule if bodies.parts.conventions.stage_keeps_buffers else ""
        key = (*_same_actions(structure), sends, *here)
        if key not in steps:
            step = assemble(staged, bodies.parts, structure, question.engine)
            steps[key] = step, groups_of(step.program, groups_known)
        step, groups = steps[key]
        step = step.scheduled(structure)
        used = peak(step.program, memory_known, apart=False).peak + step.apart_bytes
        pp = group.layout.pp
        worst = np.maximum.reduceat(np.broadcast_to(used, stage.shape), np.cumsum(pp) - pp)
        at_device = worst  # of a device that is its own host
        if question.cluster.measured.streams:
            at_device = reserved_bytes(worst) + context_bytes(groups, group.layout.mesh)
        fits = at_device <= question.cluster.chip.memory_bytes.value
        m = question.job.num_microbatches(group.layout.micro_batch_size, group.layout.data_ranks)
        seconds = (
            bound(structure.schedule, m, pp, stage_bound(step, cost, shared.cost, time_known))
            if fits.any()
            else np.zeros(len(pp))
        )
        of_layout = bodies.at[np.cumsum(pp) - pp]  # type: ignore[index]
        yield (
            Ranked(group.at(fits), at_device[fits], seconds[fits], shared, replace(bodies, at=of_layout[fits])),
            _too_large(question, group, at_device, ~fits),
        )


def _too_large(question: Question, group: Group, device_bytes: np.ndarray, large: np.ndarray) -> TooLarge:
    if not large.any():
        return TooLarge()
    least = int(np.where(large, device_bytes, np.iinfo(np.int64).max).argmin())
    return TooLarge(int(large.sum()), int(device_bytes[least]), one_of(group.layout, least, question.model))


def one_of(layout: Layout, i: int, model: Model) -> Layout:
    """One of many layouts, as it is said alone."""
    sizes: dict[str, Any] = {f: int(getattr(layout, f)[i]) for f in (*BODY_FIELDS, "pp")}
    one = Layout(**sizes, structure=layout.structure, rank_order=layout.rank_order)
    return saying_ends(one, model.num_hidden_layers)


def fastest(
    question: Question, ranked: list[Ranked], needed_seconds: Callable[[list[Candidate]], float]
) -> list[Candidate]:
    """The fastest by exact time, and the fastest of each other set of axes that divide, for comparison.

    `needed_seconds` says, of the candidates so far, up to which step all must be known.
    """
    entries = [(float(b), i, j) for i, r in enumerate(ranked) for j, b in enumerate(r.bound_seconds)]
    entries.sort()
    done: dict[tuple[int, int], Candidate] = {}
    while len(done) < len(entries):
        # What is needed may grow too: two that were listed may be near ties of one that is found after them.
        needed = needed_seconds(_in_order(done.values()))
        batch = [e for e in entries[len(done) : len(done) + BATCH] if e[0] <= needed]
        if not batch:
            break
        done |= _exact(question, ranked, batch)
    first_of_kind: dict[tuple[str, ...], tuple[float, int, int]] = {}
    for entry in entries:
        layout = ranked[entry[1]].group.at(np.array([entry[2]])).layout if len(first_of_kind) < 6 else None
        if layout is None:
            break
        first_of_kind.setdefault(divided(layout), entry)
        if entry[0] > 3 * entries[0][0]:
            break
    rest = [e for e in first_of_kind.values() if (e[1], e[2]) not in done]
    done |= _exact(question, ranked, rest)
    return _in_order(done.values())


def _in_order(found: Iterable[Candidate]) -> list[Candidate]:
    return sorted(found, key=lambda c: (c.step_seconds, c.device_bytes))


def divided(layout: Layout) -> tuple[str, ...]:
    """The axes that divide something."""
    return tuple(a for a in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep") if np.max(getattr(layout, a)) > 1)


def _exact(
    question: Question, ranked: list[Ranked], entries: list[tuple[float, int, int]]
) -> dict[tuple[int, int], Candidate]:
    found: dict[tuple[int, int], Candidate] = {}
    for i, chosen in groupby(sorted(entries, key=lambda e: e[1]), lambda e: e[1]):
        rows = np.array([e[2] for e in chosen])
        for j, candidate in zip(rows, exact_times(question, ranked[i], rows), strict=True):
            found[i, int(j)] = candidate
    return found


def exact_times(question: Question, ranked: Ranked, rows: np.ndarray) -> list[Candidate]:
    """The exact step of some layouts of a group."""
    group, device_bytes, shared = ranked.group.at(rows), ranked.device_bytes[rows], ranked.shared
    layout = group.layout
    entries, stage = _stages(layout)
    bodies = replace(ranked.bodies, at=np.repeat(ranked.bodies.at[rows], layout.pp))  # type: ignore[index]
    step = build(question.model, question.job, entries, question.engine, stage, bodies)
    time = stage_time(step, Cost(question.cluster, step.layout), shared.maps, shared.cost)
    begins = np.cumsum(layout.pp) - layout.pp
    m = question.job.num_microbatches(layout.micro_batch_size, layout.data_ranks)
    found: list[Candidate | None] = [None] * len(group)
    for p, count in {(int(p), int(k)) for p, k in zip(layout.pp, m, strict=True)}:
        alike = np.flatnonzero((layout.pp == p) & (m == count))
        parts = cut(layout.structure.schedule, count, [time.at(begins[alike] + s) for s in range(p)], len(alike))
        for i, row in enumerate(alike):
            one = one_of(layout, int(row), question.model)
            seconds = (parts.step, parts.compute, parts.exposed_communication, parts.bubble, parts.optimizer)
            found[row] = Candidate(one, int(device_bytes[row]), *(float(q[i]) for q in seconds))
    return [c for c in found if c is not None]


def table(engine: str, model: Model, ranked: Ranked) -> Iterator[dict[str, Any]]:
    """The rows of a group, in the words of the command line's flags."""
    layout, s = ranked.group.layout, ranked.group.layout.structure
    for i in range(len(ranked.group)):
        said = one_of(layout, i, model).structure if s.evens_ends else s
        yield {
            "engine": engine,
            **{f: int(getattr(layout, f)[i]) for f in (*BODY_FIELDS, "pp")},
            "zero": s.zero,
            "reshard": s.reshard,
            "sp": s.tensor == "sequence",
            "schedule": s.schedule,
            "first_stage_layers": said.first_stage_layers,
            "last_stage_layers": said.last_stage_layers,
            "recompute": s.recompute,
            "device_bytes": int(ranked.device_bytes[i]),
            "step_seconds_bound": float(ranked.bound_seconds[i]),
        }
