"""How far predictions are from what was measured, as numbers of a table."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanum.validate.ranking import groups, ranking

QUANTITIES = ("step_seconds", "memory_bytes")


@dataclass(frozen=True)
class Compared:
    """One quantity of one run. `low` and `high` are the prediction's own range, where it has one. Of a run that did not
    fit nothing was measured: `right` says whether the prediction does not fit either. Runs of which all but the
    `layout` is equal are `alike`; a run without that is not ranked.
    """

    id: str
    source: str
    quantity: str
    measured: float | None
    predicted: float
    low: float | None = None
    high: float | None = None
    right: bool | None = None
    alike: Hashable | None = None
    layout: Hashable | None = None
    likely_cause: str | None = None

    @property
    def signed_error(self) -> float | None:
        return None if self.measured is None else self.predicted / self.measured - 1

    @property
    def in_range(self) -> bool | None:
        if self.measured is None or self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high

    @property
    def width(self) -> float | None:
        """Half of the predicted range, over what is predicted: 0.2 of one that is ±20 %."""
        if self.low is None or self.high is None:
            return None
        return (self.high - self.low) / 2 / self.predicted

    def document(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "source": self.source,
            "quantity": self.quantity,
            "measured": self.measured,
            "predicted": self.predicted,
            "low": self.low,
            "high": self.high,
            "signed_error": self.signed_error,
            "oom_right": self.right,
            "likely_cause": self.likely_cause,
        }


def summary(rows: Iterable[Compared]) -> dict[str, Any]:
    """By quantity, and how well steps are ranked."""
    found = list(rows)
    by_quantity = {quantity: errors([row for row in found if row.quantity == quantity]) for quantity in QUANTITIES}
    return {**by_quantity, "ranking": ranking(groups(found).values())}


def mean_of_sources(summaries: Iterable[dict[str, Any]], quantity: str) -> dict[str, Any]:
    """The mean over sources of what each has, so that the source of most rows does not speak for all."""
    found = [each[quantity] for each in summaries if each[quantity]["n"]]
    keys = ("mape", "median", "p90", "bias", "in_range", "width_median")
    return {"sources": len(found)} | {key: _mean([each[key] for each in found]) for key in keys}


def _mean(values: Sequence[float | None]) -> float | None:
    stated = [value for value in values if value is not None]
    return float(np.mean(stated)) if stated else None


def errors(rows: Sequence[Compared]) -> dict[str, Any]:
    """`mape`, `median`, `p90` and `max` of the error's absolute value, `bias` the mean of the error; `in_range` the
    share of rows within the predicted range and `width_median` half of that range, over what is predicted. Null where
    there is no row.
    """
    signed = np.array([row.signed_error for row in rows if row.signed_error is not None], dtype=float)
    ranged = [row.in_range for row in rows if row.in_range is not None]
    widths = [row.width for row in rows if row.in_range is not None and row.width is not None]
    oom = [row.right for row in rows if row.right is not None]
    size = np.abs(signed)
    there = len(signed) > 0
    return {
        "n": len(signed),
        "mape": float(size.mean()) if there else None,
        "median": float(np.median(size)) if there else None,
        "p90": float(np.quantile(size, 0.9)) if there else None,
        "max": float(size.max()) if there else None,
        "bias": float(signed.mean()) if there else None,
        "in_range": sum(ranged) / len(ranged) if ranged else None,
        "width_median": float(np.median(widths)) if widths else None,
        "oom": {"n": len(oom), "right": sum(oom)},
    }
