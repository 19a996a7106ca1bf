"""The field's counts of micro-batches in flight and of bubbles, none of which is in the package: read off a program of
holds, and off the exact recurrence.

p ranks, i of them, m micro-batches, v chunks of a rank. F, B and W are of a chunk: forward, the input's half of
backward (all of it, where it is not split) and the weights' half. M_B is what a forward keeps, M_W the part of it that
stays until W.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum.account.memory import peak
from nanum.program import Held, Node, Repeat
from nanum.schedule import finish_times, in_flight, order, stages_of

EXACT = {"rel": 1e-9, "abs": 1e-9}
KEPT, LEFT = 1000, 370
"""M_B and M_W, in bytes."""


def held(schedule: str, p: int, m: int, v: int = 1) -> list[int]:
    """The most that each rank holds."""

    def node(kind: str) -> Node:
        size = {"F": KEPT, "B": -KEPT, "I": LEFT - KEPT, "W": -LEFT}[kind]
        return Repeat(1, (Held("activations", size),))

    return [int(peak([node(action.kind) for action in actions]).peak) for actions in order(schedule, p, m, v)]


def played(schedule: str, p: int, m: int, v: int = 1, **seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """By rank: how long it is idle until the last of all ends, and between its own first and last pass."""
    stages = np.ones((stages_of(schedule, p, v), 1))
    got = finish_times(schedule, m, {name: each * stages for name, each in seconds.items()}, 0.0, v)
    begin = np.arange(p) * seconds["forward"]  # the first micro-batch comes from rank to rank
    return got.bubble_seconds[:, 0], got.stage_seconds[:, 0] - got.busy_seconds[:, 0] - begin


ranks = st.integers(1, 8)
laps = st.integers(1, 4)
chunks = st.integers(2, 4)
times = st.floats(0.1, 10)
share = st.floats(0.05, 1)


# --- backward whole ---------------------------------------------------------------------------------------------------
@given(ranks, st.integers(1, 20))
def test_gpipe_and_1f1b_in_flight(p: int, m: int) -> None:
    """m; and min(p - i, m)."""
    assert held("gpipe", p, m) == [m * KEPT] * p
    assert held("1f1b", p, m) == [min(p - i, m) * KEPT for i in range(p)]


@given(ranks, st.integers(1, 20), times, times)
def test_gpipe_and_1f1b_idle(p: int, m: int, f: float, b: float) -> None:
    """(p - 1)(F + B)."""
    for schedule in ("gpipe", "1f1b"):
        idle, _ = played(schedule, p, m, forward=f, backward=b)
        assert idle == pytest.approx((p - 1) * (f + b), **EXACT)


@given(ranks, chunks, laps)
def test_interleaved_in_flight(p: int, v: int, laps: int) -> None:
    """min(2(p - i - 1) + (v - 1)G + 1, mv) chunks, G = p; on the first rank p + (p - 1)/v of a rank's stage."""
    m = p * laps
    expected = [min(2 * (p - i - 1) + (v - 1) * p + 1, m * v) for i in range(p)]
    assert held("interleaved", p, m, v) == [count * KEPT for count in expected]
    if laps > 1:
        assert expected[0] / v == pytest.approx(p + (p - 1) / v)


@given(ranks, chunks, laps, times, times)
def test_interleaved_idles_the_vth_part(p: int, v: int, laps: int, f: float, b: float) -> None:
    """(p - 1)(F + B), of a chunk: the v-th part of 1F1B's."""
    idle, _ = played("interleaved", p, p * laps, v, forward=f, backward=b)
    assert idle.max() == pytest.approx((p - 1) * (f + b), **EXACT)


@given(ranks, chunks, laps, times, times)
def test_breadth_first(p: int, v: int, laps: int, f: float, b: float) -> None:
    """Everything in flight, and GPipe's bubble of a chunk."""
    m = p * laps
    assert held("looped-bfs", p, m, v) == [m * v * KEPT] * p
    idle, _ = played("looped-bfs", p, m, v, forward=f, backward=b)
    assert idle == pytest.approx((p - 1) * (f + b), **EXACT)


# --- backward in halves (arXiv 2401.10241) ----------------------------------------------------------------------------
@given(ranks, st.integers(2, 4))
def test_zero_bubble_in_flight(p: int, laps: int) -> None:
    """ZB-H1 (p - i)M_B + iM_W, never more than 1F1B's first rank; ZB-H2 (2p - 2i - 1)M_B + 2iM_W (section 2.3)."""
    m = p * laps
    assert held("zb-h1", p, m) == [(p - i) * KEPT + i * LEFT for i in range(p)]
    assert in_flight("zb-h1", p, m) == (p,) * p
    assert held("zb-h2", p, m) == [(2 * p - 2 * i - 1) * KEPT + 2 * i * LEFT for i in range(p)]


@given(ranks, st.integers(2, 4), st.integers(1, 4), times, share, share)
def test_zb_h1_idles(p: int, laps: int, v: int, f: float, w: float, b: float) -> None:
    """(p - 1)(F + B - W), of a chunk, where W is no longer than F and B."""
    b, w = f * (1 + b), f * w
    idle, _ = played("zb-h1", p, p * laps, v, forward=f, input=b, weight=w)
    assert idle == pytest.approx((p - 1) * (f + b - w), **EXACT)


@given(ranks, st.integers(2, 4), times, share, share)
def test_zb_h2_idles_between_its_first_and_last_pass(p: int, laps: int, f: float, w: float, b: float) -> None:
    """(p - 1)(F + B - 2W), which is the paper's measure: from a rank's own first pass to its own last. Ranks begin one
    after another, and end so where all is as long; a step ends with the last of them, (p - 1)F at the least.
    """
    b, w = f * (1 + b), f * w
    idle, own = played("zb-h2", p, p * laps, forward=f, input=b, weight=w)
    assert own.max() == pytest.approx((p - 1) * (f + b - 2 * w), **EXACT)
    assert idle.max() == pytest.approx((p - 1) * max(f, f + b - 2 * w), **EXACT)


@given(ranks, st.integers(2, 5), times)
def test_zb_v(p: int, laps: int, f: float) -> None:
    """The activations of p micro-batches on every rank (2p chunks, each half as large) and no bubble, where F, B and W
    are as long (section 6).
    """
    m = 2 * p * laps
    assert in_flight("zbv", p, m, 2) == (2 * p,) * p
    _, own = played("zbv", p, m, 2, forward=f, input=f, weight=f)
    assert own == pytest.approx(0, **EXACT)


# --- DualPipe (arXiv 2412.19437, table 2) -----------------------------------------------------------------------------
@given(st.sampled_from((2, 4, 6, 8, 16)), st.integers(1, 3))
def test_dualpipe_in_flight(p: int, laps: int) -> None:
    """p + 1 on every rank. Its V is of p chunks on p/2 ranks, twice as many parameters on each."""
    m = 2 * p * laps
    assert in_flight("dualpipe", p, m, 2) == (p + 1,) * p
    assert stages_of("dualpipe", p, 2) == stages_of("dualpipev", p // 2, 2) == p
    if p > 2:
        assert in_flight("dualpipev", p // 2, m, 2) == (p + 1,) * (p // 2)


@given(st.sampled_from((2, 4, 8, 16)), st.integers(1, 3), times, share)
def test_dualpipe_idles(p: int, laps: int, f: float, w: float) -> None:
    """(p/2 - 1)(F&B + B - 3W), where the table's B is a whole backward, and F&B a forward and a backward that are one,
    here as long as both. So it is where F and the input's half are as long; its V on half the ranks idles as long.
    """
    m, w = 2 * p * laps, f * w
    expected = (p / 2 - 1) * ((f + f + w) + (f + w) - 3 * w)
    seconds = {"forward": f, "input": f, "weight": w, "backward": f + w}
    for schedule, of in (("dualpipe", p), ("dualpipev", p // 2)):
        idle, _ = played(schedule, of, m, 2, **seconds)
        assert idle == pytest.approx(expected, **EXACT)


@given(st.sampled_from((4, 8, 16)), st.integers(1, 3), times, share, share)
def test_dualpipe_idles_less_where_backward_is_longer(p: int, laps: int, f: float, w: float, more: float) -> None:
    """Its code leaves the middle ranks' first pair apart "to further reduce bubble size". Backwards that are longer
    than forwards would hold up each rank before the middle by what they are longer; so they do only beyond one forward.
    """
    b, w = f * (1 + more), f * w
    formula = (p / 2 - 1) * ((f + b + w) + (b + w) - 3 * w)
    idle, _ = played("dualpipe", p, 2 * p * laps, 2, forward=f, input=b, weight=w, backward=b + w)
    assert idle == pytest.approx(formula - min((p / 2 - 1) * (b - f), f), **EXACT)
