"""What must hold of every question that is searched: the bound below the exact step, and that what `predict` says."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from nanum import engines
from nanum.cluster import load as load_cluster
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Mlp, Model
from nanum.model import load as load_model
from nanum.once import Once
from nanum.prediction import predict
from nanum.search import near, plan
from nanum.search.candidates import candidates
from nanum.search.rank import Candidate, Question, Ranked, exact_times, fastest, read
from nanum.search.shortlist import needed_seconds, shortlist

MEGATRON, TORCHTITAN = (engines.load(name) for name in ("megatron", "torchtitan"))


def questions() -> list[Question]:
    """A few small questions of different shapes, on clusters small enough that every layout is timed exactly."""
    rng = np.random.default_rng(1)
    found = []
    for cluster in ("1x8xh100-sxm", "2x4xa100-sxm-80gb", "3x2xb200"):
        for engine in (MEGATRON, TORCHTITAN):
            heads = int(rng.choice([8, 16]))
            attention = Attention(heads, heads // int(rng.choice([1, 4])), 64)
            mlp = Mlp(int(rng.choice([2048, 5504])), gated=True, activation="silu")
            layers, vocab = int(rng.choice([4, 8, 12])), int(rng.choice([1000, 32000]))
            model = Model("asked", 64 * heads, vocab, layers, 4096, attention, mlp, "rms_norm", "rotary", False)
            job = Job(int(rng.choice([512, 4096])), int(rng.choice([48, 96])))
            found.append(Question(model, job, load_cluster(cluster), engine))
    return found


QUESTIONS = questions()
IN_FP8 = [replace(q, job=replace(q.job, precision="fp8")) for q in QUESTIONS[1:2]]
BLOCKING = [replace(q, cluster=replace(q.cluster, launch_blocking=True)) for q in QUESTIONS[2:3]]


_RANKED: Once[list[Ranked]] = Once()


def ranked_of(question: Question) -> list[Ranked]:
    """Every group of its layouts, which two tests read."""
    groups = candidates(question.model, question.job, question.cluster, question.engine).groups
    return _RANKED((question,), lambda: read(question, groups)[0])


@pytest.mark.parametrize(
    "question",
    [*QUESTIONS, *IN_FP8, *BLOCKING],
    ids=lambda q: f"{q.engine.name}-{q.cluster.name}-{q.job.precision}{'-blocking' * q.cluster.launch_blocking}",
)
def test_the_bound_never_exceeds_the_exact_step(question: Question) -> None:
    ranked = ranked_of(question)
    assert sum(len(r.group) for r in ranked) > 50
    for r in ranked:
        if len(r.group):
            exact = np.array([c.step_seconds for c in exact_times(question, r, np.arange(len(r.group)))])
            assert np.all(r.bound_seconds <= exact * (1 + 1e-12))
            assert np.all(r.bound_seconds > 0)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: f"{q.engine.name}-{q.cluster.name}")
def test_a_candidate_is_what_predict_says(question: Question) -> None:
    """One layout of every third structure."""
    rng = np.random.default_rng(2)
    for r in ranked_of(question)[::3]:
        if len(r.group):
            row = rng.integers(len(r.group))
            (candidate,) = exact_times(question, r, np.array([row]))
            said = predict(question.model, question.job, question.cluster, candidate.layout, question.engine.name)
            assert candidate.device_bytes == said.worst.device_bytes
            for part in ("step", "compute", "exposed_communication", "bubble", "optimizer"):
                field = f"{part}_seconds"
                assert getattr(candidate, field) == pytest.approx(getattr(said.time, field), rel=1e-9, abs=1e-12)


def test_the_nearest_is_the_same_however_few_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none of the nearest fits, farther ones are read, up to the farthest."""
    question, at_once = QUESTIONS[2], 20
    monkeypatch.setattr(near, "AT_ONCE", at_once)
    small = replace(question.cluster.chip, memory_bytes=replace(question.cluster.chip.memory_bytes, value=3e9))
    asked = replace(question, cluster=replace(question.cluster, chip=small))
    layout = Layout(dp_replicate=8, structure=Structure(zero=0))
    groups = candidates(asked.model, asked.job, asked.cluster, asked.engine).groups
    ranked, too_large = read(asked, groups)
    assert too_large.count > 2 * at_once
    best = min(
        (float(far), float(r.bound_seconds[i]))
        for r in ranked
        for i, far in enumerate(near.distance(layout, r.group.layout))
    )
    found = near.nearest_that_fits(asked, layout, groups)
    assert found is not None
    one = replace(found, **{f: np.array([getattr(found, f)]) for f in (*near.BODY_FIELDS, "pp")})
    assert float(near.distance(layout, one)[0]) == best[0]
    ((there,),) = [[r.bound_seconds[0] for r in read(asked, [near.Group(one)])[0]]]
    assert there == best[1]
    nothing = replace(
        asked, cluster=replace(asked.cluster, chip=replace(small, memory_bytes=replace(small.memory_bytes, value=1e6)))
    )
    assert near.nearest_that_fits(nothing, layout, groups) is None


def test_pipelines_with_uneven_ends_are_read_as_predict_reads_them() -> None:
    """Seven layers on two, three or six stages: an even bound, and ends that are said."""
    question = replace(QUESTIONS[4], model=replace(QUESTIONS[4].model, num_hidden_layers=7))
    assert question.engine is MEGATRON
    ranked = [r for r in ranked_of(question) if r.group.layout.structure.evens_ends and len(r.group)]
    assert {int(pp) for r in ranked for pp in r.group.layout.pp} == {2, 3}
    for r in ranked[::3]:
        row = len(r.group) - 1
        (candidate,) = exact_times(question, r, np.array([row]))
        s = candidate.layout.structure
        assert (s.first_stage_layers, s.last_stage_layers) == ((4, 3) if candidate.layout.pp == 2 else (2, 2))
        said = predict(question.model, question.job, question.cluster, candidate.layout, "megatron")
        assert candidate.device_bytes == said.worst.device_bytes
        assert candidate.step_seconds == pytest.approx(said.time.step_seconds, rel=1e-9)
        assert r.bound_seconds[row] <= candidate.step_seconds * (1 + 1e-12)


@pytest.mark.parametrize("fold", [True, False])
def test_a_shortlist_of_the_needed_is_that_of_all(fold: bool) -> None:
    question = QUESTIONS[0]
    ranked = [r for r in ranked_of(question) if len(r.group)]
    everything = [c for r in ranked for c in exact_times(question, r, np.arange(len(r.group)))]
    everything.sort(key=lambda c: (c.step_seconds, c.device_bytes))
    for top in (1, 5):
        found = fastest(question, ranked, partial(needed_seconds, question.engine, top=top, fold=fold))
        assert len(found) < len(everything)
        mine, best = (shortlist([(question.engine, c) for c in of], top, fold=fold) for of in (found, everything))
        assert mine == best
        assert any(one.near_ties for one in best) == fold


def test_what_is_needed_may_grow() -> None:
    """Where layouts that were listed turn out to be near ties of one that is found after them."""
    question = QUESTIONS[0]
    ranked = [r for r in ranked_of(question) if len(r.group)]
    bounds = np.sort(np.concatenate([r.bound_seconds for r in ranked]))
    asked = iter([bounds[2], bounds[24]])
    found = fastest(question, ranked, lambda known: next(asked, bounds[24]))
    layouts = {c.layout for c in found}
    for r in ranked:
        if len(needed := np.flatnonzero(r.bound_seconds <= bounds[24])):
            assert {c.layout for c in exact_times(question, r, needed)} <= layouts


def candidate(seconds: float, gigabytes: int, tp: int = 1, replicas: int = 1) -> Candidate:
    structure = Structure(tensor="none" if tp == 1 else "sequence")
    layout = Layout(dp_replicate=replicas, dp_shard=8 // tp // replicas, tp=tp, structure=structure)
    return Candidate(layout, gigabytes * 10**9, seconds, seconds, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("other", "folded"),
    [
        (candidate(1.009, 10, replicas=2), True),
        (candidate(1.011, 10, replicas=2), False),  # slower by more
        (candidate(1.009, 9, replicas=2), False),  # needs less
        (candidate(1.009, 10, tp=2), False),  # divides otherwise
    ],
)
def test_a_near_tie_is_alike_no_smaller_and_hardly_slower(other: Candidate, folded: bool) -> None:
    first, last = candidate(1.0, 10), candidate(1.018, 11, replicas=4)  # near the second, but not the first
    listed = shortlist([(MEGATRON, first), (MEGATRON, other), (MEGATRON, last)], 3)
    assert [c for _, c in listed[0].near_ties] == ([other] if folded else [])
    assert listed[-1].place == (2 if not folded and other.layout.tp == 1 else 3)


def test_what_is_folded_in_a_longer_list_explains_nothing_in_a_shorter_one() -> None:
    asked = load_model("llama-3.1-70b"), Job(8192, 512), load_cluster("8x8xh100-sxm")
    few, many = (plan(*asked, top=top).explanations for top in (2, 10))
    assert few
    assert set(few) <= set(many)
