"""Who is held when: a tensor from its first write to its last use. What forward writes and backward reads is thereby
saved.

Recompute is the forward pass again with dead code eliminated: what is not kept is written once more at the start of
backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from nanum.conventions import EVERYTHING, NOTHING, Kept
from nanum.operators.recorder import Op
from nanum.program import Collective, Compute, Held, Node, Repeat
from nanum.sharding import Shapes, Tensor


def lifetimes(
    shapes: Shapes, ops: Sequence[Op], born: Mapping[Tensor, int | None], last: Mapping[Tensor, int | None]
) -> tuple[Node, ...]:
    """The operations with what they hold and release. `born` and `last` fix what enters or leaves the scope (None: held
    elsewhere).

    Raises ValueError where an operation reads what is written later.
    """
    first: dict[Tensor, int | None] = dict(born)
    final: dict[Tensor, int | None] = {}
    for i, op in enumerate(ops):
        for t in op.reads:
            if t.category != "params" and t.dtype != "onehot" and t not in first:
                raise ValueError(f"{op.name} reads {t.name}, which nothing has written")
            final[t] = i
        for t in op.writes:
            first.setdefault(t, i)
            final[t] = i
    final.update(last)
    holds: dict[int, list[Held]] = {}
    frees: dict[int, list[Held]] = {}
    for t, begin in first.items():
        if begin is not None:
            holds.setdefault(begin, []).append(Held(t.category, shapes.bytes(t), t.name))  # type: ignore[arg-type]
        end = final.get(t, begin)
        if end is not None:
            frees.setdefault(end, []).append(Held(t.category, -shapes.bytes(t), t.name))  # type: ignore[arg-type]
    nodes: list[Node] = []
    for i, op in enumerate(ops):
        nodes += holds.get(i, ())
        if op.node is not None:
            nodes.append(op.node)
        nodes += frees.get(i, ())
    return tuple(nodes)


def recomputed(forward: Sequence[Op], backward: Sequence[Op], kept: Kept, *, stops_early: bool) -> list[Op]:
    """The forward operations to run again before `backward`, in their order.

    A full run (nothing was kept) that `stops_early` ends at the last tensor that backward reads, else at its end. A
    partial one runs what backward needs and did not keep, and what that needs in turn.
    """
    if kept == EVERYTHING:
        return []
    used = {t for op in backward for t in op.reads}
    if kept == NOTHING:
        again = _from_the_start(forward, used, stops_early=stops_early)
    else:
        again = _what_is_needed(forward, used, kept)
    return [replace(op, node=op.node and _again(op.node)) for op in map(_without_numbers, again)]


N = TypeVar("N", bound=Node)


def _again(node: N) -> N:
    if isinstance(node, Repeat):
        return replace(node, body=tuple(map(_again, node.body)))
    return replace(node, phase="recompute") if isinstance(node, Compute | Collective) else node


def _without_numbers(op: Op) -> Op:
    """Numbers that autograd saves stay from the first run (torch.utils.checkpoint hooks do not see them)."""
    numbers = any(t.dtype == "number" for t in op.writes)
    return replace(op, writes=tuple(t for t in op.writes if t.dtype != "number")) if numbers else op


def _from_the_start(forward: Sequence[Op], used: set[Tensor], *, stops_early: bool) -> list[Op]:
    stop = len(forward)
    if stops_early:
        stop = max(i for i, op in enumerate(forward) if used.intersection(op.writes)) + 1
    later = {t for op in forward[stop:] for t in op.writes}
    # What its frames hold is freed when the run is stopped.
    frames = tuple(t for op in forward[stop:] if not op.writes for t in op.reads if t not in later)
    return [*forward[:stop], Op("stop", frames, ())] if frames else list(forward[:stop])


def _region(op: Op, kept: Kept) -> tuple[str, ...]:
    """The outermost region of an operation that is run again, by what it is in, and its own name last."""
    named = (i for i, name in enumerate(op.regions) if name in kept.rerun or name in kept.remade)
    return op.regions[: next(named, -1) + 1]


def _what_is_needed(forward: Sequence[Op], used: set[Tensor], kept: Kept) -> list[Op]:
    region = {op: _region(op, kept) for op in forward}
    rerun = {op for op in forward if not kept.rerun.isdisjoint(region[op][-1:])}
    read_in: dict[Tensor, set[tuple[str, ...]]] = {}
    for op in forward:
        for t in op.reads:
            read_in.setdefault(t, set()).add(region[op])
    there = {
        t for op in forward if not region[op] and (kept.outputs is None or op.name in kept.outputs) for t in op.writes
    }
    there |= {t for op in rerun for t in op.writes if read_in.get(t, set()) - {region[op]}}  # a region's results
    needed = used - there
    chosen: list[Op] = []
    for op in reversed(forward):
        if op in rerun or (needed.intersection(op.writes) and not there.issuperset(op.writes)):
            # What a region makes again of its kept results is another copy.
            copies = tuple(t.like() if t in there and op in rerun else t for t in op.writes)
            chosen.append(replace(op, writes=copies))
            needed |= {t for t in op.reads if t not in there}
    return chosen[::-1]


def _in_turn(again: Sequence[Op], backward: Sequence[Op], kept: Kept) -> list[Op]:
    """Backward, with each region of what is run again before the first operation that reads what it makes."""
    regions: dict[tuple[str, ...], list[Op]] = {}
    for op in again:
        regions.setdefault(_region(op, kept), []).append(op)
    first = {t: i for i, op in reversed(list(enumerate(backward))) for t in op.reads}
    at: dict[tuple[str, ...], int] = {}
    for name, ops in reversed(regions.items()):
        at[name] = min((first[t] for op in ops for t in op.writes if t in first), default=len(backward))
        first |= {t: min(at[name], first.get(t, at[name])) for op in ops for t in op.reads}
    turns = [[op for name, ops in regions.items() if at[name] == i for op in ops] for i in range(len(backward) + 1)]
    return [op for turn, then in zip(turns, [[op] for op in backward] + [[]], strict=True) for op in (*turn, *then)]


def split_step(
    shapes: Shapes,
    forward: Sequence[Op],
    backward: Sequence[Op],
    *,
    kept: Kept,
    stops_early: bool,
    enters: Iterable[Tensor] = (),
    leaves: Iterable[Tensor] = (),
    enters_back: Iterable[Tensor] = (),
    leaves_back: Iterable[Tensor] = (),
    stays_on: Iterable[Tensor] = (),
    borrowed: Iterable[Tensor] = (),
) -> tuple[tuple[Node, ...], tuple[Node, ...], frozenset[Tensor]]:
    """Forward and backward of one body as Program nodes, and what the one saves for the other, or needs kept of what is
    borrowed.

    `enters` are owned from the first operation, `leaves` handed out after the last; `stays_on` is not released by
    backward (a weight's gradient, the logits that a caller's frame holds). What is `borrowed` is held elsewhere.
    """
    forward, backward = _stacked(shapes, forward, backward, kept)
    elsewhere: dict[Tensor, Any] = dict.fromkeys(borrowed)
    enters, leaves, enters_back, leaves_back = (tuple(x) for x in (enters, leaves, enters_back, leaves_back))
    again = recomputed(forward, backward, kept, stops_early=stops_early)
    back = _in_turn(again, backward, kept) if kept.in_turn else [*again, *backward]
    if again and enters:  # a checkpoint's input lives until the last of what was made again is freed
        made = {t for op in again for t in op.writes}
        end = max((i for i, op in enumerate(back) if made.intersection(op.reads)), default=len(again) - 1)
        back[end] = replace(back[end], reads=(*back[end].reads, *enters))
    written = {t for op in forward for t in op.writes} | set(enters)
    again_written = {t for op in again for t in op.writes}
    saved = {t for op in back for t in op.reads if t in written and t not in again_written} | {
        t for t in stays_on if t in written
    }
    unneeded = {
        t: 0 if passed else len(back) - 1 for t, passed in _kept_by_name(forward, again, kept) if t not in saved
    }
    saved |= unneeded.keys()
    ahead: dict[Tensor, Any] = dict.fromkeys(saved)
    f = lifetimes(
        shapes,
        forward,
        {**elsewhere, **dict.fromkeys(enters, 0)},
        {**{t: len(forward) - 1 for t in leaves if t not in saved}, **ahead, **elsewhere},
    )
    b = lifetimes(
        shapes,
        back,
        {**ahead, **dict.fromkeys(enters_back, 0), **elsewhere},
        {**unneeded, **{t: len(back) - 1 for t in leaves_back}, **dict.fromkeys(stays_on), **elsewhere},
    )
    return f, b, frozenset(saved | {t for op in back for t in op.reads if t in elsewhere})


def _stacked(
    shapes: Shapes, forward: Sequence[Op], backward: Sequence[Op], kept: Kept
) -> tuple[Sequence[Op], Sequence[Op]]:
    """What each round of a loop made, where it is kept by the loop's name, in place of what one round makes."""
    loops = [op for op in forward if op.name in (kept.outputs or ()) and isinstance(op.node, Repeat)]
    many = {t: t.like(size=shapes.bytes(t) * op.node.count) for op in loops for t in op.writes if t.dims}  # type: ignore[union-attr]
    if not many:
        return forward, backward

    def of_all(ops: Sequence[Op]) -> list[Op]:
        return [
            replace(op, reads=tuple(many.get(t, t) for t in op.reads), writes=tuple(many.get(t, t) for t in op.writes))
            for op in ops
        ]

    return of_all(forward), of_all(backward)


def _kept_by_name(forward: Sequence[Op], again: Sequence[Op], kept: Kept) -> list[tuple[Tensor, bool]]:
    """What selective recompute keeps by its operation's name, needed or not, and whether the second run comes past it:
    there it lets go of it, else with the layer (torch.utils.checkpoint: a stack of results for each operation).
    """
    if not again or not kept.outputs:
        return []
    last = max((i for i, op in enumerate(forward) if set(op.writes) & set(again[-1].writes)), default=-1)
    return [(t, i <= last) for i, op in enumerate(forward) if op.name in kept.outputs for t in op.writes if t.dims]
