"""What is moved to the host's memory and back, and updated there: shards of FSDP2's units, and the optimizers of
DeepSpeed and of Megatron.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanum.arrays import most
from nanum.conventions import Conventions
from nanum.dtypes import ITEMSIZE
from nanum.layout import Structure
from nanum.parallel.units import Unit
from nanum.program import (
    DATA_STREAM,
    FROM_HOST,
    HOST_STREAM,
    TO_HOST,
    Collective,
    Compute,
    Held,
    Node,
    OnHost,
    Phase,
    Wait,
    host_copy,
)

FP32 = ITEMSIZE["fp32"]


def shard_up(unit: Unit, conventions: Conventions, phase: Phase, presence: Any, ticket: str) -> Collective:
    """A unit's shards to the device, as they are stored, on the stream of the gather that follows
    (`_fsdp_param.py`: `all_gather_inputs`).
    """
    size = unit.stored_bytes * presence
    calls = most(unit.tensors, 1) * (size > 0)
    return host_copy(FROM_HOST, phase, "params", conventions.numerics.param_dtype, calls, size, DATA_STREAM, ticket)


def shard_grads_down(unit: Unit, conventions: Conventions, *, adds: bool) -> list[Node]:
    """Reduced gradients of a unit to the host, beside the compute or, where the host `adds` them to those before, while
    it waits (`_fsdp_collectives.py`: `foreach_reduce`).
    """
    size, dtype = unit.shard_bytes, conventions.numerics.param_dtype
    gone = Held("grads", -size, apart=True)
    started = host_copy(TO_HOST, "backward", "grads", dtype, unit.tensors, size, HOST_STREAM, "grads")
    if not adds:
        return [started, gone, OnHost(size, "sharded gradients")]
    addition = Compute("accumulate", "backward", 0.0, 3 * size, dtype, on_host=True)
    now = replace(started, stream=None, ticket="")
    return [Wait(DATA_STREAM, "reduce"), now, gone, OnHost(size, "arrived gradients"), addition, OnHost(-size)]


def cpu_adam(conventions: Conventions, elements: Any, states_bytes: Any) -> Compute:
    """DeepSpeed's update of so many elements on the host: masters and states are read and written; gradients are read
    and, before it, scaled in place; then the masters are copied in half precision (stage_1_and_2.py, stage3.py: `step`,
    `unscale_and_clip_grads`).
    """
    moved = 2 * states_bytes + elements * (3 * FP32 + FP32 + ITEMSIZE[conventions.numerics.param_dtype])
    return Compute("optimizer", "optimizer", 0.0, moved, "fp32", on_host=True)


def updates_on_host(structure: Structure) -> bool:
    """Does the host update, all or a part?"""
    return "optimizer" in structure.offload


def fraction(structure: Structure, quantity: Any) -> Any:
    """The part of a quantity that the host updates, to a thousandth."""
    return quantity * round(1000 * structure.offload_fraction) // 1000 if updates_on_host(structure) else 0 * quantity


def hybrid_states(structure: Structure, states_bytes: Any, elements: Any) -> list[Node]:
    """States, on either side, and what the host has of gradients (hybrid_optimizer.py: `cpu_copy_map_grad`)."""
    down = fraction(structure, states_bytes)
    return [
        Held("optimizer_states", states_bytes - down, "optimizer states"),
        OnHost(down + fraction(structure, elements) * FP32, "optimizer states, and gradients"),
    ]


def hybrid_update(structure: Structure, states_bytes: Any, elements: Any, moved: Any, tensors: Any) -> list[Node]:
    """Megatron's: fp32 gradients down, the device's own part, the host's, and its fp32 masters up, which the device
    casts (hybrid_optimizer.py: `step`; not asynchronous unless --overlap-cpu-optimizer-d2h-h2d).
    """
    size, calls = fraction(structure, elements) * FP32, -(-fraction(structure, 1000) * tensors // 1000)
    there = fraction(structure, 2 * states_bytes + elements * FP32)
    return [
        host_copy(TO_HOST, "optimizer", "grads", "fp32", calls, size),
        Compute("optimizer", "optimizer", 0.0, moved - fraction(structure, moved), "fp32"),
        Compute("optimizer", "optimizer", 0.0, there, "fp32", on_host=True),
        host_copy(FROM_HOST, "optimizer", "params", "fp32", calls, size),
    ]
