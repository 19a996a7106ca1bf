"""The few operations that serve an int and an array over layouts alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Quantity = Any  # int | float | np.ndarray


def where(condition: Quantity, yes: Quantity, no: Quantity) -> Quantity:
    """`yes if condition else no`, for one layout or for many."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def most(a: Quantity, b: Quantity) -> Quantity:
    return np.maximum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else max(a, b)


def least(a: Quantity, b: Quantity) -> Quantity:
    return np.minimum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else min(a, b)


def ceiling(n: Quantity) -> Quantity:
    """The least whole number that is not less than n, but for what rounding put on top."""
    whole = np.ceil(np.asarray(n) - 1e-9).astype(np.int64)
    return whole if isinstance(n, np.ndarray) else int(whole)


def power_of_two(n: Quantity) -> Quantity:
    """The least power of two that is not less than a whole number of at least 1."""
    if isinstance(n, np.ndarray):
        return np.left_shift(1, np.ceil(np.log2(n)).astype(np.int64))
    return 1 << (int(n) - 1).bit_length()


def take(quantity: Quantity, at: np.ndarray | None) -> Quantity:
    """From a smaller space to the layouts' own; what is one number stays one."""
    return quantity[at] if at is not None and isinstance(quantity, np.ndarray) and quantity.ndim else quantity


def distinct(columns: Sequence[Quantity]) -> tuple[list[np.ndarray], np.ndarray]:
    """The distinct rows of a table of non-negative whole numbers, by column, and the place of each row among them."""
    table = np.broadcast_arrays(*columns)
    key, room = np.zeros(table[0].shape, np.int64), 1
    for column in table:
        base = int(column.max(initial=0)) + 1
        room *= base
        key = key * base + column
    if room >= 2**62:  # too large for one number a row
        _, first, inverse = np.unique(np.stack(table, axis=-1), axis=0, return_index=True, return_inverse=True)
    else:
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return [column[first] for column in table], inverse.ravel()
