"""What a move of a tensor is in a Program, and what an engine does around it: DTensor's copies, a library's buffers,
streams beside the compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanum.arrays import most
from nanum.collectives import wire_bytes
from nanum.operators.recorder import Op, Recorder
from nanum.program import EXPERTS_STREAM, EXPERTS_TICKET, Collective, Compute, Phase
from nanum.sharding import Move, Shapes, Tensor, places


def collective(
    shapes: Shapes, kind: str, axes: tuple[str, ...], before: Tensor, after: Tensor, phase: Phase, what: str
) -> Collective:
    """The Program's node for one move. Payload: the whole padded buffer of a gather or a scatter, the input of the
    others.
    """
    n = shapes.ranks(axes)
    if kind == "reduce_scatter":
        payload = shapes.first(axes).bytes(after) * n
    elif kind == "all_gather":
        payload = shapes.first(axes).bytes(before) * n
    elif kind == "all_to_all" and shapes.crowded is not None:  # the fullest rank sends or receives the most
        payload = most(shapes.bytes(before), shapes.bytes(after))
    else:
        payload = shapes.bytes(before)
    used = (n > 1) * 1
    dtype = after.dtype
    return Collective(kind, axes, phase, what, dtype, n, used, payload * used, wire_bytes(kind, payload, n))


def exchange(
    t: Recorder,
    kind: str,
    axes: tuple[str, ...],
    source: Tensor,
    after: Tensor,
    *,
    what: str = "activations",
    times: Any = 1,
) -> None:
    """Exchanges of buffers as they lie, `times` one after the other."""
    node = collective(t.shapes, kind, axes, source, after, t.phase, what)
    _send(t, (source,), (after, *_scratch(t, node)), node.times(times))


def carry_out(t: Recorder, move: Move, source: Tensor, what: str | None) -> None:
    """One move of a reshard, of the tensor `source`, as an engine does it."""
    what = what or (source.category if source.category in ("params", "grads") else "activations")
    kind, after = move.kind, move.after
    node = collective(t.shapes, kind, move.axes, move.before, after, t.phase, what)
    scratch = _scratch(t, node)
    of_experts = "E" in source.dims and "N" in source.dims  # slots lie as they are sent
    if not t.conventions.dtensor or kind == "all_reduce" or what in ("params", "grads") or of_experts:
        _send(t, (source,), (after, *scratch), node)
        return
    if kind == "all_to_all":  # the pieces for each rank lie one after the other
        t.emit("copy", (source,), (packed := source.like(),))
        _send(t, (packed,), (arrived := after.like(),), node)
        t.emit("copy", (arrived,), (after,))
        return
    if kind == "reduce_scatter":  # DTensor chunks a dim other than 0 into a copy
        t.emit("copy", (source,), (copy := source.like(),))
        _send(t, (source, copy), (after, *scratch), node)
        return
    dim = source.dims.index(places(source.split)[move.axes[0]])
    outer = t.shapes.elements(source.dims[:dim], source.split)
    raw = after.like(factor=(outer > 1) * 1)
    _send(t, (source,), (raw, *scratch), node)
    t.emit("copy", (raw,), (after,))


def _send(t: Recorder, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], node: Collective) -> None:
    """Beside the compute, where the engine does so."""
    kind = node.kind
    if t.conventions.tp_behind == "all" and _of_tensor_parallelism(node):
        node = replace(node, behind="product")
    elif t.conventions.ep_behind and kind == "all_to_all" and "ep" in node.axes:
        node = node.started(node.phase, EXPERTS_STREAM, EXPERTS_TICKET)
    t.record(kind, reads, writes, node)


def _of_tensor_parallelism(node: Any) -> bool:
    return isinstance(node, Collective) and node.axes == ("tp",) and node.kind in ("all_gather", "reduce_scatter")


def _of_a_linear_backward(node: Any) -> bool:
    return isinstance(node, Collective) and node.axes == ("tp",) and node.what == "activations"


def beside_products(t: Recorder) -> None:
    """Of what has been recorded, the exchanges that run beside products.

    Where an engine cuts a product's `own` into pieces: a reduce-scatter that reads a product, and a gather that a
    product reads, as it is or in a copy (torch/_inductor/fx_passes/micro_pipeline_tp.py: `_find_producer_matmul`,
    `_find_consumer_matmuls`). Where it has two products of a backward, one beside an exchange that only the other
    waits for: what forward kept is gathered, and an input's gradient is summed (Megatron-LM, tensor_parallel/layers.py:
    `LinearWithGradAccumulationAndAsyncCommunication.backward`; Transformer Engine's linear layers do the same).
    """
    if t.conventions.tp_behind == "weights":
        of_forward = {x for op in t.forward for x in op.writes}
        for i, op in enumerate(t.backward):
            gathers = isinstance(op.node, Collective) and op.node.kind == "all_gather"
            if _of_a_linear_backward(op.node) and (not gathers or op.reads[0] in of_forward):
                t.backward[i] = replace(op, node=replace(op.node, behind="product"))  # type: ignore[type-var]
    if t.conventions.tp_behind != "own":
        return
    for ops in (t.forward, t.backward):
        made = {x: op for op in ops for x in op.writes}
        read: defaultdict[Tensor, list[Op]] = defaultdict(list)
        for op in ops:
            for x in op.reads:
                read[x].append(op)
        for i, op in enumerate(ops):
            if _of_tensor_parallelism(op.node):
                ends = _makers(op, made) if op.node.kind == "reduce_scatter" else _readers(op, read)  # type: ignore[union-attr]
                if any(isinstance(e.node, Compute) and e.node.shape and not e.node.attention for e in ends):
                    ops[i] = replace(op, node=replace(op.node, behind="product"))  # type: ignore[type-var]


def _makers(op: Op, made: Mapping[Tensor, Op]) -> list[Op]:
    """What made that which an operation sends, before it was copied."""
    maker = made.get(op.reads[0])
    return [] if maker is None else _makers(maker, made) if maker.name == "copy" else [maker]


def _readers(op: Op, read: Mapping[Tensor, list[Op]]) -> list[Op]:
    """What reads that which an operation wrote, or a copy of it."""
    found = []
    for reader in (each for x in op.writes for each in read.get(x, ())):
        found += _readers(reader, read) if reader.name == "copy" else [reader]
    return found


def _scratch(t: Recorder, node: Collective) -> tuple[Tensor, ...]:
    """What the library that exchanges takes of its own meanwhile."""
    c = t.conventions
    if (node.kind == "all_gather" and c.gather_copies) or (node.kind == "reduce_scatter" and c.reduce_copies):
        return (t.buffer("the library's copy", node.payload_bytes),)
    return ()
