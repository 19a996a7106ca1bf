"""Who is held when: a tensor from its first write to its last use. What forward writes and backward reads is thereby
saved.

Recompute is the forward pass again with dead code eliminated: what is not kept is written once more at the start of
backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanum.operators.attention import CORE
from nanum.operators.tape import Op
from nanum.program import Held, Mark, Node
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


def recomputed(
    forward: Sequence[Op], backward: Sequence[Op], keeps: frozenset[str] | None, *, stops_early: bool
) -> list[Op]:
    """The forward operations to run again before `backward`, where only outputs of operations named in `keeps` were
    kept.

    `keeps` None keeps everything but what is inside the attention core, which is run again whole though its result was
    kept. A run that `stops_early` ends at the last tensor that backward reads; otherwise a full one runs to its end.
    """
    used = {t for op in backward for t in op.reads}
    kept = {t for op in forward if _keeps(op, keeps) for t in op.writes}
    if not keeps and keeps is not None:  # full: nothing is kept
        stop = (
            max(i for i, op in enumerate(forward) if used.intersection(op.writes)) + 1 if stops_early else len(forward)
        )
        frames = tuple(t for op in forward[stop:] if not op.writes for t in op.reads)  # freed when the run is stopped
        again = [*forward[:stop], Op("stop", frames, ())] if frames else list(forward[:stop])
    else:
        core = {op for op in forward if keeps is None and not _keeps(op, keeps)}
        kept |= {t for op in core for t in op.writes} & {t for op in forward if op not in core for t in op.reads}
        needed = {t for t in used if t not in kept}
        chosen: list[Op] = []
        for op in reversed(forward):
            if op in core or (needed.intersection(op.writes) and not (op.writes and set(op.writes) <= kept)):
                chosen.append(replace(op, writes=tuple(t.like() if t in kept and op in core else t for t in op.writes)))
                needed |= {t for t in op.reads if t not in kept}
        again = chosen[::-1]
    return [
        op if op.node is None or isinstance(op.node, Mark) else replace(op, node=replace(op.node, phase="recompute"))
        for op in again
    ]


def _keeps(op: Op, keeps: frozenset[str] | None) -> bool:
    if keeps is None:
        return op.region != CORE
    return op.name in keeps


def split_step(
    shapes: Shapes,
    forward: Sequence[Op],
    backward: Sequence[Op],
    *,
    keeps: frozenset[str] | str | None,
    stops_early: bool,
    enters: Iterable[Tensor] = (),
    leaves: Iterable[Tensor] = (),
    enters_back: Iterable[Tensor] = (),
    leaves_back: Iterable[Tensor] = (),
    stays_on: Iterable[Tensor] = (),
) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Forward and backward of one body as Program nodes.

    `enters` are owned from the first operation, `leaves` handed out after the last; `stays_on` is not released by
    backward (a weight's gradient, the logits that a caller's frame holds). `keeps` is "all", or as in `recomputed`.
    """
    enters, leaves, enters_back, leaves_back = (tuple(x) for x in (enters, leaves, enters_back, leaves_back))
    again: list[Op] = []
    if keeps != "all":
        again = recomputed(forward, backward, keeps, stops_early=stops_early)  # type: ignore[arg-type]
    back = [*again, *backward]
    if again and enters:  # a checkpoint's input lives until the last of what was made again is freed
        made = {t for op in again for t in op.writes}
        end = max((i for i, op in enumerate(back) if made.intersection(op.reads)), default=len(again) - 1)
        back[end] = replace(back[end], reads=(*back[end].reads, *enters))
    written = {t for op in forward for t in op.writes} | set(enters)
    again_written = {t for op in again for t in op.writes}
    saved = {t for op in back for t in op.reads if t in written and t not in again_written} | {
        t for t in stays_on if t in written
    }
    ahead: dict[Tensor, Any] = dict.fromkeys(saved)
    f = lifetimes(
        shapes, forward, dict.fromkeys(enters, 0), {**{t: len(forward) - 1 for t in leaves if t not in saved}, **ahead}
    )
    b = lifetimes(
        shapes,
        back,
        {**ahead, **dict.fromkeys(enters_back, 0)},
        {**{t: len(back) - 1 for t in leaves_back}, **dict.fromkeys(stays_on)},
    )
    return f, b
