"""Repeat, and take the median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """`seconds` of each repeat, in which `count` of `unit` are done where a rate means something; and what is asked: at
    the most `most_seconds`, or at least `least_rate`.
    """

    name: str
    seconds: tuple[float, ...]
    count: int = 0
    unit: str = ""
    most_seconds: float = 0.0
    least_rate: float = 0.0

    @property
    def missed(self) -> bool:
        median = statistics.median(self.seconds)
        return bool(self.most_seconds and median > self.most_seconds) or self.count / median < self.least_rate

    def __str__(self) -> str:
        median = statistics.median(self.seconds)
        rate = f"  {self.count / median:,.0f} {self.unit}/s" if self.count else ""
        spread = f"({min(self.seconds):.3f} to {max(self.seconds):.3f})"
        asked = f"  asked: under {self.most_seconds:g} s" if self.most_seconds else ""
        asked += f"  asked: {self.least_rate:,.0f} {self.unit}/s" if self.least_rate else ""
        return f"{self.name:<48} {median:8.3f} s {spread}{rate}{asked}" + ("  MISSED" if self.missed else "")


def repeat(work: Callable[[], object], repeats: int = 5, warmups: int = 1) -> tuple[float, ...]:
    """Wall seconds of each of `repeats` runs, after `warmups` that do not count."""
    for _ in range(warmups):
        work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return tuple(seconds)
