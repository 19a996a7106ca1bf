"""What an engine runs as one kernel though it is several operations here: products of weights that are one matrix, and
dropout with the residual after it. What is held, and for how long, is as if they were apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nanum.operators.recorder import Op
from nanum.operators.tape import Tape
from nanum.program import Compute
from nanum.sharding import Tensor

WAYS = ("", "dw_", "dx_")
"""A product's name before its weight's: forward, and backward's two."""


def join(tape: Tape) -> None:
    """Its operations, of which some now have the time of several, and those others none."""
    for ops in (tape.forward, tape.backward):
        for names in tape.conventions.stored_as_one:
            for way in WAYS:
                for found in _together(ops, {way + name for name in names}):
                    _product(tape, ops, found, way)
        if "residual" in tape.conventions.fused:
            _residuals(tape, ops)


def _together(ops: list[Op], named: set[str]) -> list[list[int]]:
    """Where products of these names are, one of each name at most: a name that comes again is of another layer."""
    groups: list[dict[str, int]] = [{}]
    for i, op in enumerate(ops):
        if isinstance(op.node, Compute) and op.name in named:
            if op.name in groups[-1]:
                groups.append({})
            groups[-1][op.name] = i
    return [list(group.values()) for group in groups if len(group) > 1]


def _product(tape: Tape, ops: list[Op], found: Sequence[int], way: str) -> None:
    """`x . [V W]` for x . V and x . W: forward and for the weights' gradient its columns are those of both, for the
    input's gradient its inner dim; what they read, or add up to, is touched once. An adapter's part of that is added
    apart.
    """
    kernels = [ops[i].node for i in found]
    at = found[-1] if way == "dx_" else found[0]
    whole = kernels[0]
    assert isinstance(whole, Compute)
    m, n, k = whole.shape
    once = ops[found[0]].writes[0] if way == "dx_" else ops[found[0]].reads[0]
    moved, flops = whole.bytes_moved, whole.flops
    for other in kernels[1:]:
        assert isinstance(other, Compute)
        moved = moved + other.bytes_moved - tape.shapes.bytes(once)
        flops = flops + other.flops
        n, k = (n, k + other.shape[2]) if way == "dx_" else (n + other.shape[1], k)
    for i in found:
        kernel = replace(whole, shape=(m, n, k), flops=flops, bytes_moved=moved) if i == at else None
        ops[i] = replace(ops[i], node=kernel)
    if way == "dx_":
        _sums(ops, {t for i in found for t in ops[i].writes})


def _sums(ops: list[Op], parts: set[Tensor]) -> None:
    """What is added up within a product is not added up after it."""
    for i, op in enumerate(ops):
        if op.name == "add" and parts.issuperset(op.reads):
            ops[i] = replace(op, node=None)
            parts.update(op.writes)


def _residuals(tape: Tape, ops: list[Op]) -> None:
    """`x + dropout(z)` reads x and z, and writes the sum and the mask."""
    dropped = {op.writes[0]: i for i, op in enumerate(ops) if op.name == "dropout"}
    for i, op in enumerate(ops):
        for t in op.reads if op.name == "residual" else ():
            if t not in dropped:
                continue
            first, last = ops[dropped[t]], ops[i]
            assert isinstance(first.node, Compute)
            assert isinstance(last.node, Compute)
            moved = first.node.bytes_moved + last.node.bytes_moved - 2 * tape.shapes.bytes(t)
            ops[dropped[t]] = replace(first, node=None)
            ops[i] = replace(last, node=replace(last.node, bytes_moved=moved))
