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
from nanum.parallel.chain import Chain, Each
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
Kinds = tuple[int, ...]
"""Of the layers of a stage, in order."""


def bucket_count(chain: Chain, turns: Sequence[Each[Sizes]], first: Any, later: Any) -> Any:
    """Buckets of a stage, or of each: one closes once it has `first` (the first), or `later` (the others), of what
    sizes are in. Gradients become ready from the head's to the embedding's, each turn after the one before.
    """
    return per_stage(chain, turns, (first, later), _count)


@lru_cache(maxsize=4096)
def _count(turns: tuple[Each[Sizes], ...], kinds: Kinds, closes: tuple[int, int]) -> int:
    count = filled = 0
    for sizes in turns:
        layers = tuple(tuple(reversed(sizes.layers[kind])) for kind in reversed(kinds))
        for size in (*reversed(sizes.head), *joined.from_iterable(layers), *reversed(sizes.embedding)):
            filled += size
            if size and filled >= closes[count > 0]:
                count, filled = count + 1, 0
    return count + (filled > 0)


def per_stage(
    chain: Chain,
    turns: Sequence[Each[Sizes]],
    given: tuple[Any, ...],
    work_out: Callable[[tuple[Each[Sizes], ...], Kinds, tuple[Any, ...]], T],
) -> Any:
    """`work_out(turns, kinds of the layers, given)` of a stage; of many, of each distinct one, once.

    Raises ValueError where it gives no number (or tuple of numbers) for arrays to be made of.
    """
    stage = chain.stage
    counts = [g.count for g in stage.groups]
    sizes = [q for each in turns for part in (each.embedding, *each.layers, each.head) for q in part]
    if not any(isinstance(q, np.ndarray) for q in (*counts, *given, *sizes)):
        return work_out(_at(turns, None), _kinds(chain, None), tuple(map(int, given)))
    # What tensors are left of is told by tp and by which ends are here; of experts, by their sizes.
    _, inverse = distinct((*counts, stage.embeds, stage.heads, chain.tp, *sizes, *given))
    _, first = np.unique(inverse, return_index=True)
    found = [work_out(_at(turns, i), _kinds(chain, i), tuple(int(_pick(q, i)) for q in given)) for i in first]
    return np.array(found)[inverse]


def _kinds(chain: Chain, i: Any) -> Kinds:
    groups = ((tuple(p.part for p in g.places), int(_pick(g.count, i))) for g in chain.stage.groups)
    return tuple(kind for kinds, count in groups for kind in kinds * count if isinstance(kind, int))


def _at(turns: Sequence[Each[Sizes]], i: Any) -> tuple[Each[Sizes], ...]:
    def part(sizes: Sizes) -> Sizes:
        return tuple(int(_pick(size, i)) for size in sizes)

    return tuple(each.map(part) for each in turns)


def _pick(quantity: Any, i: Any) -> Any:
    return quantity[i] if isinstance(quantity, np.ndarray) and quantity.ndim else quantity
