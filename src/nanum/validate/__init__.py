"""Published runs beside their predictions, by source. Nothing flows back: no measured time or memory has a part in a
prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from nanum.account import device
from nanum.prediction import RANGE, Prediction, StageMemory
from nanum.validate.questions import Kind, Question, question_of, unasked
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
    source, predictions = "", Predictions()
    for i, row in enumerate(rows):
        asked = question_of(row)
        if row.source != source:  # and no prediction is of two
            source, predictions = row.source, Predictions()
        if isinstance(asked, Question):
            compared += compare(asked, predictions(asked))
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
    taken = source_of(first)
    return {"source": name, "engine": taken.code, "assumed": list(taken.assumed)}


class Predictions:
    """One for each question: some sources ran the same again and again."""

    def __init__(self) -> None:
        self._made: dict[Any, Prediction] = {}

    def __call__(self, asked: Question) -> Prediction:
        key = asked.model, asked.job, asked.layout, id(asked.cluster), id(asked.engine)
        if key not in self._made:
            self._made[key] = Prediction(asked.model, asked.job, asked.cluster, asked.layout, asked.engine)
        return self._made[key]


def compare(asked: Question, p: Prediction) -> Iterable[Compared]:
    """A run's quantities beside those predicted."""
    row = asked.row
    if asked.step_seconds is not None:
        seconds = float(p.parts.step[0])
        low, high = (share * seconds for share in RANGE)
        yield Compared(row.id, row.source, "step_seconds", asked.step_seconds, seconds, low, high)
    if asked.memory_kind is not None:
        low, size, high = (
            max(_bytes(asked.memory_kind, stage, level) for stage in p.memory) for level in ("low", "value", "high")
        )
        right = None if asked.memory_bytes is not None else not p.fits
        yield Compared(row.id, row.source, "memory_bytes", asked.memory_bytes, size, low, high, right)


def _bytes(kind: Kind, stage: StageMemory, level: device.Level) -> int:
    """What PyTorch or the driver would say of a pipeline rank. PyTorch counts workspaces among what is allocated."""
    if kind == "allocated":
        return stage.moment.bytes + int(device.WORKSPACES.at(level))
    if kind == "reserved":
        return stage.reserved_bytes_at(level)
    return stage.device_bytes_at(level)
