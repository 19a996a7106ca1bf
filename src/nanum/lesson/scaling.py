"""Part B: what dividing buys. A job really cut to its share and timed, and Amdahl's law over the measured shares."""

from __future__ import annotations

from itertools import product
from typing import Any

from nanum.lesson.arithmetic import DIVISIONS, SERIAL_FRACTIONS
from nanum.lesson.measured import bench, device_name
from nanum.lesson.samples import middle
from nanum.processes import Progress
from nanum.scaling.laws import amdahl_limit, amdahl_speedup

NOISE_LIMIT = 0.10
"""Where the middle half of one share's samples spreads over more than this part of their median, differences as small
as those between the measured and the ideal table are no longer told apart; the lesson says so."""

DOUBLING_SERIAL_FRACTION, DOUBLING_FROM, DOUBLING_TO = 0.05, 16, 32
LESSON_DOUBLING = 12.14 / 8.79  # as the shorter lesson that this one grew from measured it on its own device


def part_b(progress: Progress, *, device: str = "auto", quick: bool = False) -> dict[str, Any]:
    """The document of part B. Raises as `measured.bench` does."""
    arguments = ["amdahl", "--device", device, *(["--quick"] if quick else [])]
    return from_samples(bench(arguments, progress))


def from_samples(measured: dict[str, Any]) -> dict[str, Any]:
    """The document of part B from what `nanum.live.bench amdahl` measured."""
    shares = [_share(share) for share in measured["shares"]]
    base_seconds = shares[0]["median_seconds"]
    for share in shares:
        share["efficiency"] = base_seconds / (share["n"] * share["median_seconds"])
    efficiency = {share["n"]: share["efficiency"] for share in shares}
    worst = max(shares, key=lambda share: share["spread"])
    before, after = (amdahl_speedup(DOUBLING_SERIAL_FRACTION, n, efficiency[n]) for n in (DOUBLING_FROM, DOUBLING_TO))
    quartiles = {share["n"]: share["quartile_seconds"] for share in shares}
    ideal_before, ideal_after = (amdahl_speedup(DOUBLING_SERIAL_FRACTION, n) for n in (DOUBLING_FROM, DOUBLING_TO))
    return {
        "device": device_name(measured["device"]),
        "processor": measured["device"],
        "torch": measured["device"]["torch"],
        "job": measured["job"],
        "base_seconds": base_seconds,
        "repeats": measured["repeats"],
        "shares": shares,
        "noise": {
            "worst_spread": worst["spread"],
            "at": worst["n"],
            "limit": NOISE_LIMIT,
            "noisy": worst["spread"] > NOISE_LIMIT,
        },
        "rows": [_row(fraction, efficiency) for fraction in SERIAL_FRACTIONS],
        "ideal": [_row(fraction, dict.fromkeys(DIVISIONS, 1.0)) for fraction in SERIAL_FRACTIONS],
        "doubling": {
            "serial_fraction": DOUBLING_SERIAL_FRACTION,
            "from": DOUBLING_FROM,
            "to": DOUBLING_TO,
            "measured": after / before,
            "measured_range": _doubling_range(quartiles),
            "ideal": ideal_after / ideal_before,
            "lesson": LESSON_DOUBLING,
        },
    }


def _share(share: dict[str, Any]) -> dict[str, Any]:
    seconds = share["seconds"]
    return {
        "n": share["n"],
        "rows": share["rows"],
        **middle(seconds),
        "range_seconds": [min(seconds), max(seconds)],
    }


def _doubling_range(quartile_seconds: dict[int, list[float]]) -> list[float]:
    """The least and the most that the doubling buys while the three shares in it stay in their middle halves."""
    bought = []
    for base, before, after in product(*(quartile_seconds[n] for n in (1, DOUBLING_FROM, DOUBLING_TO))):
        serial_seconds, divisible = DOUBLING_SERIAL_FRACTION * base, 1 - DOUBLING_SERIAL_FRACTION
        bought.append((serial_seconds + divisible * before) / (serial_seconds + divisible * after))
    return [min(bought), max(bought)]


def _row(serial_fraction: float, efficiency: dict[int, float]) -> dict[str, Any]:
    """The divisible part is the measured share; the serial part is added whole, as its fraction of the base time."""
    speedup = {str(n): amdahl_speedup(serial_fraction, n, efficiency[n]) for n in DIVISIONS}
    return {"serial_fraction": serial_fraction, "speedup": speedup, "limit": amdahl_limit(serial_fraction)}
