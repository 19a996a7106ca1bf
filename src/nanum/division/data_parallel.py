"""Which data parallelism stands around the parts: an engine's, under a structure."""

from __future__ import annotations

from typing import cast

from nanum.division.parts import Parts
from nanum.division.stages import Staged
from nanum.division.weights import flattens, replicates
from nanum.engines.engine import Engine
from nanum.layout import Structure
from nanum.parallel.accumulated import Accumulated
from nanum.parallel.buffer import Buffer
from nanum.parallel.chain import Chain, Each
from nanum.parallel.flat_buffers import FlatBuffers
from nanum.parallel.fully_shard import FullyShard
from nanum.parallel.live_shards import LiveShards
from nanum.parallel.partitioned import Partitioned
from nanum.parallel.pipeline import DataParallel
from nanum.parallel.replicated import DataRanks, Replicated
from nanum.parallel.units import Unit
from nanum.sharding import ZERO_AXES


def data_parallel(chain: Chain, staged: Staged, parts: Parts, structure: Structure, engine: Engine) -> DataParallel:
    """Around the parts of `chain`, with what the weights of its stages exchange."""
    shapes, weights = parts.shapes.embedding, staged.weights
    given = chain, parts.conventions, structure
    if engine.data_parallel == "flat_buffers":
        ranks = shapes.ranks(("dp_replicate", "dp_shard", "cp"))
        return FlatBuffers(*given, cast(tuple[Each[Buffer], ...], weights), data_ranks=ranks)
    if flattens(structure, engine):  # experts of their own mesh are refused
        (buffers,) = cast(tuple[Each[Buffer]], weights)
        way = Accumulated if engine.data_parallel == "accumulated" else Partitioned
        return way(*given, buffers)
    units = cast(Each[Unit], weights)
    if engine.data_parallel == "partitioned":
        return LiveShards(*given, units, chain.stage.take(shapes.ranks(ZERO_AXES)))
    if replicates(structure, engine):
        return Replicated(*given, units, DataRanks.of(shapes, chain.stage))
    return FullyShard(*given, units, staged.made)
