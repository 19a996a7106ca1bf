"""Whose optimizer a parameter is: ZeRO-1 as PyTorch's ZeroRedundancyOptimizer has it, whole parameters to each rank.

`zero_redundancy_optimizer.py`, `_partition_parameters`: from the largest on (in the model's order among equal ones),
each goes to the rank that has the least so far, the first of them.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heapreplace
from typing import Any

from nanum.parallel.buckets import Kinds, Sizes, per_stage
from nanum.parallel.chain import Chain, Each

Share = tuple[int, int, int]
"""Elements, tensors, and elements of the largest of them."""


def owned(chain: Chain, sizes: Each[Sizes], ranks: Any, index: Any) -> tuple[Any, Any, Any]:
    """Elements and tensors of a stage that rank `index` of `ranks` has the optimizer of, and the largest's elements."""
    found = per_stage(chain, (sizes,), (ranks, index), _owned)
    return found if isinstance(found, tuple) else (found[..., 0], found[..., 1], found[..., 2])


def _owned(turns: tuple[Each[Sizes], ...], kinds: Kinds, given: tuple[int, int]) -> Share:
    ranks, index = given
    return _shares(turns[0], kinds, ranks)[index]


@lru_cache(maxsize=4096)
def _shares(sizes: Each[Sizes], kinds: Kinds, ranks: int) -> tuple[Share, ...]:
    layers = (size for kind in kinds for size in sizes.layers[kind])
    tensors = [size for size in (*sizes.embedding, *layers, *sizes.head) if size]
    least = [(0, rank) for rank in range(ranks)]
    counts, largest = [0] * ranks, [0] * ranks
    for size in sorted(tensors, reverse=True):
        had, rank = least[0]
        heapreplace(least, (had + size, rank))
        counts[rank] += 1
        largest[rank] = max(largest[rank], size)
    elements = {rank: had for had, rank in least}
    return tuple((elements[rank], counts[rank], largest[rank]) for rank in range(ranks))
