"""Real runs: a small model is trained under a layout by PyTorch's own engines, and what was exchanged and held is laid
beside what was predicted, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nanum import processes
from nanum.engines.engine import Engine
from nanum.engines.torch import on_gloo
from nanum.schedule import order, stage_of
from nanum.verify import checks
from nanum.verify.case import STEPS, Case
from nanum.verify.checks import Check, Held, Row
from nanum.verify.expected import Expected, expected


@dataclass(frozen=True)
class Verification:
    """One run, and what was expected of it."""

    case: Case
    engine: Engine
    answer: dict[str, Any]

    @cached_property
    def predicted(self) -> list[Expected]:
        case = self.case
        alike: dict[tuple[tuple[str, int], ...], Expected] = {}
        found = []
        for rank in range(case.ranks):
            place = case.layout.place(rank)
            key = tuple(place.items())
            if key not in alike:
                alike[key] = expected(case.model, case.job, case.layout, self.engine, place)
            found.append(alike[key])
        return found

    @cached_property
    def rows(self) -> list[Row]:
        pairs = zip(self.answer["ranks"], self.predicted, strict=True)
        return [row for answer, of in pairs for row in checks.rows(answer, of.ledger)]

    @cached_property
    def held(self) -> list[Held]:
        pairs = zip(self.answer["ranks"], self.predicted, strict=True)
        return [each for answer, of in pairs for each in checks.held(answer, of.memory)]

    @cached_property
    def checks(self) -> list[Check]:
        answers, precision = self.answer["ranks"], self.case.job.precision
        found = [
            checks.loss(answers, precision),
            checks.gradients(answers, precision),
            checks.communication(self.rows),
            checks.memory(self.held),
            checks.wire(answers, self.predicted),
        ]
        if self.case.layout.structure.pipelined:
            found.append(checks.schedule(answers, [self._order(rank) for rank in range(self.case.ranks)]))
        return found

    def _order(self, rank: int) -> list[str]:
        layout, pp_rank = self.case.layout, self.case.layout.place(rank)["pp"]
        m = int(self.case.job.num_microbatches(layout.micro_batch_size, layout.data_ranks))
        schedule = layout.structure.schedule
        actions = order(schedule, layout.pp, m, layout.structure.virtual_stages)[pp_rank]
        return [
            f"{stage_of(schedule, layout.pp, pp_rank, action.chunk)}{action.kind}{action.micro_batch}"
            for action in actions
        ]

    @property
    def ok(self) -> bool:
        return all(check.ok is not False for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "name": self.case.name,
            "ranks": self.case.ranks,
            "backend": self.answer["backend"],
            "engine": {"name": self.engine.name, "version": self.answer["torch"]},
            "checks": [check.to_dict() for check in self.checks],
            "communication": [row.to_dict() for row in self.rows],
            "memory": [each.to_dict() for each in self.held],
        }


def verify(cases: Sequence[Case], progress: processes.Progress) -> list[Verification]:
    """Run every case on this machine, one after the other, and compare.

    Raises:
        Refused: there is no torch.
        RunFailed: a rank died, hung, or ran out of memory.
    """
    found = processes.run("nanum.live.worker", [], progress, question=questions(cases))
    return [answered(case, answer) for case, answer in zip(cases, found["answers"], strict=True)]


def questions(cases: Sequence[Case]) -> dict[str, Any]:
    """As the worker reads them."""
    return {"questions": [case.question(on_gloo(case.bucket_cap_mb)) for case in cases]}


def answered(case: Case, answer: dict[str, Any]) -> Verification:
    """A run that a launch of several machines did."""
    return Verification(case, on_gloo(case.bucket_cap_mb), answer)


__all__ = ["STEPS", "Case", "Verification", "answered", "verify"]
