"""What noisy samples allow to be said: their middle half, and whether two ways that were run in turn differ."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median, quantiles
from typing import Any, Literal

CHANCE = 1 / 20
"""How often chance alone may be taken for a difference."""

Verdict = Literal["faster", "slower", "noise"]


def middle(seconds: Sequence[float]) -> dict[str, Any]:
    """The median and the quartiles of two samples or more; the spread is between these, over the median."""
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    found = median(seconds)
    return {"median_seconds": found, "quartile_seconds": [low, high], "spread": (high - low) / found}


def rounds_to_agree(rounds: int) -> int:
    """Of so many rounds, how many must agree on which of two is the larger, for chance to do it in `CHANCE` of cases at
    most (the sign test, two-sided). More than `rounds` where even all of them are too few.
    """
    tail = 0
    for opposed in range(rounds + 1):
        tail += comb(rounds, opposed)
        if 2 * tail > CHANCE * 2**rounds:
            return rounds - opposed + 1
    raise AssertionError("the whole of a distribution is more than a twentieth of it")


def compare(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """Seconds of two ways, round by round: is the second faster, slower, or is that not to be told?

    A round compares the two with each other while the machine is what it is then, so that its drift cancels. What most
    rounds say must also be what the medians say.
    """
    need = rounds_to_agree(len(before))
    faster = sum(b > a for b, a in zip(before, after, strict=True))
    slower = sum(b < a for b, a in zip(before, after, strict=True))
    ratio = median(after) / median(before)
    verdict: Verdict = "noise"
    if faster >= need and ratio < 1:
        verdict = "faster"
    elif slower >= need and ratio > 1:
        verdict = "slower"
    return {"seconds_ratio": ratio, "rounds_faster": faster, "rounds_slower": slower, "verdict": verdict}


def likely(found: float, by_round: Sequence[float]) -> list[float]:
    """From where to where the median of what the rounds say may lie, as sure as `rounds_to_agree`; `found`, which was
    worked out from medians, is inside.
    """
    ordered = sorted(by_round)
    outside = max(0, len(ordered) - rounds_to_agree(len(ordered)))
    return [min(found, ordered[outside]), max(found, ordered[-1 - outside])]
