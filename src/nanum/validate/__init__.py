"""Published runs beside their predictions, by source. Nothing flows back: what a source measured has no part in what is
predicted of it (`account.coefficients`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from nanum.account import device
from nanum.account.coefficients import coefficients
from nanum.prediction import Prediction, StageMemory
from nanum.validate.causes import differing_repeats, likely_cause
from nanum.validate.questions import Kind, Question, question_of, unasked
from nanum.validate.ranking import groups
from nanum.validate.rows import HELD_OUT, Row, read, tells_launches
from nanum.validate.sources import source_of
from nanum.validate.summary import QUANTITIES, Compared, mean_of_sources, summary
from nanum.validate.workers import in_order

__all__ = ["read", "validate"]

Progress = Callable[[int, int], None]


def validate(rows: list[Row], progress: Progress = lambda done, total: None, jobs: int = 1) -> dict[str, Any]:
    """The document of `nanum validate`; `jobs` processes work at it, this one alone where that is 1."""
    answers = in_order(Answering(), rows, progress, jobs)
    compared = differing_repeats([each for answer in answers for each in answer.compared])
    names = list(dict.fromkeys(row.source for row in rows))
    by_source = {
        name: {**summary(each for each in compared if each.source == name), "held_out": name in HELD_OUT}
        for name in names
    }
    whole = summary(compared)
    for quantity in QUANTITIES:
        for key, held in (("mean_of_sources", False), ("mean_of_held_out", True)):
            these = (each for each in by_source.values() if each["held_out"] == held)
            whole[quantity][key] = mean_of_sources(these, quantity)
    ranked = {alike: group.choices[0].id for alike, group in groups(compared).items()}
    return {
        "rows": [{**each.document(), "group": ranked.get(each.alike)} for each in compared],
        "skipped": [
            {"id": row.id, "why": "; ".join(answer.why), "reasons": answer.why}
            for row, answer in zip(rows, answers, strict=True)
            if answer.why
        ],
        "left_out": [each for answer in answers for each in answer.left_out],
        "summary": whole,
        "by_source": by_source,
        "sources": [_said(name, rows) for name in names if any(each.source == name for each in compared)],
    }


def _said(name: str, rows: list[Row]) -> dict[str, Any]:
    """Whose code a source's runs are taken for, and what else is."""
    first = next(row for row in rows if row.source == name)
    taken = source_of(first)
    return {"source": name, "engine": taken.code, "assumed": list(taken.assumed)}


@dataclass(frozen=True)
class Answer:
    """What is said of one row: its quantities beside those predicted, or every reason why it is skipped."""

    compared: tuple[Compared, ...] = ()
    left_out: tuple[dict[str, str], ...] = ()
    why: tuple[str, ...] = ()


class Answering:
    """Answers row after row, with one prediction for each question: some sources ran the same again and again."""

    def __init__(self) -> None:
        self._source = ""
        self._made: dict[Any, Prediction] = {}

    def __call__(self, row: Row) -> Answer:
        asked = question_of(row)
        if not isinstance(asked, Question):
            return Answer(why=tuple(asked))
        if tells_launches(row):
            return Answer(why=("one of the runs that tell what a launch costs, which each fit has seen",))
        left_out = tuple({"id": row.id, "quantity": q, "why": why} for q, why in unasked(row).items())
        return Answer(tuple(compare(asked, self._prediction(asked))), left_out)

    def _prediction(self, asked: Question) -> Prediction:
        if asked.row.source != self._source:  # no prediction is of two
            self._source, self._made = asked.row.source, {}
        key = asked.model, asked.job, asked.layout, id(asked.cluster), id(asked.engine)
        if key not in self._made:
            self._made[key] = Prediction(
                asked.model, asked.job, asked.cluster, asked.layout, asked.engine, coefficients(asked.row.unseen)
            )
        return self._made[key]


def compare(asked: Question, p: Prediction) -> Iterable[Compared]:
    """A run's quantities beside those predicted."""
    row = asked.row
    if asked.step_seconds is not None:
        seconds = float(p.parts.step[0])
        low, high = p.range.low * seconds, p.range.high * seconds
        time = Compared(row.id, row.source, "step_seconds", asked.step_seconds, seconds, low, high)
        time = replace(time, alike=alike(asked), layout=layout(asked))
        yield replace(time, likely_cause=likely_cause(time, asked, p))
    if asked.memory_kind is not None:
        low, size, high = (
            max(_bytes(asked.memory_kind, stage, level) for stage in p.memory) for level in ("low", "value", "high")
        )
        right = None if asked.memory_bytes is not None else not p.fits
        memory = Compared(row.id, row.source, "memory_bytes", asked.memory_bytes, size, low, high, right)
        yield replace(memory, likely_cause=likely_cause(memory, asked, p))


def alike(asked: Question) -> Hashable:
    """All of a run but its layout: its model (by any name), job, machine and software, and what its row says of these
    in words, which tells versions and recipes apart that predictions do not.
    """
    row = asked.row
    words = tuple(row[path] for path in ("source", "task", "family", "precision", "overlap"))
    engine = asked.engine.name, asked.engine.version
    return row.source, replace(asked.model, name=""), asked.job, asked.cluster.name, engine, words


def layout(asked: Question) -> Hashable:
    """A run's layout, and what its row says of it in words, which may tell apart what predictions do not."""
    return asked.layout, asked.row["recompute"], asked.row["schedule"]


def _bytes(kind: Kind, stage: StageMemory, level: device.Level) -> int:
    """What PyTorch or the driver would say of a pipeline rank. PyTorch counts workspaces among what is allocated."""
    if kind == "allocated":
        return stage.moment.bytes + int(device.WORKSPACES.at(level))
    if kind == "reserved":
        return stage.reserved_bytes_at(level)
    return stage.device_bytes_at(level)
