"""What one observed step says of a machine's coefficients: the most likely ones, given what is held of them before.

Before it, the natural logarithms of the coefficients have a normal distribution. The step's logarithm is off from what
they say by a residual of its own, of which small ones count by their square and large ones by their size (Huber 1964),
so that one odd step does not carry all away. The logarithm of a step is nearly linear in those of the coefficients: the
slopes are taken again where the last ones led.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

Steps = Callable[[np.ndarray], np.ndarray]
"""Seconds of a step by each of several sets of coefficients: [sets, coefficients] to [sets]."""

HUBER = 1.345
"""Standard deviations beyond which a residual counts by its size: 95 % as efficient as squares where residuals are
normal (Huber, Robust Statistics, 1981)."""
APART = np.log(1.05)  # how far a coefficient's logarithm is moved to see what it does
ROUNDS = 3
ENOUGH = 1e-4  # of a logarithm: a round that moves less is the last
ALONG = np.linspace(0.0, 1.25, 26)  # of the way to where slopes lead, how far it is best to go


@dataclass(frozen=True, eq=False)
class Belief:
    """What is held of coefficients: the mean and covariance of their natural logarithms, and between which they are."""

    mean: np.ndarray
    covariance: np.ndarray
    least: np.ndarray
    most: np.ndarray

    def deviation(self, slopes: np.ndarray, run: float) -> float:
        """The standard deviation of a step's logarithm, with its own residual."""
        return float(np.sqrt(slopes @ self.covariance @ slopes + run**2))


@dataclass(frozen=True, eq=False)
class Learned:
    """What is held after a step was observed."""

    belief: Belief
    before_seconds: float
    after_seconds: float
    deviations: float  # that the observed step was off, by what was held before: above 0 where it was slower
    slopes: np.ndarray  # of the step, by each coefficient, where it was before


def towards(held: Belief, slopes: np.ndarray, residual: float, run: float) -> tuple[np.ndarray, float]:
    """How far from `held.mean` the most likely logarithms are, were the step linear in them, and the variance that its
    residual counted as. `residual` is the observed step's logarithm less that of the step by `held.mean`.
    """
    least = most = run**2
    move = _bounded(held, slopes, residual, least)
    if counts_as(residual - slopes @ move, run) <= least:
        return move, least
    # What is left over its variance falls as that grows: where they agree is one place, and it is halved towards.
    most = counts_as(residual, run)
    while most > least * (1 + 1e-12):
        variance = float(np.sqrt(least * most))
        if not least < variance < most:
            break
        move = _bounded(held, slopes, residual, variance)
        if counts_as(residual - slopes @ move, run) > variance:
            least = variance
        else:
            most = variance
    return move, most


def counts_as(residual: float, run: float) -> float:
    """The variance by whose square a residual counts as it does here."""
    return run * max(run, abs(residual) / HUBER)


def _bounded(held: Belief, slopes: np.ndarray, residual: float, variance: float) -> np.ndarray:
    """The mean of a normal distribution after a normal observation. What would pass its bound is at it, and the others
    are as they are known from that.
    """
    most, least = held.most - held.mean, held.least - held.mean
    at = np.zeros_like(held.mean)  # of those at a bound, it
    free = np.ones(len(at), dtype=bool)
    while True:
        mean, covariance = _given(held.covariance, free, at)
        gain = covariance @ slopes[free]
        off = residual - slopes[~free] @ at[~free] - slopes[free] @ mean
        move = at.copy()
        move[free] = mean + gain * off / (slopes[free] @ gain + variance)
        beyond = free & ((move > most + 1e-12) | (move < least - 1e-12))
        if not beyond.any():
            return move
        at[beyond] = np.clip(move, least, most)[beyond]
        free &= ~beyond


def _given(covariance: np.ndarray, free: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of those that are free, given where the others are."""
    if free.all():
        return np.zeros(len(at)), covariance
    across = covariance[np.ix_(free, ~free)] @ np.linalg.pinv(covariance[np.ix_(~free, ~free)])
    return across @ at[~free], covariance[np.ix_(free, free)] - across @ covariance[np.ix_(~free, free)]


def learned_covariance(covariance: np.ndarray, slopes: np.ndarray, variance: float) -> np.ndarray:
    """The covariance after an observation."""
    gain = covariance @ slopes
    left = covariance - np.outer(gain, gain) / (slopes @ gain + variance)
    symmetric: np.ndarray = (left + left.T) / 2
    return symmetric


def looked(steps: Steps, at: np.ndarray, target: float) -> tuple[float, np.ndarray]:
    """The logarithm of a step by coefficients of these logarithms, and its slopes on the side of the `target`'s."""
    size = len(at)
    apart = APART * np.vstack([np.zeros(size), np.eye(size), -np.eye(size)])
    logs = np.log(steps(np.exp(at + apart)))
    up, down = (logs[1 : size + 1] - logs[0]) / APART, (logs[0] - logs[size + 1 :]) / APART
    return float(logs[0]), np.where((up + down > 0) == (target > logs[0]), up, down)


def in_turn(held: Belief, seen: Iterable[tuple[float, np.ndarray]], run: float) -> Iterator[Belief]:
    """What is held after each of several steps, were they linear: of each the residual and the slopes by `held`."""
    now = held
    for residual, slopes in seen:
        move, variance = towards(now, slopes, residual - slopes @ (now.mean - held.mean), run)
        now = replace(now, mean=now.mean + move, covariance=learned_covariance(now.covariance, slopes, variance))
        yield now


def observe(held: Belief, steps: Steps, seconds: float, run: float) -> Learned:
    """What is held after a step took `seconds`. `run` is the standard deviation of a step's own residual, of its
    logarithm.
    """
    size = len(held.mean)
    inverse = np.linalg.pinv(held.covariance, hermitian=True)
    target = np.log(seconds)

    def cost(moves: np.ndarray, logs: np.ndarray) -> np.ndarray:
        """Minus twice the logarithm of the likelihood of each."""
        off = np.abs(target - logs) / run
        robust = np.where(off <= HUBER, off**2, 2 * HUBER * off - HUBER**2)
        unlikely: np.ndarray = np.einsum("ij,jk,ik->i", moves, inverse, moves) + robust
        return unlikely

    move = np.zeros(size)
    begun, slopes = log, here = looked(steps, held.mean + move, target)
    for _ in range(ROUNDS):
        to, _ = towards(held, here, target - log + here @ move, run)
        tried = np.clip(held.mean + move + np.outer(ALONG, to - move), held.least, held.most) - held.mean
        best = tried[int(np.argmin(cost(tried, np.log(steps(np.exp(held.mean + tried))))))]
        far = float(np.abs(best - move).max())
        move = best
        log, here = looked(steps, held.mean + move, target)
        if far < ENOUGH:
            break
    variance = counts_as(target - log, run)
    after = Belief(held.mean + move, learned_covariance(held.covariance, here, variance), held.least, held.most)
    deviations = (target - begun) / held.deviation(slopes, run)
    return Learned(after, float(np.exp(begun)), float(np.exp(log)), float(deviations), slopes)
