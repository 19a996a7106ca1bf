"""Pipelines of several stages a rank, where a smaller bubble could make a layout one of the fastest.

Of so many stages, layouts are not read at once: a rank's memory follows the order of its work. So those that one stage
a rank made promising are tried one by one, the most promising first, by what they would take if more stages cut the
bubble and cost nothing: their bound times (m + (p - 1)/v) / (m + p - 1) (Narayanan et al. 2021, section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nanum.layout import Layout, Structure
from nanum.prediction import Prediction, consistent, reasons
from nanum.search.rank import Candidate, Progress, Question, Ranked, one_of
from nanum.search.shortlist import NEAR, alike

MOST_TRIED = 24
"""Layouts of several stages a rank whose memory and time are worked out: each takes a tenth of a second or two."""


def interleaved(
    question: Question,
    ranked: Sequence[Ranked],
    found: Sequence[Candidate],
    needed_seconds: Callable[[list[Candidate]], float],
    progress: Progress | None = None,
) -> tuple[list[Candidate], int]:
    """Of layouts that fit with one stage a rank those with several that fit too, as far as they may be among the
    fastest, and how many were tried. `found` are the fastest of one stage a rank. Of near ties one is tried.
    """
    better: list[Candidate] = []
    tried: set[tuple[Any, ...]] = set()
    for hoped, r, i in _hopes(question, ranked):
        if len(tried) == MOST_TRIED or hoped > needed_seconds([*found, *better]):
            break
        base = one_of(r.group.layout, i, question.model)
        if (key := alike(question.engine, base)) in tried:
            continue
        tried.add(key)
        if candidate := _first_that_fits(question, r, i):
            better.append(candidate)
        if progress:
            progress(len(tried), MOST_TRIED)
    if progress and tried:
        progress(MOST_TRIED, MOST_TRIED)
    return better, len(tried)


def _hopes(question: Question, ranked: Sequence[Ranked]) -> list[tuple[float, Ranked, int]]:
    """What each pipeline would take at best with several stages a rank, the least first."""
    found = []
    for r in ranked:
        structure = r.group.layout.structure
        if "interleaved" not in question.engine.schedules or not structure.pipelined or structure.schedule != "1f1b":
            continue
        pp, m = r.group.layout.pp, _micro_batches(question, r)
        most = {p: max(_chunks(question, structure, p), default=0) for p in map(int, np.unique(pp))}
        v = np.array([most[int(p)] for p in pp])
        hoped = r.bound_seconds * (m + (pp - 1) / np.maximum(v, 1)) / (m + pp - 1)
        found += [(float(hoped[i]), r, int(i)) for i in np.flatnonzero(v)]
    return sorted(found, key=lambda one: one[0])


def _micro_batches(question: Question, r: Ranked) -> Any:
    return question.job.num_microbatches(r.group.layout.micro_batch_size, r.group.layout.data_ranks)


def _ends(structure: Structure) -> dict[str, Any]:
    """What is said of the ends, where layers do not divide: with their weights they may."""
    return {"evens_ends": False, "embedding_weight": 1, "head_weight": 1} if structure.evens_ends else {}


def _chunks(question: Question, structure: Structure, pp: int) -> list[int]:
    """How many stages a rank may have: as many as divide the layers evenly, or two, which an engine may still cut."""
    ends = _ends(structure)
    weighed = question.engine.most_stages(question.model, replace(structure, **ends))
    even = [v for v in range(2, weighed // pp + 1) if weighed % (pp * v) == 0]
    return even or ([2] if 2 * pp <= weighed and not ends else [])


def _first_that_fits(question: Question, r: Ranked, i: int) -> Candidate | None:
    """With the fewest stages that leave a bubble of no more than a near tie, or with the most, which hold least."""
    layout, structure = r.group.layout, r.group.layout.structure
    pp, m = int(layout.pp[i]), int(_micro_batches(question, r)[i])
    chunks = _chunks(question, structure, pp)
    few = next((v for v in chunks if (pp - 1) <= NEAR * v * m), chunks[-1])
    for v in dict.fromkeys((few, chunks[-1])):
        several = replace(structure, schedule="interleaved", virtual_stages=v, **_ends(structure))
        candidate = _candidate(question, one_of(replace(layout, structure=several), i, question.model))
        if candidate:
            return candidate
    return None


def _candidate(question: Question, layout: Layout) -> Candidate | None:
    """None where it is impossible, or does not fit."""
    q, layout = question, consistent(layout)
    if reasons(q.model, q.job, q.cluster, layout, q.engine):
        return None
    p = Prediction(q.model, q.job, q.cluster, layout, q.engine)
    if not p.fits:
        return None
    c = p.parts
    parts = (c.step, c.compute, c.exposed_communication, c.bubble, c.optimizer)
    return Candidate(layout, int(p.worst.device_bytes), *(float(np.ravel(part)[0]) for part in parts))
