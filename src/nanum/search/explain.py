"""Why the first layout beats the fastest of each next kind: what of the step it spends less on."""

from __future__ import annotations

from collections.abc import Sequence

from nanum.engines.engine import Engine
from nanum.search.rank import Candidate, divided
from nanum.units import format_seconds

PARTS = (
    ("compute_seconds", "compute"),
    ("exposed_communication_seconds", "exposed communication"),
    ("bubble_seconds", "pipeline bubble"),
    ("optimizer_seconds", "optimizer"),
)
KINDS = 4


def words(candidate: Candidate) -> str:
    """The axes that divide, with their sizes."""
    layout = candidate.layout
    return " · ".join(f"{a} {getattr(layout, a)}" for a in divided(layout)) or "one GPU"


def explain(ranked: Sequence[tuple[Engine, Candidate]], several: bool = False) -> list[str]:
    """One line for the fastest of each other set of dividing axes; with its engine, where `several` were asked."""
    if not ranked:
        return []
    best = ranked[0][1]
    seen = {divided(best.layout)}
    lines = []
    for engine, other in ranked[1:]:
        if divided(other.layout) in seen:
            continue
        seen.add(divided(other.layout))
        lines.append(f"{engine.name}: " * several + _compare(best, other))
        if len(lines) == KINDS:
            break
    return lines


def _compare(best: Candidate, other: Candidate) -> str:
    slower = other.step_seconds / best.step_seconds - 1
    differences = [(getattr(other, field) - getattr(best, field), name) for field, name in PARTS]
    why = [
        f"{format_seconds(d)} more {name}"
        for d, name in sorted(differences, reverse=True)
        if d > 0.005 * best.step_seconds
    ]
    saves = [f"{format_seconds(-d)} less {name}" for d, name in sorted(differences) if d < -0.005 * best.step_seconds]
    layout = other.layout
    with_what = f"recompute {layout.structure.recompute}, micro-batch {layout.micro_batch_size}"
    reason = ", ".join(why) or "nearly the same in every part"
    but = f"; in return {', '.join(saves)}" if saves else ""
    return f"{words(other)} ({with_what}) is {slower:.1%} slower: {reason}{but}"
