"""How far a layout is from another, and the nearest that fits, for which few of a large cluster's layouts are read."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nanum.division.parts import BODY_FIELDS
from nanum.layout import Layout
from nanum.search.candidates import Group
from nanum.search.rank import Progress, Question, Ranked, one_of, read

AT_ONCE = 4096
"""Layouts that are read before any that is farther; where none of them fits, eight times as many, and so on."""


def distance(layout: Layout, there: Layout) -> np.ndarray:
    """From a layout to each of many, of one structure: the doublings between their sizes, and the switches in which
    they differ.
    """
    switches = sum(
        getattr(there.structure, f) != getattr(layout.structure, f)
        for f in ("zero", "recompute", "schedule", "reshard")
    )
    switches += (there.structure.tensor == "sequence") != (layout.structure.tensor == "sequence")
    far = np.full(len(there.tp), float(switches))
    for f in (*BODY_FIELDS, "pp"):
        far += np.abs(np.log2(getattr(there, f) / getattr(layout, f)))
    return far


def nearest_that_fits(
    question: Question, layout: Layout, found: list[Group], progress: Progress | None = None
) -> Layout | None:
    """Of these layouts the one that fits and differs least: in few of its sizes and switches, each size by few
    doublings; of equally near ones the fastest by its bound. Nearer ones are read first, and only as many as it takes.
    """
    far = [distance(layout, group.layout) for group in found]
    every = np.sort(np.concatenate([np.zeros(0), *far]))
    before, many = -np.inf, AT_ONCE
    while before < np.inf:
        within = every[many - 1] if many < len(every) else np.inf
        now = [(d > before) & (d <= within) for d in far]
        some = [group.at(chosen) for group, chosen in zip(found, now, strict=True) if chosen.any()]
        ranked, _ = read(question, some, progress)
        if best := _closest(question, layout, ranked):
            return best
        before, many = within, 8 * many
    return None


def _closest(question: Question, layout: Layout, ranked: Iterable[Ranked]) -> Layout | None:
    best: tuple[float, float, Layout] | None = None
    for r in ranked:
        if not len(r.group):
            continue
        far = distance(layout, r.group.layout)
        i = min(range(len(far)), key=lambda j: (far[j], r.bound_seconds[j]))
        if best is None or (far[i], r.bound_seconds[i]) < best[:2]:
            best = float(far[i]), float(r.bound_seconds[i]), one_of(r.group.layout, i, question.model)
    return best[2] if best else None
