"""Grids of sizes that are measured in turns: what is asked of a device, and how its points are sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanum.live.sampling import Sampled, Turns, summary

TURNS_BYTES = 64e6  # what is in turn: beyond the caches that one core, or one GPU, has for itself


@dataclass(frozen=True)
class Plan:
    """What to measure with: sizes by `quick`, bounded by the free memory of one device."""

    device: torch.device
    quick: bool
    free_bytes: float

    @property
    def repeats(self) -> int:
        return 5 if self.quick else 9

    @property
    def longest(self) -> float:
        """Seconds of one call: the largest size of a grid is chosen by it."""
        return 0.1 if self.quick else 0.4

    @property
    def batch_bytes(self) -> float:
        """What is held at once of what is sampled in turns."""
        return min(4e9, self.free_bytes / 4)

    @property
    def turns_bytes(self) -> float:
        return min(TURNS_BYTES, self.free_bytes / 8)


@dataclass(frozen=True)
class Job:
    """One grid to be measured: `points` are its sizes in row-major order."""

    subject: str
    keys: dict[str, Any]
    sizes: dict[str, list[int]]
    points: list[Callable[[], Turns]]

    @property
    def name(self) -> str:
        return " ".join([self.subject, *self.keys.values()])

    def grid(self, seconds: list[list[float]], repeats: int) -> dict[str, Any]:
        """With the samples of each point."""
        middle, low, high = map(list, zip(*map(summary, seconds), strict=True))
        of = {"subject": self.subject, **self.keys, **self.sizes}
        return of | {"seconds": middle, "low_seconds": low, "high_seconds": high, "repeats": repeats}


def measured(jobs: list[Job], plan: Plan, tick: Callable[[str], None]) -> list[dict[str, Any]]:
    """The grids of all jobs. As many points as the memory holds are sampled in turns, round after round: a machine's
    drift over seconds then hits all of them alike.
    """
    seconds: list[list[list[float]]] = [[] for _ in jobs]
    waiting: list[tuple[Job, list[list[float]], Sampled]] = []
    held = 0.0
    points = [(job, found, make) for job, found in zip(jobs, seconds, strict=True) for make in job.points]
    for i, (job, found, make) in enumerate(points):
        turns = make()
        waiting.append((job, found, Sampled(turns, plan.device)))
        held += turns.held_bytes
        tick(job.name)
        if held > plan.batch_bytes or i == len(points) - 1:
            for _ in range(plan.repeats):
                for each, _, one in waiting:
                    one.sample()
                    tick(each.name)
            for _, its, one in waiting:
                its.append(one.seconds)
            waiting, held = [], 0.0
    return [job.grid(found, plan.repeats) for job, found in zip(jobs, seconds, strict=True)]


def ticks(jobs: list[Job], plan: Plan) -> int:
    """How often `measured` ticks."""
    return sum(len(job.points) for job in jobs) * (1 + plan.repeats)


def later(make: Callable[..., Turns], *arguments: Any) -> Callable[[], Turns]:
    return lambda: make(*arguments)
