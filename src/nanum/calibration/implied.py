"""What a calibration implies for all other layouts: the best of the same question before it and after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nanum.calibration import Calibration
from nanum.errors import Refused
from nanum.layout import Layout
from nanum.prediction import Prediction, consistent
from nanum.search import plan

BEST = 5


@dataclass(frozen=True)
class Place:
    """A layout that is among the best before or after; places count from 1, None where it is not among them."""

    prediction: Prediction  # after
    before_seconds: float
    after_seconds: float
    before: int | None
    after: int | None


@dataclass(frozen=True)
class Implied:
    """The best layouts, fastest after first. `refused` says why none are sought; there are then none."""

    places: tuple[Place, ...]
    refused: tuple[str, ...] = ()

    @property
    def reordered(self) -> bool:
        """Do the best stand in another order than before?"""
        return any(place.before != place.after for place in self.places)


def implied(c: Calibration, progress: Callable[[int, int], None] | None = None) -> Implied:
    """Plan the question on both machines."""
    p = c.before

    def half(which: int) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, total: progress(which * total + done, 2 * total)

    try:
        plans = [
            plan(p.model, p.job, cluster, p.engine.name, BEST, half(i), fold=False)
            for i, cluster in enumerate((p.cluster, c.cluster))
        ]
    except Refused as refused:
        return Implied((), refused.reasons)
    firsts = [[consistent(found.layout) for _, found in each.candidates[:BEST]] for each in plans]
    timed = [{consistent(found.layout): found.step_seconds for _, found in each.candidates} for each in plans]
    places = []
    for layout in dict.fromkeys([*firsts[1], *firsts[0]]):
        after = Prediction(p.model, p.job, c.cluster, layout, p.engine)
        before = timed[0].get(layout) or float(Prediction(p.model, p.job, p.cluster, layout, p.engine).parts.step[0])
        seconds = timed[1].get(layout) or float(after.parts.step[0])
        places.append(Place(after, before, seconds, _place(layout, firsts[0]), _place(layout, firsts[1])))
    return Implied(tuple(sorted(places, key=lambda place: place.after_seconds)))


def _place(layout: Layout, among: list[Layout]) -> int | None:
    return among.index(layout) + 1 if layout in among else None
