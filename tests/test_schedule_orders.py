"""The orders of all schedules: beside the tables that PyTorch executes, and beside the published counts."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum.layout import ONE_CHUNK, TWO_WAY, V_SHAPED, Schedule
from nanum.schedule import (
    WARMUP,
    Action,
    ahead,
    finish_times,
    names,
    order,
    overlapped,
    rank_of,
    stage_of,
    stages_of,
    why_not,
)

CLASSES: dict[str, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zb-h1": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""PyTorch's names."""
OTHERS = ("zb-h2", "dualpipe")
"""Schedules that it does not have."""
GRID = [
    (schedule, pp, chunks, m)
    for schedule in CLASSES
    for chunks in ((1,) if schedule in ONE_CHUNK else (2, 3) if schedule in V_SHAPED else (1, 2, 4))
    for pp, m in [*product((1, 2, 3, 4), (1, 2, 3, 4, 6, 7, 9)), (4, 10), (5, 10), (8, 16)]
]
"""Sizes; some of them are refused."""


@pytest.fixture(scope="session")
def torchs() -> list[Any]:
    """PyTorch's tables of the grid."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    asked = json.dumps([(CLASSES[schedule], *sizes) for schedule, *sizes in GRID])
    script = Path(__file__).parent / "torch_tables.py"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], input=asked, capture_output=True, text=True, check=True
    )
    return list(json.loads(run.stdout))


def possible(schedule: str, pp: int, chunks: int, m: int) -> bool:
    """Does PyTorch's 1F1B want as many micro-batches as stages: other engines do not."""
    return why_not(schedule, pp, chunks, m) is None and not (schedule == "1f1b" and m < pp)


def staged(schedule: str, pp: int, chunks: int, m: int) -> list[list[list[Any]]]:
    """Our order in PyTorch's form: [kind, stage, micro-batch]."""
    ranks = order(schedule, pp, m, chunks)
    return [
        [[a.kind, stage_of(schedule, pp, rank, a.chunk), a.micro_batch] for a in actions]
        for rank, actions in enumerate(ranks)
    ]


def test_the_names_are_those_of_a_layout() -> None:
    assert {*CLASSES, *OTHERS} == set(Schedule.__args__)
    assert set(ONE_CHUNK) == set(WARMUP)


def test_orders_are_those_that_pytorch_executes(torchs: list[Any]) -> None:
    compared = 0
    for sizes, found in zip(GRID, torchs, strict=True):
        assert ("error" in found) != possible(*sizes), (sizes, found)
        if "error" in found:
            continue
        table = [[a for a in rank if a[0] in "FBIW"] for rank in found["compute"]]
        if sizes[0] == "1f1b":
            # PyTorch prints its last rank's forwards one too high (F1 … Fm); what it executes begins at F0.
            table[-1] = [["F", a[1], a[2] - 1] if a[0] == "F" else a for a in table[-1]]
        assert staged(*sizes) == table, sizes
        compared += 1
    assert compared > 300


def test_pytorch_overlaps_the_same_passes(torchs: list[Any]) -> None:
    """OVERLAP_F_B: a forward and the backward that follows it."""
    found = 0
    for (schedule, pp, chunks, m), theirs in zip(GRID, torchs, strict=True):
        if "error" not in theirs:
            for rank, actions in enumerate(order(schedule, pp, m, chunks)):
                assert sorted(overlapped(schedule, pp, rank, actions)) == theirs["pairs"][rank]
                found += len(theirs["pairs"][rank])
    assert found


def test_what_is_gathered_ahead_is_what_pytorch_gathers(torchs: list[Any]) -> None:
    """UNSHARD and RESHARD, between the passes: those of the first are pinned by recorded bytes too."""
    refetched = 0
    for (schedule, pp, chunks, m), found in zip(GRID, torchs, strict=True):
        if "error" in found or chunks == 1:
            continue
        for rank, actions in enumerate(order(schedule, pp, m, chunks)):
            mine = []
            for action, weights in zip(actions, ahead(actions), strict=True):
                mine += [["RESHARD", stage_of(schedule, pp, rank, c)] for c in weights.dropped]
                mine += [["UNSHARD", stage_of(schedule, pp, rank, c)] for c in weights.gathered]
                mine.append([action.kind, stage_of(schedule, pp, rank, action.chunk)])
            refetched += sum(kind == "UNSHARD" for kind, _ in mine) > chunks
            theirs = [a[:2] for a in found["all"][rank] if a[0] in ("F", "B", "I", "W", "UNSHARD", "RESHARD")]
            while theirs[-1][0] == "RESHARD":  # after the last pass
                theirs.pop()
            assert _drops_in_any_order(mine) == _drops_in_any_order(theirs), (schedule, pp, chunks, m, rank)
    assert refetched


def _drops_in_any_order(actions: list[list[Any]]) -> list[Any]:
    """PyTorch drops several chunks in the order of a set."""
    out: list[Any] = []
    for action in actions:
        if action[0] == "RESHARD" and out and out[-1][0] == "RESHARD":
            out[-1] = ["RESHARD", *sorted([*out[-1][1:], action[1]])]
        else:
            out.append(action)
    return out


def test_sends_are_those_between_ranks(torchs: list[Any]) -> None:
    for (schedule, pp, chunks, m), found in zip(GRID, torchs, strict=True):
        if "error" in found or schedule in ONE_CHUNK:
            continue
        for rank, actions in enumerate(order(schedule, pp, m, chunks)):
            mine = []
            for a in actions:
                stage = stage_of(schedule, pp, rank, a.chunk)
                peer = stage + (1 if a.kind == "F" else -1)
                if a.kind != "W" and 0 <= peer < pp * chunks and rank_of(schedule, pp, peer) != rank:
                    mine.append(["SEND_F" if a.kind == "F" else "SEND_B", stage, a.micro_batch])
            theirs = [a for a in found["all"][rank] if a[0] in ("SEND_F", "SEND_B")]
            assert mine == theirs, (schedule, pp, chunks, m, rank)


# --- properties of every order ----------------------------------------------------------------------------------------
@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int]:
    schedule = draw(st.sampled_from(sorted({*CLASSES, *OTHERS})))
    one, two = schedule in (*ONE_CHUNK, "zb-h2"), schedule in (*V_SHAPED, *TWO_WAY)
    chunks = 1 if one else 2 if two else draw(st.integers(1, 5))
    pp = draw(st.sampled_from((2, 4, 6)) if schedule in TWO_WAY else st.integers(1, 6))
    sizes = st.integers(1, 17).filter(lambda m: why_not(schedule, pp, chunks, m) is None)
    return schedule, pp, chunks, draw(sizes)


@given(pipelines())
def test_everything_is_done_once_and_in_its_turn(pipeline: tuple[str, int, int, int]) -> None:
    schedule, pp, chunks, m = pipeline
    each_way = m // 2
    for actions in order(schedule, pp, m, chunks):
        place = {action: i for i, action in enumerate(actions)}
        assert len(place) == len(actions)
        todo = list(product(range(m), range(chunks)))
        if schedule in TWO_WAY:  # half of the micro-batches through either model
            todo = [(i, c) for i, c in todo if i // each_way == c]
        for i, c in todo:
            assert (Action("B", i, c) in place) != (Action("I", i, c) in place)
            assert (Action("I", i, c) in place) == (Action("W", i, c) in place)
            back = place.get(Action("B", i, c), place.get(Action("I", i, c), -1))
            assert place[Action("F", i, c)] < back <= place.get(Action("W", i, c), back)
        assert len(actions) == sum(3 if Action("I", i, c) in place else 2 for i, c in todo)


@given(pipelines())
def test_a_stage_is_on_one_rank(pipeline: tuple[str, int, int, int]) -> None:
    schedule, pp, chunks, _ = pipeline
    held = {stage_of(schedule, pp, rank, c): rank for c in reversed(range(chunks)) for rank in range(pp)}
    assert sorted(held) == list(range(stages_of(schedule, pp, chunks)))
    assert all(rank_of(schedule, pp, stage) == rank for stage, rank in held.items())


def simulated(schedule: str, pp: int, chunks: int, m: int, seconds: dict[str, np.ndarray], send: float) -> list[float]:
    """End of each rank, by playing whatever can be played until all is done. Of passes that are one, the results are
    there when both are done, and DualPipe begins them together."""
    stages = stages_of(schedule, pp, chunks)
    left = [list(zip(actions, names(actions), strict=True)) for actions in order(schedule, pp, m, chunks)]
    pairs = [overlapped(schedule, pp, rank, [a for a, _ in actions]) for rank, actions in enumerate(left)]
    sizes = list(map(len, left))
    done: dict[tuple[bool, int, int], tuple[float, int]] = {}
    free = [0.0] * pp

    def arrives(rank: int, action: Action) -> float | None:
        stage, forward = stage_of(schedule, pp, rank, action.chunk), action.kind == "F"
        source = stage - 1 if forward else stage + 1
        if action.kind == "W" or not 0 <= source < stages:
            return 0.0
        if (forward, source, action.micro_batch) not in done:
            return None
        at, by = done[forward, source, action.micro_batch]
        return at + send * (by != rank)

    while any(left):
        played = False
        for rank, actions in enumerate(left):
            if not actions:
                continue
            together = actions[: 2 if sizes[rank] - len(actions) in pairs[rank] else 1]
            came = [arrives(rank, action) for action, _ in together]
            if None in came:
                continue
            if schedule in TWO_WAY:
                came[0] = max(came)  # type: ignore[type-var]
            for at, (action, name) in zip(came, together, strict=True):
                assert at is not None
                free[rank] = max(free[rank], at) + seconds[name][stage_of(schedule, pp, rank, action.chunk)]
            for action, _ in together:
                if action.kind != "W":
                    place = action.kind == "F", stage_of(schedule, pp, rank, action.chunk), action.micro_batch
                    done[place] = free[rank], rank
            del actions[: len(together)]
            played = True
        assert played, "deadlock"
    return free


@given(pipelines(), st.integers(0, 2**32 - 1))
def test_finish_times_are_those_of_a_simulation(pipeline: tuple[str, int, int, int], seed: int) -> None:
    schedule, pp, chunks, m = pipeline
    random = np.random.default_rng(seed)
    done = sorted({name for actions in order(schedule, pp, m, chunks) for name in names(actions)})
    seconds = {name: random.random(stages_of(schedule, pp, chunks)) for name in done}
    send = float(random.random() * random.integers(0, 2))
    got = finish_times(schedule, m, {name: each[:, None] for name, each in seconds.items()}, send, chunks)
    assert got.stage_seconds[:, 0] == pytest.approx(simulated(schedule, pp, chunks, m, seconds, send))
    for rank, actions in enumerate(order(schedule, pp, m, chunks)):
        worked = [
            seconds[n][stage_of(schedule, pp, rank, a.chunk)] for a, n in zip(actions, names(actions), strict=True)
        ]
        assert got.busy_seconds[rank, 0] == pytest.approx(sum(worked))
