"""Layouts that are one program under several names, and the plainest of these: a division by 1 is no division."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import Layout


def plainer(layout: Layout, engine: Engine, job: Job) -> Iterator[tuple[np.ndarray, Layout]]:
    """Which of these layouts, of one structure, are the program of a plainer name, and those names: one reason after
    the other. What is sharded among one rank is not sharded, and where nothing is sharded, data ranks hold copies. One
    micro-batch goes through a pipeline in one order, which 1F1B names.
    """
    s = layout.structure
    if s.pipelined and s.schedule == "gpipe":
        micro_batches = job.num_microbatches(layout.micro_batch_size, layout.data_ranks)
        yield micro_batches == 1, replace(layout, structure=replace(s, schedule="1f1b"))
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
