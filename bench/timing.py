"""Repeat, and take the median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """`seconds` of each repeat, in which `count` of `unit` are done where a rate means something; and what is asked."""

    name: str
    seconds: tuple[float, ...]
    count: int = 0
    unit: str = ""
    asked: str = ""

    def __str__(self) -> str:
        median = statistics.median(self.seconds)
        rate = f"  {self.count / median:,.0f} {self.unit}/s" if self.count else ""
        spread = f"({min(self.seconds):.3f} to {max(self.seconds):.3f})"
        return f"{self.name:<48} {median:8.3f} s {spread}{rate}" + (f"  asked: {self.asked}" if self.asked else "")


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
