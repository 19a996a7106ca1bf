"""All layouts of a cluster, ranked by predicted step time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from nanum import engines
from nanum.cluster import Cluster
from nanum.engines.engine import Engine
from nanum.errors import Refused
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Model
from nanum.prediction import Prediction, consistent
from nanum.prediction.document import layout_document, question_document, summary
from nanum.rules import OF_JOB, broken
from nanum.search.candidates import candidates
from nanum.search.explain import explain
from nanum.search.interleaved import interleaved
from nanum.search.levers import levers
from nanum.search.near import nearest_that_fits
from nanum.search.rank import Candidate, Question, Ranked, TooLarge, fastest, read, table
from nanum.search.shortlist import Listed, needed_seconds, shortlist


@dataclass(frozen=True)
class Plan:
    """The ranking. `candidates` are those whose exact time was worked out, fastest first."""

    questions: tuple[Question, ...]
    enumerated: int
    impossible: dict[str, int]
    too_large: TooLarge
    least_engine: Engine  # of the layout that comes nearest to fitting
    ranked: int
    several: int  # layouts of several stages a rank that were tried besides
    candidates: tuple[tuple[Engine, Candidate], ...]
    read: tuple[tuple[Engine, Ranked], ...]
    top: int
    fold: bool
    seconds: float

    def frame(self) -> Any:
        """Every layout that fits as a polars data frame, by the bound of its step. Raises Refused where polars is not
        installed.
        """
        try:
            import polars
        except ImportError:
            raise Refused(["a data frame needs polars: pip install 'nanum[frames]'"]) from None
        q = self.questions[0]
        rows = [row for engine, ranked in self.read for row in table(engine.name, q.model, ranked)]
        return polars.DataFrame(rows).sort("step_seconds_bound") if rows else polars.DataFrame()

    @cached_property
    def best(self) -> tuple[Prediction, ...]:
        """The fastest layouts in full, fastest first."""
        q = self.questions[0]
        return tuple(
            Prediction(q.model, q.job, q.cluster, consistent(c.layout), e) for e, c in self.candidates[: self.top]
        )

    @cached_property
    def shortlist(self) -> tuple[Listed, ...]:
        """The fastest layouts of which none is a near tie of a faster one, each with those that are its near ties."""
        return shortlist(self.candidates, self.top, fold=self.fold)

    @property
    def explanations(self) -> list[str]:
        """Why the first beats the fastest of the next kinds, in a line each; what is folded, or would be in a longer
        list, is no kind.
        """
        every = shortlist(self.candidates, len(self.candidates), fold=self.fold)
        return explain([(one.engine, one.candidate) for one in every], several=len(self.questions) > 1)

    def to_dict(self, *, in_full: bool = True) -> dict[str, Any]:
        """The plan as one document. Unless `in_full`, `best` is the first alone, without its ledger."""
        best = [p.to_dict(communication=in_full) for p in (self.best if in_full else self.best[:1])]
        rejected = [{"why": why, "count": n} for why, n in sorted(self.impossible.items(), key=lambda kv: -kv[1])]
        if self.too_large.count:
            rejected.append({"why": "more memory than the device has", "count": self.too_large.count})
        return {
            "count": {
                "enumerated": self.enumerated, "impossible": sum(self.impossible.values()),
                "too_large": self.too_large.count, "ranked": self.ranked, "several_stages": self.several,
            },
            "seconds": self.seconds,
            "best": best,
            "shortlist": [self._listed(one) for one in self.shortlist],
            "rejected": rejected,
            "explanations": self.explanations,
            "question": self._question(),
            "least": self._least(),
        }  # fmt: skip

    def _listed(self, one: Listed) -> dict[str, Any]:
        """A layout of the shortlist in short, with its near ties."""
        q = self.questions[0]

        def short(place: int, c: Candidate) -> dict[str, Any]:
            p = Prediction(q.model, q.job, q.cluster, consistent(c.layout), one.engine)
            return {"place": place, **summary(p, c)}

        return {**short(one.place, one.candidate), "near_ties": [short(*tie) for tie in one.near_ties]}

    def _question(self) -> dict[str, Any]:
        """What was asked, in predict's words; of several engines each is named."""
        q = self.questions[0]
        asked = question_document(q.model, q.job, q.cluster, q.engine)
        if len(self.questions) > 1:
            asked["engine"] = {"name": ", ".join(q.engine.name for q in self.questions), "version": ""}
        return asked

    def _least(self) -> dict[str, Any] | None:
        """Of the layouts that are too large, the one that comes nearest; None where none is."""
        large, q = self.too_large, self.questions[0]
        if large.layout is None:
            return None
        m = q.job.num_microbatches(large.layout.micro_batch_size, large.layout.data_ranks)
        nearest = Prediction(q.model, q.job, q.cluster, consistent(large.layout), self.least_engine)
        return {
            **question_document(q.model, q.job, q.cluster, self.least_engine),
            "layout": layout_document(large.layout, m),
            "device_bytes": large.device_bytes,
            "capacity_bytes": int(q.cluster.chip.memory_bytes.value),
            "levers": [] if self.candidates else list(levers(nearest)),
        }


def plan(
    model: Model,
    job: Job,
    cluster: Cluster,
    engine: str = "torchtitan",
    top: int = 10,
    progress: Callable[[int, int], None] | None = None,
    fold: bool = True,
    like: Structure | None = None,
) -> Plan:
    """Enumerate every layout over the whole cluster, refuse the impossible, drop what does not fit, rank the rest by
    exact step time.

    `engine` may be "any": the layouts of torchtitan and megatron are then ranked together. Unless `fold`, near ties
    stand for themselves in the shortlist. What is not searched (how tokens come to experts, the kernels) is as in
    `like`, by default as in `Structure()`. Raises Refused where no layout could be asked for.
    """
    begin = time.perf_counter()
    if top < 1:
        raise Refused([f"top={top} must be at least 1"])
    chosen = [engines.load(name) for name in (("torchtitan", "megatron") if engine == "any" else (engine,))]
    if why := broken(OF_JOB, model, job, cluster, Layout()):
        raise Refused(why)
    found: list[tuple[Engine, Candidate]] = []
    everything: list[tuple[Engine, Ranked]] = []
    questions = tuple(Question(model, job, cluster, e) for e in chosen)
    enumerated = ranked = several = 0
    too_large = TooLarge()
    nearest_engine = chosen[0]
    impossible: dict[str, int] = {}
    for which, question in enumerate(questions):
        reading, trying = (_part(progress, 2 * which + i, 2 * len(questions)) for i in (0, 1))
        tried = candidates(model, job, cluster, question.engine, like)
        rows, large = read(question, tried.groups, reading)
        enumerated += sum(tried.impossible.values()) + large.count + sum(len(r.group) for r in rows)
        if (too_large + large).layout is not too_large.layout:
            nearest_engine = question.engine
        too_large += large
        ranked += sum(len(r.group) for r in rows)
        for reason, n in tried.impossible.items():
            impossible[reason] = impossible.get(reason, 0) + n
        everything += [(question.engine, r) for r in rows]
        needed = partial(needed_seconds, question.engine, top=top, fold=fold)
        first = fastest(question, rows, needed)
        more, n = interleaved(question, rows, first, needed, trying)
        several += n
        found += [(question.engine, c) for c in (*first, *more)]
    found.sort(key=lambda ec: (ec[1].step_seconds, ec[1].device_bytes))
    return Plan(
        questions=questions,
        enumerated=enumerated,
        impossible=impossible,
        too_large=too_large,
        least_engine=nearest_engine,
        ranked=ranked,
        several=several,
        candidates=tuple(found),
        read=tuple(everything),
        top=top,
        fold=fold,
        seconds=time.perf_counter() - begin,
    )


def _part(progress: Callable[[int, int], None] | None, i: int, n: int) -> Callable[[int, int], None] | None:
    """What tells the progress of the i-th of n parts of a whole."""
    if progress is None:
        return None
    return lambda done, total: progress(i * total + done, n * total)


def nearest(prediction: Prediction, progress: Callable[[int, int], None] | None = None) -> Prediction | None:
    """Of the layouts that fit, the one that changes least of a layout that does not; of equally near ones the fastest
    by its bound.
    """
    p = prediction
    question = Question(p.model, p.job, p.cluster, p.engine)
    tried = candidates(p.model, p.job, p.cluster, p.engine, p.layout.structure)
    best = nearest_that_fits(question, p.layout, tried.groups, progress)
    return None if best is None else Prediction(p.model, p.job, p.cluster, consistent(best), p.engine)


__all__ = ["Plan", "levers", "nearest", "plan"]
