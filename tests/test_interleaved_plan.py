"""Pipelines of several stages a rank in a plan: tried one by one, beside those of one that are read at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanum import cluster, engines
from nanum import model as models
from nanum.job import Job
from nanum.prediction import Prediction, consistent, reasons
from nanum.search import Plan, plan
from nanum.search.candidates import candidates
from nanum.search.rank import Question, one_of, read
from nanum.search.shortlist import NEAR

LLAMA = models.load("llama-3.1-70b")
MACHINE = cluster.load("8x8xh100-sxm")
JOB = Job(8192, 128)


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(LLAMA, JOB, MACHINE, "megatron", top=10, fold=False)


def test_a_smaller_bubble_wins(found: Plan) -> None:
    """The fastest of a pipeline, which is faster than the fastest of one stage a rank."""
    first = found.candidates[0][1]
    alone = next(c for _, c in found.candidates if c.layout.structure.virtual_stages == 1)
    assert first.layout.structure.schedule == "interleaved"
    assert first.step_seconds < alone.step_seconds
    assert first.bubble_seconds < alone.bubble_seconds


def test_what_is_said_of_several_stages_is_predicted(found: Plan) -> None:
    several = [(e, c) for e, c in found.candidates if c.layout.structure.virtual_stages > 1]
    assert 0 < len(several) <= found.several
    for engine, c in several:
        p = Prediction(LLAMA, JOB, MACHINE, consistent(c.layout), engine)
        assert (p.fits, p.worst.device_bytes, p.time.step_seconds) == (True, c.device_bytes, c.step_seconds)


def test_what_is_said_of_experts_in_buckets_is_predicted() -> None:
    """Of layouts that differ in experts alone, buckets close elsewhere."""
    model, machine, job = models.load("gpt-oss-20b"), cluster.load("1x64xgb200"), Job(4096, 256)
    ranked = plan(model, job, machine, "megatron", top=10, fold=False).candidates
    assert len({c.layout.ep for _, c in ranked}) > 1
    for engine, c in ranked:
        p = Prediction(model, job, machine, consistent(c.layout), engine)
        assert (p.worst.device_bytes, p.time.step_seconds) == (c.device_bytes, c.step_seconds)


def test_layers_that_do_not_divide_are_cut_by_what_the_ends_weigh() -> None:
    """62 layers, an embedding and a head are 64; as Llama 3.1 405B's 126 are 128 (arXiv 2407.21783, section 3.3.2)."""
    first = plan(replace(LLAMA, num_hidden_layers=62), JOB, MACHINE, "megatron", top=1).candidates[0][1].layout
    s = first.structure
    assert (s.schedule, s.embedding_weight, s.head_weight) == ("interleaved", 1, 1)
    assert 64 % (first.pp * s.virtual_stages) == 0


def test_an_engine_without_it_has_none() -> None:
    none = plan(models.load("gpt3-2.7b"), Job(2048, 64), cluster.load("1x8xa100-sxm-40gb"), "deepspeed")
    assert none.several == 0
    assert {c.layout.structure.virtual_stages for _, c in none.candidates} == {1}


@pytest.mark.parametrize(
    ("name", "machine", "job"),
    [("llama-3.1-70b", "8x8xh100-sxm", JOB), ("megatron-39.1b", "4x8xa100-sxm-80gb", Job(2048, 64))],
)
def test_none_that_could_be_tried_is_faster_by_more_than_a_near_tie(name: str, machine: str, job: Job) -> None:
    """Of all pipelines that fit with one stage a rank, with more stages than are tried of each."""
    model, ours, its = models.load(name), cluster.load(machine), engines.load("megatron")
    first = plan(model, job, ours, "megatron", top=1, fold=False).candidates[0][1].step_seconds
    ranked, _ = read(Question(model, job, ours, its), candidates(model, job, ours, its).groups)
    tried = 0
    for r in ranked:
        s = r.group.layout.structure
        for i in range(len(r.group)) if s.pipelined and s.schedule == "1f1b" else ():
            layout = one_of(r.group.layout, i, model)
            m = job.num_microbatches(layout.micro_batch_size, layout.data_ranks)
            if r.bound_seconds[i] * m / (m + layout.pp - 1) > first:  # without any bubble
                continue
            for v in (2, 3, 4, 5, 6, 8, 10, 20):
                several = consistent(replace(layout, structure=replace(s, schedule="interleaved", virtual_stages=v)))
                if not reasons(model, job, ours, several, its):
                    p = Prediction(model, job, ours, several, its)
                    tried += 1
                    assert not p.fits or p.time.step_seconds > first / (1 + NEAR)
    assert tried > 5
