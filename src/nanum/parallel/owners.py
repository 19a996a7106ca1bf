"""Whose optimizer a parameter is: ZeRO-1 as PyTorch's ZeroRedundancyOptimizer has it, whole parameters to each rank.

`zero_redundancy_optimizer.py`, `_partition_parameters`: from the largest on (in the model's order among equal ones),
each goes to the rank that has the least so far, the first of them.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heapreplace
from typing import Any, NamedTuple

from nanum.parallel.buckets import Kinds, Sizes, per_stage
from nanum.parallel.chain import Chain, Each


class Share(NamedTuple):
    """What one rank's optimizer updates: its tensors, bytes of their states and of their counts of steps, and elements
    of the largest, and the most of two of one tensor's and one of the tensor's that is updated before it.
    """

    elements: Any
    tensors: Any
    states_bytes: Any
    counters_bytes: Any
    largest_elements: Any
    in_turn_elements: Any


def owned(
    chain: Chain, sizes: Each[Sizes], states: Each[Sizes], counters: Each[Sizes], ranks: Any, index: Any
) -> Share:
    """What rank `index` of `ranks` has the optimizer of, of a stage's tensors: of these `sizes`, with so many bytes of
    `states` and `counters` each.
    """
    found = per_stage(chain, (sizes, states, counters), (ranks, index), _owned)
    return found if isinstance(found, Share) else Share(*(found[..., i] for i in range(len(Share._fields))))


def _owned(turns: tuple[Each[Sizes], ...], kinds: Kinds, given: tuple[int, int]) -> Share:
    ranks, index = given
    return _shares(turns, kinds, ranks)[index]


@lru_cache(maxsize=4096)
def _shares(turns: tuple[Each[Sizes], ...], kinds: Kinds, ranks: int) -> tuple[Share, ...]:
    in_order = ((*t.embedding, *(q for kind in kinds for q in t.layers[kind]), *t.head) for t in turns)
    tensors = [tensor for tensor in zip(*in_order, strict=True) if tensor[0]]
    least = [(0, rank) for rank in range(ranks)]
    shares = [Share(0, 0, 0, 0, 0, 0)] * ranks
    before = [0] * ranks
    for size, states, counter in sorted(tensors, key=lambda tensor: tensor[0], reverse=True):
        had, rank = least[0]
        heapreplace(least, (had + size, rank))
        mine = shares[rank]
        shares[rank] = Share(
            mine.elements + size,
            mine.tensors + 1,
            mine.states_bytes + states,
            mine.counters_bytes + counter,
            max(mine.largest_elements, size),
            max(mine.in_turn_elements, 2 * size + before[rank]),
        )
        before[rank] = size
    return tuple(shares)
