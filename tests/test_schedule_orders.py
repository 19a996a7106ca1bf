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

from nanum.layout import ONE_CHUNK, V_SHAPED, Schedule
from nanum.schedule import (
    WARMUP,
    Action,
    ahead,
    finish_times,
    in_flight,
    names,
    order,
    rank_of,
    stage_of,
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
    assert set(CLASSES) == set(Schedule.__args__)
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
    schedule = draw(st.sampled_from(sorted(CLASSES)))
    chunks = 1 if schedule in ONE_CHUNK else 2 if schedule in V_SHAPED else draw(st.integers(1, 5))
    pp = draw(st.integers(1, 6))
    sizes = st.integers(1, 17).filter(lambda m: why_not(schedule, pp, chunks, m) is None)
    return schedule, pp, chunks, draw(sizes)


@given(pipelines())
def test_everything_is_done_once_and_in_its_turn(pipeline: tuple[str, int, int, int]) -> None:
    schedule, pp, chunks, m = pipeline
    for actions in order(schedule, pp, m, chunks):
        place = {action: i for i, action in enumerate(actions)}
        assert len(place) == len(actions)
        for i, c in product(range(m), range(chunks)):
            assert (Action("B", i, c) in place) != (Action("I", i, c) in place)
            assert (Action("I", i, c) in place) == (Action("W", i, c) in place)
            back = place.get(Action("B", i, c), place.get(Action("I", i, c), -1))
            assert place[Action("F", i, c)] < back <= place.get(Action("W", i, c), back)
        assert len(actions) == sum(3 if Action("I", i, c) in place else 2 for i in range(m) for c in range(chunks))


@given(pipelines())
def test_a_stage_is_on_one_rank(pipeline: tuple[str, int, int, int]) -> None:
    schedule, pp, chunks, _ = pipeline
    held = {stage_of(schedule, pp, rank, c): rank for rank in range(pp) for c in range(chunks)}
    assert sorted(held) == list(range(pp * chunks))
    assert all(rank_of(schedule, pp, stage) == rank for stage, rank in held.items())


def simulated(schedule: str, pp: int, chunks: int, m: int, seconds: dict[str, np.ndarray], send: float) -> list[float]:
    """End of each rank, by playing whatever can be played until all is done."""
    left = [list(zip(actions, names(actions), strict=True)) for actions in order(schedule, pp, m, chunks)]
    done: dict[tuple[bool, int, int], float] = {}
    free = [0.0] * pp
    while any(left):
        played = False
        for rank, actions in enumerate(left):
            if not actions:
                continue
            action, name = actions[0]
            stage, forward = stage_of(schedule, pp, rank, action.chunk), action.kind == "F"
            source = stage - 1 if forward else stage + 1
            arrives = 0.0
            if action.kind != "W" and 0 <= source < pp * chunks:
                if (forward, source, action.micro_batch) not in done:
                    continue
                arrives = done[forward, source, action.micro_batch]
                arrives += send * (rank_of(schedule, pp, source) != rank)
            free[rank] = max(free[rank], arrives) + seconds[name][stage]
            if action.kind != "W":
                done[forward, stage, action.micro_batch] = free[rank]
            actions.pop(0)
            played = True
        assert played, "deadlock"
    return free


@given(pipelines(), st.integers(0, 2**32 - 1))
def test_finish_times_are_those_of_a_simulation(pipeline: tuple[str, int, int, int], seed: int) -> None:
    schedule, pp, chunks, m = pipeline
    random = np.random.default_rng(seed)
    done = sorted({name for actions in order(schedule, pp, m, chunks) for name in names(actions)})
    seconds = {name: random.random(pp * chunks) for name in done}
    send = float(random.random() * random.integers(0, 2))
    got = finish_times(schedule, m, {name: each[:, None] for name, each in seconds.items()}, send, chunks)
    assert got.stage_seconds[:, 0] == pytest.approx(simulated(schedule, pp, chunks, m, seconds, send))
    for rank, actions in enumerate(order(schedule, pp, m, chunks)):
        worked = [
            seconds[n][stage_of(schedule, pp, rank, a.chunk)] for a, n in zip(actions, names(actions), strict=True)
        ]
        assert got.busy_seconds[rank, 0] == pytest.approx(sum(worked))


# --- published counts -------------------------------------------------------------------------------------------------
looped = st.tuples(st.integers(1, 6), st.integers(2, 4), st.integers(1, 4))


@given(looped)
def test_interleaved_holds_what_megatron_says(sizes: tuple[int, int, int]) -> None:
    pp, v, laps = sizes
    m = pp * laps
    expected = [min(2 * (pp - i - 1) + (v - 1) * pp + 1, m * v) for i in range(pp)]
    assert list(in_flight("interleaved", pp, m, v)) == expected


@given(looped)
def test_breadth_first_holds_everything(sizes: tuple[int, int, int]) -> None:
    pp, v, m = sizes
    assert set(in_flight("looped-bfs", pp, m, v)) == {m * v}


@given(looped)
def test_zb_h1_holds_no_more_than_1f1b(sizes: tuple[int, int, int]) -> None:
    """The paper's rank i of p holds (p-i) whole micro-batches and i that wait for their weights' half: p, as 1F1B's
    first rank. (One chunk a rank.)"""
    pp, _, laps = sizes
    m = pp * laps
    assert list(in_flight("zb-h1", pp, m)) == [pp] * pp


@given(st.integers(1, 8), st.integers(2, 5))
def test_the_v_schedules_hold_the_same_on_every_rank(pp: int, laps: int) -> None:
    """ZB-V: the memory of p micro-batches, in halves. DualPipe on 2 p ranks: 2 p + 1 of its stages, now halves."""
    m = 2 * pp * laps
    assert in_flight("zbv", pp, m, 2) == (2 * pp,) * pp
    if pp > 1:
        assert in_flight("dualpipev", pp, m, 2) == (2 * pp + 1,) * pp


def bubbles(schedule: str, pp: int, chunks: int, m: int, **seconds: float) -> np.ndarray:
    stages = np.ones((pp * chunks, 1))
    got = finish_times(schedule, m, {name: each * stages for name, each in seconds.items()}, 0.0, chunks)
    return np.asarray(got.bubble_seconds[:, 0])


times = st.floats(0.1, 10)


@given(looped, times, times)
def test_breadth_first_idles_as_gpipe_does_on_a_chunk(sizes: tuple[int, int, int], f: float, b: float) -> None:
    pp, v, laps = sizes
    found = bubbles("looped-bfs", pp, v, pp * laps, forward=f, backward=b)
    assert found == pytest.approx((pp - 1) * (f + b), rel=1e-6, abs=1e-6)


@given(looped, times)
def test_zb_h1_idles_f_plus_b_minus_w(sizes: tuple[int, int, int], f: float) -> None:
    """(p - 1)(F + B_input - W), where W is no longer than the others, for chunks of a rank as for one."""
    pp, v, laps = sizes
    found = bubbles("zb-h1", pp, v, pp * (laps + 1), forward=f, input=f, weight=0.75 * f)
    assert found == pytest.approx((pp - 1) * 1.25 * f, rel=1e-6, abs=1e-6)


@given(st.integers(1, 6), st.integers(2, 4), times)
def test_zbv_idles_only_until_its_first_forward(pp: int, laps: int, f: float) -> None:
    """Zero bubble, where a forward and both halves of a backward take as long."""
    got = finish_times("zbv", 2 * pp * laps, dict.fromkeys(("forward", "input", "weight"), [[f]] * 2 * pp), 0.0, 2)
    assert got.stage_seconds[:, 0] - got.busy_seconds[:, 0] == pytest.approx(f * np.arange(pp), rel=1e-6, abs=1e-6)


@given(looped, times, times)
def test_interleaved_idles_the_vth_part(sizes: tuple[int, int, int], f: float, b: float) -> None:
    """(p - 1)(F + B) / v, where F and B are of all chunks of a rank."""
    pp, v, laps = sizes
    found = bubbles("interleaved", pp, v, pp * laps, forward=f, backward=b)
    assert found.max() == pytest.approx((pp - 1) * (f + b), rel=1e-6, abs=1e-6)
