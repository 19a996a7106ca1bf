"""Buckets of gradients: whole tensors in the order in which their gradients become ready, exchanged together.

Megatron-LM (`param_and_grad_buffer.py`) and PyTorch's DDP (`reducer.cpp`: `compute_bucket_assignment_by_size`) fill
them alike: a bucket is closed by the tensor that makes it large enough. Buckets do not end where the parts of a model
do, so the parts carry the bytes, and the calls are counted here, of a whole stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain as joined
from typing import Any, TypeVar

import numpy as np

from nanum.arrays import distinct
from nanum.parallel.chain import Chain
from nanum.program import Collective

T = TypeVar("T")


def carried(c: Collective) -> Collective:
    """The bytes of an exchange that goes along in buckets."""
    return replace(c, calls=0 * c.calls)


def counted(c: Collective, calls: Any) -> Collective:
    """The calls of buckets whose bytes went with the parts."""
    nothing = 0 * c.payload_bytes
    return replace(c, calls=(c.group_size > 1) * calls, payload_bytes=nothing, wire_bytes=nothing)


Sizes = tuple[Any, ...]
"""Of each tensor of a part, in the order of the model; 0 where a stage does not have it."""
Parts = tuple[Sizes, Sizes, Sizes]
"""Of the embedding, a layer and the head."""


def bucket_count(chain: Chain, turns: Sequence[Parts], first: Any, later: Any) -> Any:
    """Buckets of a stage, or of each: one closes once it has `first` (the first), or `later` (the others), of what
    sizes are in. Gradients become ready from the head's to the embedding's, each turn after the one before.
    """
    return per_stage(chain, turns, (first, later), _count)


@lru_cache(maxsize=4096)
def _count(turns: tuple[Parts, ...], layers: int, closes: tuple[int, int]) -> int:
    count = filled = 0
    for embedding, layer, head in turns:
        for size in (*reversed(head), *tuple(reversed(layer)) * layers, *reversed(embedding)):
            filled += size
            if size and filled >= closes[count > 0]:
                count, filled = count + 1, 0
    return count + (filled > 0)


def per_stage(
    chain: Chain,
    turns: Sequence[Parts],
    given: tuple[Any, ...],
    work_out: Callable[[tuple[Parts, ...], int, tuple[Any, ...]], T],
) -> Any:
    """`work_out(turns, layers, given)` of a stage; of many, of each distinct one, once.

    Raises ValueError where it gives no number (or tuple of numbers) for arrays to be made of.
    """
    stage = chain.stage
    columns = (stage.layers, *given)
    sizes = list(joined.from_iterable(part for parts in turns for part in parts))
    if not any(isinstance(q, np.ndarray) for q in (*columns, *sizes)):
        return work_out(_at(turns, None), int(stage.layers), tuple(map(int, given)))
    # What tensors are left of is told by tp, and by which ends are here.
    _, inverse = distinct((stage.layers, stage.embeds, stage.heads, chain.tp, *given))
    _, first = np.unique(inverse, return_index=True)
    found = [
        work_out(_at(turns, i), int(_pick(stage.layers, i)), tuple(int(_pick(q, i)) for q in given)) for i in first
    ]
    return np.array(found)[inverse]


def _at(turns: Sequence[Parts], i: Any) -> tuple[Parts, ...]:
    def part(sizes: Sizes) -> Sizes:
        return tuple(int(_pick(size, i)) for size in sizes)

    return tuple((part(embedding), part(layer), part(head)) for embedding, layer, head in turns)


def _pick(quantity: Any, i: Any) -> Any:
    return quantity[i] if isinstance(quantity, np.ndarray) and quantity.ndim else quantity
