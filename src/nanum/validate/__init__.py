"""Published runs beside their predictions, by source. Nothing flows back: no measured time or memory has a part in a
prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from nanum.prediction import RANGE, Prediction
from nanum.validate.questions import Question, question_of, unasked
from nanum.validate.rows import Row, read
from nanum.validate.sources import source_of
from nanum.validate.summary import Compared, summary

__all__ = ["read", "validate"]

Progress = Callable[[int, int], None]


def validate(rows: list[Row], progress: Progress = lambda done, total: None) -> dict[str, Any]:
    """The document of `nanum validate`."""
    compared: list[Compared] = []
    skipped: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    for i, row in enumerate(rows):
        asked = question_of(row)
        if isinstance(asked, Question):
            compared += compare(asked)
            left_out += [{"id": row.id, "quantity": q, "why": why} for q, why in unasked(row).items()]
        else:
            skipped.append({"id": row.id, "why": "; ".join(asked), "reasons": asked})
        progress(i + 1, len(rows))
    names = list(dict.fromkeys(row.source for row in rows))
    return {
        "rows": [each.document() for each in compared],
        "skipped": skipped,
        "left_out": left_out,
        "summary": summary(compared),
        "by_source": {name: summary(each for each in compared if each.source == name) for name in names},
        "sources": [_said(name, rows) for name in names if any(each.source == name for each in compared)],
    }


def _said(name: str, rows: list[Row]) -> dict[str, Any]:
    """Whose code a source's runs are taken for, and what else is."""
    first = next(row for row in rows if row.source == name)
    taken = source_of(name, first["layout.zero_stage"])
    return {"source": name, "engine": taken.code, "assumed": list(taken.assumed)}


def compare(asked: Question) -> Iterable[Compared]:
    """A run's quantities beside those predicted."""
    p = Prediction(asked.model, asked.job, asked.cluster, asked.layout, asked.engine)
    row = asked.row
    if asked.step_seconds is not None:
        seconds = float(p.parts.step[0])
        low, high = (share * seconds for share in RANGE)
        yield Compared(row.id, row.source, "step_seconds", asked.step_seconds, seconds, low, high)
    if asked.memory_kind is not None:
        of = {"allocated": lambda m: m.moment.bytes, "reserved": lambda m: m.reserved_bytes}
        size = max(of.get(asked.memory_kind, lambda m: m.device_bytes)(m) for m in p.memory)
        right = None if asked.memory_bytes is not None else not p.fits
        yield Compared(row.id, row.source, "memory_bytes", asked.memory_bytes, size, right=right)
