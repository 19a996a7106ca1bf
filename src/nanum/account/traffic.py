"""What a Program exchanges: one row for each distinct exchange, with the totals of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nanum.arrays import take
from nanum.once import Once
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


Rows = dict[Key, list[Any]]


def traffic(nodes: Iterable[Node]) -> dict[Key, Total]:
    """Rows by key, of one layout or of many (rows that no layout has are left out)."""
    nodes = tuple(nodes)
    rows = _rows(nodes, Once())
    return {k: Total(*v) for k, v in rows.items() if np.any(np.asarray(v[1]) > 0)}


def _rows(nodes: Iterable[Node], known: Once[Rows]) -> Rows:
    rows: Rows = {}
    for node in nodes:
        if isinstance(node, Collective):
            key = Key(node.axes, node.kind, node.phase, node.what, node.dtype)
            _add(rows, key, [node.group_size, node.calls, node.payload_bytes, node.wire_bytes], 1, None)
        elif isinstance(node, Repeat):
            for key, row in known((node.body,), partial(_rows, node.body, known)).items():
                _add(rows, key, row, node.count, node.at)
    return rows


def _add(rows: Rows, key: Key, row: list[Any], times: Any, at: np.ndarray | None) -> None:
    size, *quantities = (take(q, at) for q in row)
    if not (isinstance(times, int) and times == 1):
        quantities = [times * q for q in quantities]
    old = rows.get(key)
    rows[key] = (
        [size, *quantities] if old is None else [size, *(a + b for a, b in zip(old[1:], quantities, strict=True))]
    )


Groups = frozenset[tuple[tuple[str, ...], bool]]
"""By their axes: False for a communicator, True for what it has beside where its ranks swap pieces with all others."""


def groups_of(nodes: tuple[Node, ...], known: Once[Groups] | None = None) -> Groups:
    """The groups of ranks, by axes, in which a Program exchanges anything, whatever the sizes. `known` remembers
    bodies, which programs share.
    """
    known = Once() if known is None else known
    found: set[tuple[tuple[str, ...], bool]] = set()
    for node in nodes:
        if isinstance(node, Collective):
            found.add((node.axes, False))
            if node.kind == "all_to_all":
                found.add((node.axes, True))
        elif isinstance(node, Repeat):
            found |= known((node.body,), partial(groups_of, node.body, known))
    return frozenset(found)


def flops(nodes: Iterable[Node], *, recompute: bool = True) -> Any:
    """FLOPs of matmuls and attention, those of recompute counted or not."""
    return _summed(tuple(nodes), lambda node: node.flops if recompute or node.phase != "recompute" else 0.0, Once())


def kernels(nodes: Iterable[Node]) -> Any:
    """How many kernels are launched, exchanges aside; one that neither computes nor moves anything is none."""
    return _summed(tuple(nodes), lambda node: 1.0 * ((node.flops > 0) | (node.bytes_moved > 0)), Once())


def _summed(nodes: Iterable[Node], read: Callable[[Compute], Any], known: Once[Any]) -> Any:
    """The sum over all kernels, repeats counted."""
    total: Any = 0.0
    for node in nodes:
        if isinstance(node, Compute):
            total = total + read(node)
        elif isinstance(node, Repeat):
            body = known((node.body,), partial(_summed, node.body, read, known))
            total = total + node.count * take(body, node.at)
    return total
