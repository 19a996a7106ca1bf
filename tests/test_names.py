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
from nanum.search.candidates import SIZES, Group, candidates
from nanum.search.names import plainer
from nanum.search.rank import Question, exact_times, read

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
        for again, plain in plainer(group.layout, question.engine):
            known = np.array([name in possible for name in named(plain)])
            if not (again & known).any():
                continue
            left_out |= set(named(group.at(again & known).layout))
            told = [exactly(question, Group(layout).at(again & known)) for layout in (group.layout, plain)]
            assert np.array(told[0]) == pytest.approx(np.array(told[1]), rel=1e-12)
    assert len(left_out) >= several
    assert kept == possible - left_out


def exactly(question: Question, group: Group) -> list[tuple[float, ...]]:
    (ranked,), _ = read(question, [group])
    assert len(ranked.group) == len(group)
    return [
        (c.device_bytes, c.step_seconds, c.compute_seconds, c.exposed_communication_seconds, c.bubble_seconds)
        for c in exact_times(question, ranked, np.arange(len(ranked.group)))
    ]
