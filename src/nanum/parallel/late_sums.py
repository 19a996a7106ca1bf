"""Sums of gradients that are left for the end of the step: over tp, and of the two copies of a tied embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanum.collectives import wire_bytes
from nanum.conventions import Conventions
from nanum.dtypes import ITEMSIZE
from nanum.layout import Structure
from nanum.parallel.chain import Chain
from nanum.program import Collective, Node


def sums_at_the_end(
    conventions: Conventions, structure: Structure, chains: Sequence[Chain], tp_grads_elements: Any
) -> list[Node]:
    """Sums of a rank's chunks that were left for the end of the step, after the reductions over data ranks."""
    nodes: list[Node] = []
    dtype, chain = conventions.numerics.grad_dtype, chains[0]

    def all_reduce(axes: tuple[str, ...], ranks: Any, calls: Any, elements: Any) -> Collective:
        size = elements * ITEMSIZE[dtype]
        wire = wire_bytes("all_reduce", size, ranks)
        return Collective("all_reduce", axes, "optimizer", "grads", dtype, ranks, calls, size * (calls > 0), wire)

    if structure.tensor != "none" and not conventions.tp_grads_at_once:
        # Over tp, in one coalesced call: of weights that each rank used for its part of a sequence, or for its heads
        # (Megatron-LM: finalize_model_grads.py).
        nodes.append(all_reduce(("tp",), chain.tp, (chain.tp > 1) * (tp_grads_elements > 0) * 1, tp_grads_elements))
    if chain.tied_elements is not None and chain.table_trained and structure.pipelined:
        # The two copies of a tied embedding add their gradients, on the first and the last stage.
        ends = sum(each.stage.embeds + each.stage.heads for each in chains)
        nodes.append(all_reduce(("pp",), 2, ends, chain.tied_elements * ends))
    return nodes
