"""What stands in for the gradients of weights that a matmul has added into a buffer already.

Autograd wants a gradient of each weight, or its hooks do not run in order: Transformer Engine hands it an empty tensor,
one for each shape and dtype that there is, and keeps it (2.3 and later, of grouped matmuls 2.10: `get_dummy_wgrad` in
transformer_engine/pytorch/module/base.py; Megatron-LM's output layer takes the same, core/tensor_parallel/layers.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from nanum.conventions import Conventions
from nanum.dtypes import ITEMSIZE
from nanum.sharding import Shapes, Tensor

Shape = tuple[Any, Any]
"""Rows and columns of a weight as it is stored, on one rank."""
LOOKED_UP = ("embedding", "positions")
"""Tables, whose gradients no matmul makes."""
OTHERWISE = ("router",)
"""Matmuls that are not Transformer Engine's (Megatron-LM's core/transformer/moe/moe_utils.py: RouterGatingLinear)."""


def stand_in_shapes(shapes: Shapes, weights: Iterable[Tensor], conventions: Conventions) -> tuple[Shape, ...]:
    """Of the matrices among `weights`, those that are stored as one together; of experts each is its own."""
    if not conventions.stand_ins:
        return ()
    found: dict[tuple[str, int], Shape] = {}
    times: Counter[str] = Counter()
    for w in weights:
        if len(w.dims) < 2 or w.name in (*LOOKED_UP, *OTHERWISE):
            continue
        rows, columns = shapes.shape(w.dims, w.split)[-2:][:: -1 if len(w.dims) == 3 else 1]
        stored = next(("+".join(names) for names in conventions.stored_as_one if w.name in names), w.name)
        times[w.name] += 1  # in a part of several layers
        before, _ = found.get((stored, times[w.name]), (0, columns))
        found[stored, times[w.name]] = before + rows, columns
    return tuple(found.values())


def stand_in_bytes(found: Iterable[tuple[Any, Shape]], dtype: str) -> Any:
    """One for each shape among those that are there (a count of 1 or more), for ints and arrays."""
    seen: list[tuple[Any, Shape]] = []
    total: Any = 0
    for count, (rows, columns) in found:
        new: Any = (count >= 1) * 1
        for there, (r, c) in seen:
            new = new * (1 - (there >= 1) * (r == rows) * (c == columns))
        total = total + new * rows * columns * ITEMSIZE[dtype]
        seen.append((count, (rows, columns)))
    return total
