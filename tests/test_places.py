"""Layers of several kinds: what a stage has of them, and what follows what, beside the plain list of the layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanum
from nanum import cluster
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Layer, Mlp, Model
from nanum.parallel.places import EMBEDDING, HEAD, Direction, Group, Place, Sequence, groups

ATTENTION = Attention(8, 4, 16)
MODEL = Model("small", 128, 256, 8, 64, ATTENTION, Mlp(352, True, "silu"), "rms_norm", "rotary", False)


def kind(i: int) -> Layer:
    return Layer(ATTENTION, Mlp(64 * (i + 1), True, "silu"))


@st.composite
def models(draw: st.DrawFn) -> Model:
    leading = tuple(kind(i) for i in draw(st.lists(st.integers(0, 2), max_size=3)))
    alternates = tuple(kind(i) for i in draw(st.lists(st.integers(0, 2), max_size=3)))
    return replace(MODEL, num_hidden_layers=draw(st.integers(1, 14)), leading=leading, alternates=alternates)


def listed(model: Model) -> list[int]:
    """The kind of each layer, by what the words of `Model` say."""
    layers = [*model.leading]
    while len(layers) < model.num_hidden_layers:
        layers += [*model.alternates, Layer(model.attention, model.mlp)]
    return [model.kinds.index(layer) for layer in layers[: model.num_hidden_layers]]


def visited(found: tuple[Group, ...], at: Any = ()) -> list[Place]:
    return [p for g in found for _ in range(int(np.asarray(g.count)[at])) for p in g.places]


@given(models())
def test_runs_are_the_layers_in_order(model: Model) -> None:
    assert [k for count, kinds in model.runs for k in kinds * count] == listed(model)


@settings(max_examples=200)
@given(models(), st.data())
def test_groups_are_a_stage_s_layers_and_what_follows_is_their_neighbour(model: Model, data: st.DataObject) -> None:
    layers = listed(model)
    begins = data.draw(st.integers(0, len(layers)))
    count = data.draw(st.integers(0, len(layers) - begins))
    embeds, heads = int(begins == 0), int(begins + count == len(layers))
    found = groups(model.runs, begins, count)
    places = visited(found)
    assert [p.part for p in places] == layers[begins : begins + count]
    sequence = Sequence(found, embeds, heads)
    in_order: list[Place] = [EMBEDDING, *places, HEAD]
    direction: Direction
    for direction, way in (("forward", in_order), ("backward", in_order[::-1])):
        for here, following in pairwise(way):
            said = {part: presence for part, presence in sequence.follows(here, direction) if presence}
            assert said == {following.part: 1}
        assert sequence.follows(way[-1], direction) == []
        first = {part: presence for part, presence in sequence.begins(direction) if presence}
        end = embeds if direction == "forward" else heads
        assert first == ({way[0].part: 1} if end else {way[1].part: 1})


@given(models(), st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), min_size=1, max_size=5))
def test_groups_of_many_stages_are_those_of_each(model: Model, stages: list[tuple[int, int]]) -> None:
    begins, counts = (np.array(column) for column in zip(*stages, strict=True))
    together = groups(model.runs, begins, counts)
    for i, (begin, count) in enumerate(stages):
        alone = groups(model.runs, begin, count)
        assert [int(g.count) for g in alone] == [int(np.broadcast_to(g.count, len(stages))[i]) for g in together]


SIZES = ({"dp_shard": 8}, {"dp_shard": 2, "pp": 4}, {"dp_shard": 2, "tp": 2, "pp": 2})


@pytest.mark.parametrize("engine", ["torchtitan", "megatron", "torch"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_alike_layers_said_to_alternate_are_one_kind_all_the_same(engine: str, sizes: dict[str, int]) -> None:
    """What is said of layers in turn must be what is said of as many equal ones."""
    structure = Structure(zero={"torchtitan": 3, "megatron": 1, "torch": 3}[engine])
    layout, job, machine = Layout(**sizes, structure=structure), Job(64, 32), cluster.load("1x8xh100-sxm")
    ordinary = Layer(MODEL.attention, MODEL.mlp)
    plain, *others = (
        nanum.predict(model, job, machine, layout, engine=engine).to_dict()
        for model in (MODEL, replace(MODEL, alternates=(ordinary,)), replace(MODEL, leading=(ordinary,) * 3))
    )
    for other in others:
        assert other["memory"] == plain["memory"]
        assert other["communication"] == [pytest.approx(row) for row in plain["communication"]]
        for name, seconds in plain["time"].items():
            assert other["time"][name] == pytest.approx(seconds, rel=1e-9)
