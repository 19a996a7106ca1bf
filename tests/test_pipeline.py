"""The order of a stage's actions, counted in closed form, against the order itself, walked."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from nanum import engines
from nanum.account.traffic import traffic
from nanum.build import build
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Mlp, Model
from nanum.parallel import pipeline
from nanum.parallel.pipeline import Position
from nanum.schedule import WARMUP, names, order

STAGES = range(2, 8)
MICRO_BATCHES = range(1, 14)


def unrolled(position: Position, structure: Structure) -> list[str]:
    return [name for rounds, turn in pipeline.order(position, structure) for _ in range(int(rounds)) for name in turn]


@pytest.mark.parametrize("schedule", WARMUP)
@pytest.mark.parametrize("pp", STAGES)
def test_a_stage_does_what_its_schedule_orders(schedule: Any, pp: int) -> None:
    structure = Structure(pipelined=True, schedule=schedule)
    for m in MICRO_BATCHES:
        for stage, actions in enumerate(order(schedule, pp, m)):
            assert unrolled(Position(stage, pp, m), structure) == names(actions), (stage, m)


@pytest.mark.parametrize("schedule", WARMUP)
def test_many_stages_at_once_do_what_each_does(schedule: Any) -> None:
    structure = Structure(pipelined=True, schedule=schedule)
    cases = [(stage, pp, m) for pp in STAGES for stage in range(pp) for m in MICRO_BATCHES]
    counted: dict[str, Any] = Counter()
    for rounds, turn in pipeline.order(Position(*map(np.array, zip(*cases, strict=True))), structure):
        for name in turn:
            counted[name] = counted[name] + rounds
    for i, (stage, pp, m) in enumerate(cases):
        each = {name: int(np.broadcast_to(rounds, len(cases))[i]) for name, rounds in counted.items()}
        assert +Counter(each) == Counter(names(order(schedule, pp, m)[stage])), (stage, pp, m)


@pytest.mark.parametrize("schedule", WARMUP)
def test_without_a_pipeline_each_forward_is_followed_by_its_backward(schedule: Any) -> None:
    """Whatever schedule is named: as one stage of 1F1B, which has no warm-up."""
    structure = Structure(pipelined=False, schedule=schedule)
    for m in MICRO_BATCHES:
        (alone,) = order("1f1b", 1, m)
        assert [action.kind for action in alone] == ["F", "B"] * m
        assert unrolled(Position(0, 1, m), structure) == names(alone)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(("engine", "gathers"), [("megatron", 2), ("torchtitan", 1)])
def test_weights_that_backward_frees_are_gathered_for_the_next_forward(
    engine: str, gathers: int, reshard: bool
) -> None:
    """Megatron-FSDP reshards after a backward too: each pass gathers. FSDP2 under a pipeline does not, which leaves
    m + 1 gathers of a unit (as recorded runs of PyTorch have it).
    """
    m, pp, stage = 8, 4, 2
    model = Model("small", 128, 256, 8, 64, Attention(8, 4, 16), Mlp(352, True, "silu"), "rms_norm", "rotary", False)
    structure = Structure(zero=3, reshard=reshard, pipelined=True)
    at = Layout(dp_shard=2, pp=pp, structure=structure)
    found = traffic(build(model, Job(64, 2 * m), at, engines.load(engine), stage).program)
    calls = sum(int(total.calls) for key, total in found.items() if key.kind == "all_gather")
    layers = 2  # of the stage, each a unit; it has no ends
    if not reshard:
        assert calls == layers
    elif gathers == 2:
        assert calls == 2 * m * layers
    else:
        assert calls == layers * (m + 1)
