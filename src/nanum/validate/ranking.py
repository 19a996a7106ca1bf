"""Which of two layouts is faster, and how good the first choice is: how well predictions rank runs that differ in their
layout alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Any, Protocol

THRESHOLD = 0.05
"""Two measured steps are apart where the longer is over 1 + this times the shorter; closer ones are no pair."""
THRESHOLDS: Mapping[str, float] = {"bs176": 0.10}
"""Of sources whose repeats differ by more: BLOOM's candidates 013 and 014 are one layout and 9 % apart, 033 and 072
6 %."""


class Ranked(Protocol):
    """A run's measured and predicted seconds. Runs with equal `alike` differ in their `layout` alone."""

    @property
    def id(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def quantity(self) -> str: ...
    @property
    def measured(self) -> float | None: ...
    @property
    def predicted(self) -> float: ...
    @property
    def alike(self) -> Hashable | None: ...
    @property
    def layout(self) -> Hashable | None: ...


@dataclass(frozen=True)
class Choice:
    """A layout of a group: its first run, and seconds, averaged over its repeats."""

    id: str
    measured: float
    predicted: float


@dataclass(frozen=True)
class Group:
    """Two layouts or more, of one model, job, machine and software."""

    source: str
    choices: tuple[Choice, ...]

    def pairs(self, threshold: float) -> list[bool]:
        """Of each pair that is measured over `threshold` apart: is the faster called right? A tie calls none."""
        called = []
        for one, other in combinations(self.choices, 2):
            fast, slow = sorted((one, other), key=lambda choice: choice.measured)
            if slow.measured > fast.measured * (1 + threshold):
                called.append(fast.predicted < slow.predicted)
        return called

    @property
    def chosen(self) -> Choice:
        """The layout predicted fastest; of several, the one that is measured slowest, lest luck be counted."""
        return min(self.choices, key=lambda choice: (choice.predicted, -choice.measured))

    @property
    def best(self) -> Choice:
        return min(self.choices, key=lambda choice: choice.measured)

    @property
    def regret(self) -> float:
        """How much longer the first choice takes than the best, as a ratio less 1."""
        return self.chosen.measured / self.best.measured - 1


def groups(rows: Iterable[Ranked]) -> dict[Hashable, Group]:
    """The groups of two layouts or more, by what their runs have alike. Only measured steps are ranked."""
    found: dict[Hashable, dict[Hashable, list[Ranked]]] = {}
    for row in rows:
        if row.quantity == "step_seconds" and row.measured is not None and row.alike is not None:
            found.setdefault(row.alike, {}).setdefault(row.layout, []).append(row)
    return {
        alike: Group(next(iter(layouts.values()))[0].source, tuple(map(_choice, layouts.values())))
        for alike, layouts in found.items()
        if len(layouts) > 1
    }


def _choice(repeats: list[Ranked]) -> Choice:
    measured = fmean(row.measured for row in repeats if row.measured is not None)
    return Choice(repeats[0].id, measured, fmean(row.predicted for row in repeats))


def ranking(found: Iterable[Group]) -> dict[str, Any]:
    """Of one source's groups, or of several sources'. `right` is the share of pairs whose faster layout is called
    right: of several sources, the mean of their shares, and `regret_median` the mean of their medians. Null where there
    is nothing to take it of, and a threshold where sources have several.
    """
    sources: dict[str, list[Group]] = {}
    for group in found:
        sources.setdefault(group.source, []).append(group)
    thresholds = {name: THRESHOLDS.get(name, THRESHOLD) for name in sources}
    called = {name: [c for g in of for c in g.pairs(thresholds[name])] for name, of in sources.items()}
    shares = [sum(each) / len(each) for each in called.values() if each]
    everyone = [group for of in sources.values() for group in of]
    worst = max(everyone, key=lambda group: group.regret, default=None)
    return {
        "sources": len(sources),
        "groups": len(everyone),
        "pairs": sum(map(len, called.values())),
        "right": fmean(shares) if shares else None,
        "threshold": thresholds.popitem()[1] if len(set(thresholds.values())) == 1 else None,
        "regret_median": fmean(median(g.regret for g in of) for of in sources.values()) if sources else None,
        "regret_worst": None if worst is None else worst.regret,
        "worst_group": None
        if worst is None
        else {"layouts": len(worst.choices), "chosen": worst.chosen.id, "best": worst.best.id},
    }
