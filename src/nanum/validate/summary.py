"""How far predictions are from what was measured, as numbers of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

QUANTITIES = ("step_seconds", "memory_bytes")


@dataclass(frozen=True)
class Compared:
    """One quantity of one run. `low` and `high` are the prediction's own range, where it has one. Of a run that did not
    fit nothing was measured: `right` says whether the prediction does not fit either.
    """

    id: str
    source: str
    quantity: str
    measured: float | None
    predicted: float
    low: float | None = None
    high: float | None = None
    right: bool | None = None

    @property
    def signed_error(self) -> float | None:
        return None if self.measured is None else self.predicted / self.measured - 1

    @property
    def in_range(self) -> bool | None:
        if self.measured is None or self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high

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
        }


def summary(rows: Iterable[Compared]) -> dict[str, Any]:
    """By quantity."""
    found = list(rows)
    return {quantity: errors([row for row in found if row.quantity == quantity]) for quantity in QUANTITIES}


def errors(rows: Sequence[Compared]) -> dict[str, Any]:
    """`mape`, `median`, `p90` and `max` of the error's absolute value, `bias` the mean of the error; `in_range` the
    share of rows within the predicted range. Null where there is no row.
    """
    signed = np.array([row.signed_error for row in rows if row.signed_error is not None], dtype=float)
    ranged = [row.in_range for row in rows if row.in_range is not None]
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
        "oom": {"n": len(oom), "right": sum(oom)},
    }
