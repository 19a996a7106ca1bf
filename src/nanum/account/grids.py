"""Seconds read off measured grids, between their points and beyond them.

Between points the logarithm of seconds is linear in the logarithm of each size. Above the largest size of an axis the
rate of the largest holds: seconds grow with the work. Below the smallest, its seconds hold: no smaller call was seen to
be faster. Sizes are ints, or arrays over many layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from nanum.cluster.measured import Grid, Measured
from nanum.cluster.quantity import Quantity as Known
from nanum.collectives import Size
from nanum.program import Compute, Quantity

POWERS = {"seq_len": 2.0}
"""How the work grows with a size; with all others in proportion."""

OTHER = "other"
KERNELS: Mapping[str, tuple[str, ...]] = {
    "add": ("add", "residual"),
    "norm": ("norm", "norm1", "norm2"),
    "d_norm": ("d_norm", "d_norm1", "d_norm2"),
    "bias_grad": ("db_wq", "db_wk", "db_wv", "db_wo", "db_up", "db_gate", "db_down"),
    "embedding": ("embedding", "positions"),
    "copy": ("copy", "slice"),
}
"""Which kernels of a Program a measured one stands for, where they are called otherwise; the rest go by their name."""
_MEASURED_AS = {name: measured for measured, names in KERNELS.items() for name in names}


@dataclass(frozen=True, eq=False)
class Surface:
    """A grid's logarithms."""

    grid: Grid
    logs: np.ndarray = field(init=False)
    axes: tuple[np.ndarray, ...] = field(init=False)

    def __post_init__(self) -> None:
        shape = tuple(map(len, self.grid.sizes))
        object.__setattr__(self, "logs", np.log(np.array(self.grid.seconds)).reshape(shape))
        object.__setattr__(self, "axes", tuple(np.log(np.array(sizes)) for sizes in self.grid.sizes))

    def seconds(self, sizes: Sequence[Size]) -> Quantity:
        """At these sizes, one for each axis."""
        places, beyond = [], 0.0
        for axis, points, size in zip(self.grid.axes, self.axes, sizes, strict=True):
            at = np.log(np.maximum(size, 1e-9))
            beyond = beyond + POWERS.get(axis, 1.0) * np.maximum(at - points[-1], 0.0)
            places.append(_between(points, at))
        total = 0.0
        for corner in product((0, 1), repeat=len(places)):
            weight, index = 1.0, []
            for side, (left, share) in zip(corner, places, strict=True):
                weight = weight * (share if side else 1.0 - share)
                index.append(left + side)
            clipped = tuple(np.minimum(i, n - 1) for i, n in zip(index, self.logs.shape, strict=True))
            total = total + weight * self.logs[clipped]
        return np.exp(total + beyond)


def _between(points: np.ndarray, at: Quantity) -> tuple[Quantity, Quantity]:
    """The point to the left of each place, and how far it is to the next one (0 … 1)."""
    left = np.clip(np.searchsorted(points, at, side="right") - 1, 0, max(len(points) - 2, 0))
    if len(points) == 1:
        return left, 0.0 * at
    return left, np.clip((at - points[left]) / (points[left + 1] - points[left]), 0.0, 1.0)


@dataclass(frozen=True, eq=False)
class Grids:
    """The grids of a cluster, each made a surface when it is first asked for, and what has been asked so far."""

    measured: Measured
    used: dict[str, Grid] = field(default_factory=dict)  # by what a person calls it
    _surfaces: dict[int, Surface] = field(default_factory=dict)

    def surface(self, grid: Grid) -> Surface:
        if id(grid) not in self._surfaces:
            self._surfaces[id(grid)] = Surface(grid)
        return self._surfaces[id(grid)]

    def kernel_seconds(self, node: Compute, devices: int) -> Quantity | None:
        """Of one kernel, with `devices` of the node busy at once; None where it was not measured."""
        found = self._of(node)
        if found is None:
            return None
        subject, what, grid, sizes = found
        self.used[what] = grid
        seconds = self.surface(grid).seconds(sizes) * self.slower(subject, devices)
        least = self.measured.operation_seconds
        return seconds if least is None else np.maximum(seconds, least.value)

    def _of(self, node: Compute) -> tuple[str, str, Grid, tuple[Quantity, ...]] | None:
        known = self.measured
        if node.attention:
            direction = "backward" if node.phase == "backward" else "forward"
            return _found("attention", known.attention, (node.dtype, direction), node.shape)
        if node.shape:
            return _found("matmul", known.matmul, (node.dtype, node.operands), node.shape)
        if node.phase == "optimizer":
            return _found("optimizer", known.optimizer, node.dtype, (node.bytes_moved,))
        for name in (_MEASURED_AS.get(node.name, node.name), OTHER):
            if found := _found("kernel", known.kernel, (node.dtype, name), (node.bytes_moved,)):
                return found
        return None

    def host_seconds(self, work: str) -> float:
        """Of the host's own work around one exchange or one parameter; 0 where the host runs ahead of its device."""
        seconds: Known | None = getattr(self.measured.framework, work, None)
        return 0.0 if seconds is None or self.measured.streams else seconds.value

    def slower(self, subject: str, devices: int) -> float:
        """Seconds with `devices` of a node busy, over those with one: a power of their number up to the measured."""
        together = self.measured.together
        if together is None or devices < 2 or subject not in together.ratios:
            return 1.0
        share = min(np.log(devices) / np.log(together.ranks), 1.0)
        return float(together.ratios[subject].value ** share)

    def ratios_used(self) -> list[tuple[str, Known, str]]:
        """The single numbers beside the grids: what, the number, its unit."""
        known = self.measured
        stated = []
        if known.operation_seconds is not None:
            stated.append(("shortest operation", known.operation_seconds, "seconds"))
        if known.together is not None:
            for subject, ratio in known.together.ratios.items():
                what = f"{subject} with {known.together.ranks} devices of a node at it, over one"
                stated.append((what, ratio, "ratio"))
        for work, seconds in vars(known.framework).items():
            if seconds is not None:
                stated.append((f"the host's own work: {work.replace('_', ' ')}", seconds, "seconds"))
        if known.beside is not None:
            stated.append(("compute beside an exchange, over alone", known.beside.compute, "ratio"))
            stated.append(("an exchange beside compute, over alone", known.beside.exchange, "ratio"))
        return stated


def said_of(grid: Grid) -> str:
    """A grid's source, with how much of it there is."""
    return f"{grid.points} points, {grid.repeats} samples each: {grid.source}"


def _found(
    subject: str, grids: Mapping[Any, Grid], key: str | tuple[str, ...], sizes: tuple[Quantity, ...]
) -> tuple[str, str, Grid, tuple[Quantity, ...]] | None:
    grid = grids.get(key)
    if grid is None:
        return None
    words = key if isinstance(key, tuple) else (key,)
    return subject, f"{subject}, {' '.join(map(str, words))}", grid, sizes
