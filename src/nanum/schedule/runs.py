"""Schedules of one chunk a rank, compressed: `warmup` forwards, then `steady` pairs of one forward and one backward,
then `cooldown` backwards (GPipe: arXiv 1811.06965; 1F1B: PipeDream-Flush, arXiv 2006.09503, as in Megatron-LM's
schedule without interleaving). Sizes are ints or arrays over layouts, so that a plan reads them of all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Size = Any  # int, or np.ndarray of int64


class Runs(NamedTuple):
    """The order of one stage, compressed: forwards, then pairs of a forward and a backward, then backwards."""

    warmup: Size
    steady: Size
    cooldown: Size


def _smaller(a: Size, b: Size) -> Size:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)


# By schedule, how many forwards a stage does before its first pair: (pp, stage, num_microbatches).
WARMUP: dict[str, Callable[[Size, Size, Size], Size]] = {
    "gpipe": lambda pp, stage, num_microbatches: num_microbatches + 0 * (pp + stage),
    "1f1b": lambda pp, stage, num_microbatches: _smaller(pp - 1 - stage, num_microbatches),
}


def warmup(schedule: str, pp: Size, stage: Size, num_microbatches: Size) -> Size:
    """Forwards that a stage does before its first pair. Sizes are ints or arrays.

    Raises:
        ValueError: the schedule is unknown.
    """
    if schedule not in WARMUP:
        raise ValueError(f"{schedule} is not a schedule: {', '.join(WARMUP)}")
    return WARMUP[schedule](pp, stage, num_microbatches)


def runs(schedule: str, pp: Size, stage: Size, num_microbatches: Size) -> Runs:
    """How many times a stage does what. Sizes are ints or arrays.

    Raises:
        ValueError: the schedule is unknown.
    """
    first = warmup(schedule, pp, stage, num_microbatches)
    return Runs(first, num_microbatches - first, first)
