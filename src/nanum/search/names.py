"""Layouts that are one program under several names, and the plainest of these: a division by 1 is no division."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from nanum.engines.engine import Engine
from nanum.layout import Layout, Structure


def plainer(layout: Layout, engine: Engine) -> Iterator[tuple[np.ndarray, Layout]]:
    """Which of these layouts, of one structure, are the program of a plainer name, and those names: one reason after
    the other. What is sharded among one rank is not sharded, and where nothing is sharded, data ranks hold copies.
    """
    s = layout.structure
    if s.zero in (1, 2) and 0 in engine.searched_zero_stages and engine.data_parallel != "partitioned":
        # DeepSpeed's ZeRO has flat fp32 partitions of its own for one rank too.
        alone = (layout.dp_shard * layout.cp == 1) & (not s.own_experts or layout.edp == 1)
        yield alone, replace(layout, structure=replace(s, zero=0))
    if s.zero == 0:
        one, ranks = np.ones_like(layout.dp_shard), layout.data_ranks
        if s.own_experts:  # they are spread over dp_shard, so that the copies are there too
            yield layout.dp_replicate > 1, replace(layout, dp_replicate=one, dp_shard=ranks)
        else:
            yield layout.dp_shard > 1, replace(layout, dp_replicate=ranks, dp_shard=one)


def in_one_order(structure: Structure, num_microbatches: np.ndarray) -> np.ndarray:
    """Which layouts are GPipe's by another schedule's name: of one micro-batch, which goes through a pipeline in one
    order, and is told by 1F1B.
    """
    gpipe = structure.pipelined and structure.schedule == "gpipe"
    return num_microbatches == 1 if gpipe else np.zeros(num_microbatches.shape, bool)
