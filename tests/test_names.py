"""A plan tries each program once, by its plainest name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nanum import engines
from nanum.cluster import load as load_cluster
from nanum.job import Job
from nanum.layout import Layout
from nanum.model import load as load_model
from nanum.prediction import predict
from nanum.search.candidates import SIZES, Group, candidates
from nanum.search.names import plainer
from nanum.search.rank import Question, exact_times, one_of, read

NODE = load_cluster("1x4xb200")
ROOMY = replace(NODE.chip, memory_bytes=replace(NODE.chip.memory_bytes, value=1e15))


def asked(model: str, engine: str, sequences: int) -> Question:
    small = replace(load_model(model), num_hidden_layers=4)
    return Question(small, Job(256, sequences), replace(NODE, chip=ROOMY), engines.load(engine))


def groups(question: Question) -> list[Group]:
    return candidates(question.model, question.job, NODE, question.engine).groups


def named(layout: Layout) -> Iterator[Any]:
    for i in range(len(layout.tp)):
        yield (layout.structure, *(int(getattr(layout, size)[i]) for size in SIZES))


@pytest.mark.parametrize(
    ("model", "engine", "sequences", "several"),
    [
        ("llama-3.2-1b", "megatron", 16, 100),
        ("mixtral-8x7b", "megatron", 16, 200),
        ("llama-3.2-1b", "nanotron", 8, 20),
        ("llama-3.2-1b", "torch", 8, 10),
        ("llama-3.2-1b", "deepspeed", 8, 0),
    ],
)
def test_what_is_left_out_is_what_stays_by_a_plainer_name(
    model: str, engine: str, sequences: int, several: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was ever told of either is the same: bytes of the fullest device, and each part of the step."""
    question = asked(model, engine, sequences)
    kept = {name for group in groups(question) for name in named(group.layout)}
    monkeypatch.setattr(sys.modules[candidates.__module__], "plainer", lambda *_: ())
    every = groups(question)
    possible = {name for group in every for name in named(group.layout)}
    left_out = set[Any]()
    for group in every:
        for again, plain in plainer(group.layout, question.engine, question.job):
            known = np.array([name in possible for name in named(plain)])
            if not (again & known).any():
                continue
            left_out |= set(named(group.at(again & known).layout))
            s = group.layout.structure  # of which some are no part of a name, and each takes its time
            if (s.recompute, s.schedule) != ("none", "1f1b"):
                continue
            told = [exactly(question, Group(layout).at(again & known)) for layout in (group.layout, plain)]
            assert np.array(told[0]) == pytest.approx(np.array(told[1]), rel=1e-12)
    assert len(left_out) >= several
    assert kept == possible - left_out


@pytest.mark.parametrize("engine", ["nanotron", "megatron"])
def test_one_micro_batch_has_one_order(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one micro-batch 1F1B stays, where it is possible, and all that is told of it would be told of GPipe's."""
    question = asked("llama-3.2-1b", engine, 2)
    kept = ones(question)
    monkeypatch.setattr(sys.modules[candidates.__module__], "plainer", lambda *_: ())
    twins = {name for name in ones(question)["gpipe"] if name in ones(question)["1f1b"]}
    assert twins
    assert not kept["gpipe"] & twins
    group = next(g for g in groups(question) if g.layout.structure.schedule == "gpipe" and single(question, g).any())
    one = group.at(single(question, group))
    told = []
    for schedule in ("1f1b", "gpipe"):
        layout = one_of(
            replace(one.layout, structure=replace(one.layout.structure, schedule=schedule)), 0, question.model
        )
        said = predict(question.model, question.job, question.cluster, layout, engine)
        told.append((said.worst.device_bytes, said.time, said.communication))
    assert told[0] == told[1]


def test_gpipe_stays_where_1f1b_is_refused() -> None:
    """nanotron's 1F1B wants pp - 1 micro-batches."""
    kept = ones(asked("llama-3.2-1b", "nanotron", 1))
    assert any(name[SIZES.index("pp") + 1] == 4 for name in kept["gpipe"])
    assert not any(name[SIZES.index("pp") + 1] == 4 for name in kept["1f1b"])


def ones(question: Question) -> dict[str, set[Any]]:
    """Of each schedule the layouts of one micro-batch that a pipeline has, by names without it."""
    found: dict[str, set[Any]] = {"1f1b": set(), "gpipe": set()}
    for group in groups(question):
        if group.layout.structure.pipelined and (here := single(question, group)).any():
            plain = replace(group.at(here).layout, structure=replace(group.layout.structure, schedule="1f1b"))
            found[group.layout.structure.schedule] |= set(named(plain))
    return found


def single(question: Question, group: Group) -> np.ndarray:
    found: np.ndarray = question.job.num_microbatches(group.layout.micro_batch_size, group.layout.data_ranks) == 1
    return found


def exactly(question: Question, group: Group) -> list[tuple[float, ...]]:
    (ranked,), _ = read(question, [group])
    assert len(ranked.group) == len(group)
    return [
        (c.device_bytes, c.step_seconds, c.compute_seconds, c.exposed_communication_seconds, c.bubble_seconds)
        for c in exact_times(question, ranked, np.arange(len(ranked.group)))
    ]
