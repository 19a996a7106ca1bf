"""What a Program exchanges: one row for each distinct exchange, with the totals of its calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanum.program import Collective, Compute, Node, Repeat


@dataclass(frozen=True)
class Key:
    axes: tuple[str, ...]
    kind: str
    phase: str
    what: str
    dtype: str


@dataclass(frozen=True, eq=False)
class Total:
    group_size: Any
    calls: Any
    payload_bytes: Any
    wire_bytes: Any


def walk(nodes: Iterable[Node], times: Any = 1, at: np.ndarray | None = None) -> Iterator[tuple[Node, Any, np.ndarray | None]]:
    """Every leaf with how often it occurs, and the map from its space to the layouts'."""
    for node in nodes:
        if isinstance(node, Repeat):
            if isinstance(times, int) and times == 1:
                count = node.count
            else:
                count = times * node.count
            yield from walk(node.body, count, node.at if node.at is not None else at)
        else:
            yield node, times, at


def _take(quantity: Any, at: np.ndarray | None) -> Any:
    return quantity[at] if at is not None and isinstance(quantity, np.ndarray) and quantity.ndim else quantity


def traffic(nodes: Iterable[Node]) -> dict[Key, Total]:
    """Rows by key, of one layout or of many (rows that no layout has are left out)."""
    rows: dict[Key, list[Any]] = {}
    for node, times, at in walk(nodes):
        if not isinstance(node, Collective):
            continue
        key = Key(node.axes, node.kind, node.phase, node.what, node.dtype)
        row = rows.setdefault(key, [_take(node.group_size, at), 0, 0, 0])
        for i, quantity in enumerate((node.calls, node.payload_bytes, node.wire_bytes), 1):
            row[i] = row[i] + times * _take(quantity, at)
    return {k: Total(*v) for k, v in rows.items() if np.any(np.asarray(v[1]) > 0)}


def flops(nodes: Iterable[Node], *, recompute: bool = True) -> Any:
    """FLOPs of matmuls and attention, those of recompute counted or not."""
    total: Any = 0.0
    for node, times, at in walk(nodes):
        if isinstance(node, Compute) and (recompute or node.phase != "recompute"):
            total = total + times * _take(node.flops, at)
    return total
