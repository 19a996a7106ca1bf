"""Pipelines whose layers do not divide, cut so that the first and the last stage make up for it, as Megatron-LM's
--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanum.layout import Layout


def evened_ends(num_hidden_layers: int, pp: Any) -> tuple[Any, Any]:
    """Layers of the first and of the last stage, where each other one has an even share, rounded up: no stage has more.
    The last, which has the head too, has no more than the first. For ints and arrays; they are below 1 where too few
    are left.
    """
    share = -(-num_hidden_layers // pp)
    ends = num_hidden_layers - (pp - 2) * share
    return ends - ends // 2, ends // 2


def to_be_evened(num_hidden_layers: int, pp: Any) -> Any:
    """Do layers not divide, and can the ends make up for it?"""
    return (pp > 1) & (num_hidden_layers % pp != 0) & (evened_ends(num_hidden_layers, pp)[1] >= 1)


def saying_ends(layout: Layout, num_hidden_layers: int) -> Layout:
    """One layout of a search with the layers of its ends said, as flags say them."""
    if not layout.structure.evens_ends:
        return layout
    first, last = map(int, evened_ends(num_hidden_layers, layout.pp))
    said = replace(layout.structure, evens_ends=False, first_stage_layers=first, last_stage_layers=last)
    return replace(layout, structure=said)
