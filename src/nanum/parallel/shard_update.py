"""The update of FSDP2's shards: the optimizer, on the device or in the host's memory, what Muon's matrices go through,
and the scales of weights that are gathered in fp8.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanum.collectives import wire_bytes
from nanum.conventions import Conventions
from nanum.dtypes import ITEMSIZE
from nanum.parallel.chain import Chain, Each
from nanum.parallel.units import Unit, orthogonalized, scratch_bytes
from nanum.program import Collective, Compute, Held, Node, OnHost, Repeat


def shard_update(
    chain: Chain, units: Each[Unit], conventions: Conventions, *, over_tp: bool, offloads: bool
) -> list[Node]:
    """A step of the optimizer on what this rank stores of `units`; `over_tp` where tp divides them too."""

    def total(field: str) -> Any:
        return chain.total(field, units)

    own = total("own_elements")
    moved = own * 3 * ITEMSIZE[conventions.numerics.param_dtype] + 2 * total("states_bytes")
    largest, in_turn = (chain.largest(f"{what}_elements", units) for what in ("largest", "in_turn"))
    scales = _scales(chain, units, conventions, over_tp=over_tp)
    if offloads:  # tensor by tensor, as PyTorch does on a CPU
        copies = scratch_bytes(replace(conventions, optimizer_at_once=False), own, largest, in_turn)
        return [
            OnHost(copies, "the optimizer's scratch"),
            Compute("optimizer", "optimizer", 0.0, moved, "fp32", on_host=True),
            OnHost(-copies),
            OnHost(-total("shard_bytes")),
            *scales,
        ]
    copies = scratch_bytes(conventions, own, largest, in_turn)
    return [
        *_orthogonalized(chain, units, conventions),
        Held("buffers", copies, "the optimizer's scratch"),
        Compute("optimizer", "optimizer", 0.0, moved, "fp32", tensors=total("tensors"), sharded=True),
        Held("buffers", -copies),
        Held("grads", -total("shard_bytes"), apart=True),
        *scales,
    ]


def _scales(chain: Chain, units: Each[Unit], conventions: Conventions, *, over_tp: bool) -> list[Node]:
    """What tells the scales of weights that are gathered in fp8: over each axis that cuts them, in turn. They are
    worked out together, by one all-reduce of the largest entries (torchao, fsdp_utils.py:
    `precompute_float8_dynamic_scale_for_fsdp`).
    """
    gathers = units.layers[0].in_turn[0].gathers
    if not conventions.fp8_gather or not gathers:
        return []
    size, nodes = chain.total("fp8_tensors", units) * ITEMSIZE["fp32"], list[Node]()
    groups = [(gathers[0].axes, gathers[0].group_size)]
    groups += [(("tp",), chain.tp)] if over_tp else []
    for axes, ranks in groups:
        there = (ranks > 1) * (size > 0)
        payload = size * there
        wire = wire_bytes("all_reduce", payload, ranks)
        nodes.append(Collective("all_reduce", axes, "optimizer", "scales", "fp32", ranks, 1 * there, payload, wire))
    return nodes


def _orthogonalized(chain: Chain, units: Each[Unit], conventions: Conventions) -> list[Node]:
    """Muon's matrices come whole to ranks that own them, and go back as shards: two exchanges of fp32 for each layer
    (torchtitan b5bcd76, distributed/flex_shard: DistMuon).
    """
    states = conventions.numerics.states
    nodes: list[Node] = []
    for part, count in chain.counted() if states.optimizer == "muon" else ():
        for u in units[part].in_turn:
            if not (u.gathers and u.matrices):
                continue
            axes, ranks = u.gathers[0].axes, u.gathers[0].group_size
            several = (ranks > 1) * 1
            elements = sum(alike * rows * columns for alike, rows, columns in u.matrices)
            shard = ITEMSIZE["fp32"] * elements // ranks * several
            wire = wire_bytes("all_to_all", shard, ranks)
            there = Collective("all_to_all", axes, "optimizer", "grads", "fp32", ranks, several, shard, wire)
            nodes.append(Repeat(count, (there,)))
            nodes += orthogonalized(states, [(u.matrices, count)], ranks)
            nodes.append(Repeat(count, (replace(there, what="params"),)))
    return nodes
