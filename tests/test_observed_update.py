"""What one observed step says of a machine's coefficients, as a matter of numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from nanum.calibration.update import HUBER, Belief, Steps, observe, towards

RUN = 0.04
SIZE = 4
slopes_of = st.lists(st.floats(-1, 1), min_size=SIZE, max_size=SIZE).map(np.array)
spreads = st.lists(st.floats(0.02, 0.3), min_size=SIZE, max_size=SIZE).map(np.array)
ratios = st.floats(0.3, 3).map(np.log)


def held_of(spread: np.ndarray, most: float = 5.0) -> Belief:
    return Belief(np.zeros(SIZE), np.diag(spread**2), np.full(SIZE, -5.0), np.full(SIZE, most))


def steps_of(slopes: np.ndarray) -> Steps:
    """A second by coefficients of 1, and linear in the logarithms."""
    return lambda tried: np.exp(np.log(tried) @ slopes)


@settings(max_examples=30)
@given(slopes_of, spreads)
def test_what_was_predicted_moves_nothing(slopes: np.ndarray, spread: np.ndarray) -> None:
    found = observe(held_of(spread), steps_of(slopes), 1.0, RUN)
    assert np.abs(found.belief.mean).max() < 1e-12
    assert found.before_seconds == pytest.approx(found.after_seconds, rel=1e-12)
    assert found.deviations == 0


@settings(max_examples=30)
@given(slopes_of, spreads, ratios)
def test_the_new_prediction_lies_between(slopes: np.ndarray, spread: np.ndarray, ratio: float) -> None:
    found = observe(held_of(spread), steps_of(slopes), float(np.exp(ratio)), RUN)
    low, high = sorted([0.0, ratio])
    assert low - 1e-9 <= np.log(found.after_seconds) <= high + 1e-9
    assert np.sign(found.deviations) == np.sign(ratio)


@settings(max_examples=30)
@given(slopes_of, spreads, ratios)
def test_what_has_no_part_in_a_step_does_not_move(slopes: np.ndarray, spread: np.ndarray, ratio: float) -> None:
    slopes[1] = 0.0
    found = observe(held_of(spread), steps_of(slopes), float(np.exp(ratio)), RUN)
    assert found.belief.mean[1] == 0
    assert found.belief.covariance[1, 1] == pytest.approx(spread[1] ** 2, rel=1e-9)


@settings(max_examples=30)
@given(slopes_of, spreads, ratios)
def test_who_observes_is_no_less_sure(slopes: np.ndarray, spread: np.ndarray, ratio: float) -> None:
    found = observe(held_of(spread), steps_of(slopes), float(np.exp(ratio)), RUN)
    less = np.diag(spread**2) - found.belief.covariance
    assert np.linalg.eigvalsh(less).min() >= -1e-12
    assert np.linalg.eigvalsh(found.belief.covariance).min() > 0


@settings(max_examples=30)
@given(slopes_of, spreads, ratios)
def test_a_second_observation_moves_on(slopes: np.ndarray, spread: np.ndarray, ratio: float) -> None:
    seconds, steps = float(np.exp(ratio)), steps_of(slopes)
    once = observe(held_of(spread), steps, seconds, RUN)
    twice = observe(once.belief, steps, seconds, RUN)
    off_once, off_twice = (abs(np.log(each.after_seconds) - ratio) for each in (once, twice))
    assert off_twice <= off_once + 1e-9


@settings(max_examples=30)
@given(slopes_of, spreads, st.floats(0.01, 1.0), st.floats(1.01, 3.0))
def test_who_is_farther_off_moves_no_less(slopes: np.ndarray, spread: np.ndarray, ratio: float, farther: float) -> None:
    held = held_of(spread)
    near, far = (towards(held, slopes, r, RUN)[0] @ slopes for r in (ratio, ratio * farther))
    assert far >= near - 1e-9


def test_one_far_off_says_little_more_than_one_that_is_not() -> None:
    """A residual counts by its size and not by its square: ten times as far does not move ten times as much."""
    held, slopes = held_of(np.full(SIZE, 0.02)), np.ones(SIZE)
    near, far = (towards(held, slopes, r, RUN)[0] @ slopes for r in (0.2, 2.0))
    assert near < far * 1.01 < near * 1.5


@settings(max_examples=30)
@given(spreads, ratios)
def test_bounds_hold_and_others_go_on(spread: np.ndarray, ratio: float) -> None:
    most = np.array([0.01, 5, 5, 5])
    held = Belief(np.zeros(SIZE), np.diag(spread**2), -most, most)
    slopes = np.array([-1.0, -0.5, 0.0, 0.2])
    found = observe(held, steps_of(slopes), float(np.exp(ratio)), RUN).belief.mean
    free = observe(held_of(spread), steps_of(slopes), float(np.exp(ratio)), RUN).belief.mean
    assert abs(found[0]) <= 0.01 + 1e-12
    assert abs(found[1]) >= abs(free[1]) - 1e-6


@pytest.mark.parametrize("ratio", [0.02, -0.1, 0.6])
@pytest.mark.parametrize("correlated", [False, True])
def test_it_is_the_most_likely(ratio: float, correlated: bool) -> None:
    """As an optimizer that knows nothing of the shape finds it."""
    mixed = np.random.default_rng(0).normal(size=(SIZE, SIZE)) * 0.05
    covariance = np.diag([0.01, 0.004, 0.02, 0.003]) + (mixed @ mixed.T if correlated else 0)
    most = np.array([0.02, 5, 5, 5])
    held, slopes = Belief(np.zeros(SIZE), covariance, -most, most), np.array([0.7, -0.4, 0.2, 0.1])
    inverse = np.linalg.inv(covariance)

    def unlikely(move: np.ndarray) -> float:
        off = abs(ratio - slopes @ move) / RUN
        robust = off**2 if off <= HUBER else 2 * HUBER * off - HUBER**2
        return float(move @ inverse @ move + robust)

    found, _ = towards(held, slopes, ratio, RUN)
    best = minimize(unlikely, np.zeros(SIZE), bounds=list(zip(-most, most, strict=True)), method="L-BFGS-B")
    assert unlikely(found) <= best.fun * (1 + 1e-4) + 1e-6


def test_slopes_are_taken_again_where_they_change() -> None:
    """Of a step that is the longer of two things: beyond where they meet, the other one counts."""
    held = Belief(np.zeros(2), np.diag([0.04, 0.04]), np.full(2, -5.0), np.full(2, 5.0))

    def steps(tried: np.ndarray) -> np.ndarray:
        return np.maximum(1 / tried[:, 0], 0.9 / tried[:, 1])

    found = observe(held, steps, 1.3, 0.02)
    assert found.after_seconds == pytest.approx(1.3, rel=0.03)
    assert found.belief.mean[0] < -0.1 or found.belief.mean[1] < -0.1
