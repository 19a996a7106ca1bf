"""What parts D and E of the lesson rest on: the law and its inverse, and what noise allows to be said."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from nanum.lesson import samples
from nanum.lesson.words import seconds_between
from nanum.prediction import karp_flatt
from nanum.scaling.laws import amdahl_limit, amdahl_speedup, gpus_at_half_efficiency

FRACTIONS = st.floats(0.001, 1.0)
SECONDS = st.floats(0.01, 100.0)


# The law and its inverse


@given(FRACTIONS, st.integers(2, 2048))
def test_karp_and_flatt_undo_amdahl(fraction: float, n: int) -> None:
    assert karp_flatt(amdahl_speedup(fraction, n), n) == pytest.approx(fraction)


@given(FRACTIONS)
def test_half_the_efficiency_is_at_one_and_the_limit(fraction: float) -> None:
    n, limit = gpus_at_half_efficiency(fraction), amdahl_limit(fraction)
    assert n is not None
    assert limit is not None
    assert 1 / (fraction + (1 - fraction) / n) == pytest.approx(n / 2)
    assert n == pytest.approx(1 + limit)


@pytest.mark.parametrize("fraction", [0.0, -0.2])
def test_where_nothing_is_serial_there_is_no_limit(fraction: float) -> None:
    assert amdahl_limit(fraction) is None
    assert gpus_at_half_efficiency(fraction) is None


# Noise


@pytest.mark.parametrize("rounds", range(1, 40))
def test_as_many_rounds_agree_as_chance_seldom_brings_about(rounds: int) -> None:
    """By scipy's own sign test."""
    need = samples.rounds_to_agree(rounds)
    chances = {k: binomtest(k, rounds).pvalue for k in range(rounds // 2 + 1, rounds + 1)}
    assert [k for k, chance in chances.items() if chance <= 0.05] == list(range(need, rounds + 1))


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=15))
def test_a_difference_is_never_told_both_ways(pairs: list[tuple[float, float]]) -> None:
    before, after = zip(*pairs, strict=True)
    forth, back = samples.compare(before, after), samples.compare(after, before)
    opposite = {"faster": "slower", "slower": "faster", "noise": "noise"}
    assert back["verdict"] == opposite[forth["verdict"]]
    assert (forth["verdict"] == "faster") <= (median(after) < median(before))
    assert forth["rounds_faster"] == back["rounds_slower"]


@given(st.lists(SECONDS, min_size=1, max_size=20), SECONDS)
def test_the_likely_range_holds_what_was_found_and_the_middle_of_the_rounds(
    by_round: list[float], found: float
) -> None:
    low, high = samples.likely(found, by_round)
    assert low <= found <= high
    assert low <= median(by_round) <= high
    assert min(*by_round, found) <= low
    assert high <= max(*by_round, found)


def test_drift_that_all_share_hides_no_difference() -> None:
    """A machine that slows down tenfold: each sample spreads over more than the difference, no round does."""
    drift = [1.3**i for i in range(9)]
    found = samples.compare(drift, [0.9 * each for each in drift])
    assert found["verdict"] == "faster"
    assert found["seconds_ratio"] == pytest.approx(0.9)
    assert samples.middle(drift)["spread"] > 0.5
    shuffled = [drift[(4 * i + 1) % 9] for i in range(9)]
    assert samples.compare(drift, shuffled)["verdict"] == "noise"


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.301, 0.352, "301 – 352 ms"), (0.9, 1.1, "900 ms – 1.10 s"), (0.3014, 0.3013, "301 ms")],
)
def test_a_range_of_seconds_names_a_unit_once(low: float, high: float, said: str) -> None:
    assert seconds_between(low, high) == said
