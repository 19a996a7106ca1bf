"""Laws of scaling, and the serial fraction that explains some points best.

Amdahl 1967 (one job, ever more GPUs): S(N) = 1 / (s + (1 - s) / N), with the limit 1/s. Gustafson 1988 (a job that
grows with the GPUs): S(N) = N - s (N - 1). Karp and Flatt's fraction of one point is `nanum.prediction.karp_flatt`.
Each law is a straight line in s, so the best s is a quotient of sums. Errors are relative, of two GPUs as of a
thousand: those of 1/S itself would be nearly all of the few, and put the limit of many below what they reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Pair = tuple[float, float]  # GPUs, and the speed-up over one of them; or both over the first of several counts

ROUNDING = 1e-12
"""A serial fraction nearer to 0 is what rounding leaves of none."""


def amdahl_speedup(serial_fraction: float, divisions: float, efficiency: float = 1.0) -> float:
    """1 / (s + (1 − s) / (N e)), where a part of 1/N runs at efficiency e (1 in Amdahl 1967)."""
    return 1.0 / (serial_fraction + (1.0 - serial_fraction) / (divisions * efficiency))


def amdahl_limit(serial_fraction: float) -> float | None:
    """1/s, what no number of GPUs passes; None where nothing is serial, or less (as a measurement may have it)."""
    return 1.0 / serial_fraction if serial_fraction > 0 else None


def gpus_at_half_efficiency(serial_fraction: float) -> float | None:
    """N of which half is lost: S/N = 1/2 at 1 + 1/s. None where nothing is serial, or less."""
    return 1.0 + 1.0 / serial_fraction if serial_fraction > 0 else None


def gustafson_speedup(serial_fraction: float, divisions: float) -> float:
    """N - s (N - 1), where s is of the time on N GPUs."""
    return divisions - serial_fraction * (divisions - 1)


def fit_amdahl(points: Sequence[Pair]) -> float | None:
    """The s whose curve has the least squares of relative errors in 1/S; None without a point of several GPUs.

    1/S - 1/N = s (1 - 1/N): the mean of the points' Karp-Flatt fractions, weighted by ((1 - 1/N) S)^2.
    """
    above = sum((1 - 1 / n) * (1 / speedup - 1 / n) * speedup**2 for n, speedup in points)
    below = sum(((1 - 1 / n) * speedup) ** 2 for n, speedup in points)
    return _rounded(above / below) if below else None


def fit_gustafson(points: Sequence[Pair]) -> float | None:
    """The s whose line has the least squares of relative errors in S; None without a point of several GPUs."""
    above = sum((n - 1) * (n - speedup) / speedup**2 for n, speedup in points)
    below = sum(((n - 1) / speedup) ** 2 for n, speedup in points)
    return _rounded(above / below) if below else None


@dataclass(frozen=True)
class WithShares:
    """Amdahl's law where a share of the work runs at `share_efficiency`, however many GPUs have one: what is exchanged
    in each micro-batch makes a share longer, and is divided with the work.
    """

    serial_fraction: float
    share_efficiency: float

    def speedup(self, gpus: float) -> float:
        return amdahl_speedup(self.serial_fraction, gpus, self.share_efficiency)

    @property
    def gpus_at_half_efficiency(self) -> float | None:
        """N where S/N = 1/2: s N + (1 - s) / e = 2. None where nothing is serial; below 1, shares alone lose half."""
        s = self.serial_fraction
        return (2 - (1 - s) / self.share_efficiency) / s if s > 0 else None


def fit_with_shares(points: Sequence[Pair]) -> WithShares | None:
    """The line 1/S = a + b/N of the least relative errors: s = a, and e = (1 - a) / b. None for fewer than three counts
    of GPUs, through two of which any such line goes.
    """
    if len({n for n, _ in points}) < 3:
        return None
    weights = [speedup**2 for _, speedup in points]
    total = sum(weights)
    x = [1 / n for n, _ in points]
    y = [1 / speedup for _, speedup in points]
    mean_x, mean_y = (sum(w * q for w, q in zip(weights, of, strict=True)) / total for of in (x, y))
    spread = sum(w * (q - mean_x) ** 2 for w, q in zip(weights, x, strict=True))
    both = sum(w * (q - mean_x) * (r - mean_y) for w, q, r in zip(weights, x, y, strict=True))
    slope = both / spread
    serial = _rounded(mean_y - slope * mean_x)
    return WithShares(serial, (1 - serial) / slope) if slope > 0 and serial < 1 else None


def _rounded(serial_fraction: float) -> float:
    return 0.0 if abs(serial_fraction) < ROUNDING else serial_fraction
