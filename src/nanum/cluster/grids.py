"""The [measured] table of a cluster file: what it may hold, and how it becomes `Measured`.

Numbers in it are bare, in SI units. `tag` and `source` hold for all of them; a grid may have its own.

    [measured]
    tag = "measured"
    source = "nanum measure 0.1.0, 2026-11-29, AMD EPYC (1 thread), torch 2.13.0"
    streams = false                  # true where left out: exchanges have a stream of the device beside the compute
    operation_seconds = 4e-06        # no operation is shorter

    [measured.beside]                # seconds of both beside each other, over those alone, on so many devices
    ranks = 2
    compute = 1.9
    exchange = 1.5

    [measured.together]              # seconds where so many devices of a node are busy, over those where one is
    ranks = 2
    matmul = 1.02                    # and kernel, attention, optimizer

    [measured.framework]             # seconds of the host's own work, on a device that is its own host
    parameter = 1e-4                 # of the optimizer, for each parameter; sharded_parameter, for each DTensor
    unit = 2e-3                      # of FSDP2, for each gather or reduction; bucket of DDP; redistribution of DTensor

    [[measured.matmul]]              # [[measured.kernel]], attention, optimizer and exchange likewise
    dtype = "fp32"
    operands = "nt"                  # y = x W^T: nt; dx = dy W: nn; dw = dy^T x: tn
    m = [32, 1024]
    n = [64, 1024]
    k = [64, 1024]
    seconds = [...]                  # the median of each point, row-major: the last axis varies fastest
    low_seconds = [...]              # 10th and 90th percentile
    high_seconds = [...]
    repeats = 7
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Any

from nanum.cluster.measured import Beside, Exchange, Framework, Grid, Measured, Together
from nanum.cluster.quantity import Quantity

Table = Mapping[str, Any]

AXES: dict[str, tuple[str, ...]] = {
    "matmul": ("m", "n", "k"),
    "kernel": ("bytes",),
    "attention": ("rows", "seq_len", "head_dim"),
    "optimizer": ("bytes",),
    "exchange": ("bytes",),
}
"""The axes of each subject's grids. `bytes` of a kernel are read and written; of an exchange, the payload of a call."""

KEYS: dict[str, tuple[str, ...]] = {
    "matmul": ("dtype", "operands"),
    "kernel": ("dtype", "name"),
    "attention": ("dtype", "direction"),
    "optimizer": ("dtype",),
    "exchange": ("kind", "ranks", "nodes"),
}
"""What tells the grids of a subject apart."""

SECONDS = ("seconds", "low_seconds", "high_seconds")
SUBJECTS = ("matmul", "kernel", "attention", "optimizer")
MOST_POINTS = 10_000


def measured(table: Table | None) -> Measured:
    """What a file's [measured] table says, known to be good."""
    if table is None:
        return Measured()
    tag, source = table["tag"], table["source"]

    def known(value: float) -> Quantity:
        return Quantity(float(value), tag, source)

    def grids(subject: str) -> list[tuple[Any, Grid]]:
        keys, entries = KEYS[subject], table.get(subject, ())
        return [(tuple(entry[k] for k in keys), _grid(entry, AXES[subject], table)) for entry in entries]

    framework = {name: known(value) for name, value in table.get("framework", {}).items()}
    beside, together, least = table.get("beside"), table.get("together"), table.get("operation_seconds")
    return Measured(
        matmul=dict(grids("matmul")),
        kernel=dict(grids("kernel")),
        attention=dict(grids("attention")),
        optimizer={dtype: grid for (dtype,), grid in grids("optimizer")},
        exchanges=tuple(Exchange(kind, ranks, nodes, grid) for (kind, ranks, nodes), grid in grids("exchange")),
        operation_seconds=None if least is None else known(least),
        beside=beside and Beside(beside["ranks"], known(beside["compute"]), known(beside["exchange"])),
        together=together and Together(together["ranks"], {s: known(together[s]) for s in SUBJECTS if s in together}),
        framework=Framework(**framework),
        streams=table.get("streams", True),
    )


def _grid(entry: Table, axes: tuple[str, ...], table: Table) -> Grid:
    sizes = tuple(tuple(float(size) for size in entry[axis]) for axis in axes)
    seconds, low, high = (tuple(map(float, entry[name])) for name in SECONDS)
    tag, source = entry.get("tag", table["tag"]), entry.get("source", table["source"])
    return Grid(axes, sizes, seconds, low, high, entry["repeats"], tag, source)


def wrong_with_grid(entry: Table, axes: tuple[str, ...]) -> list[str]:
    """Of a table whose keys are there: what is wrong with its numbers."""
    reasons = [_wrong_with_axis(axis, entry[axis]) for axis in axes]
    if found := [reason for reason in reasons if reason]:
        return found
    points = prod(len(entry[axis]) for axis in axes)
    if points > MOST_POINTS:
        return [f"{points:,} points, but at most {MOST_POINTS:,}"]
    for name in SECONDS:
        values = entry[name]
        if not _are_numbers(values):
            return [f"{name} is not a list of seconds above 0"]
        if len(values) != points:
            return [f"{name} has {len(values)} numbers for {points} points"]
    low, middle, high = (entry[name] for name in ("low_seconds", "seconds", "high_seconds"))
    if any(not a <= b <= c for a, b, c in zip(low, middle, high, strict=True)):
        return ["a median is not between its low_seconds and its high_seconds"]
    return []


def repeated(table: Table) -> list[str]:
    """The grids that a file states more than once, each once."""
    found = Counter(
        (subject, *(entry[key] for key in keys)) for subject, keys in KEYS.items() for entry in table.get(subject, ())
    )
    return [f"{subject}: {' '.join(map(str, keys))}" for (subject, *keys), count in found.items() if count > 1]


def _wrong_with_axis(axis: str, sizes: Any) -> str | None:
    if not _are_numbers(sizes):
        return f"{axis} is not a list of sizes above 0"
    if any(b <= a for a, b in pairwise(sizes)):
        return f"{axis} does not ascend"
    return None


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(_is_positive(value) for value in values)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e18
