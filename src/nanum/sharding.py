"""Sharding is stated, communication is derived.

A tensor's dims carry the mesh axes they are split over, as in `In[B_dp, S_cp, D] . W[D, F_tp] -> Out[B_dp, S_cp,
F_tp]`. `contract` decides, for each axis on its own, how two operands must lie for a product; `reshard` is the only
place where a collective is born. The backward pass obeys the same two functions (`dX = dY . W`, `dW = X . dY`), so that
data parallelism's gradient reduction is nothing but the pending sum of `dW` over the axes that split the batch.

Sizes are ints, or arrays over many layouts: nothing here branches on one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any

from nanum.arrays import ceiling
from nanum.dtypes import bytes_of

Split = Mapping[str, tuple[str, ...]]
"""dim -> the axes it is split over, outermost first."""

BATCH_AXES = ("dp_replicate", "dp_shard")
"""The axes that split sequences between ranks."""
ZERO_AXES = ("dp_shard", "cp")
"""The axes over which ZeRO may split weights, gradients and optimizer states."""

EXPERT_ZERO_AXES = ("edp",)
"""The same, of experts that have a mesh of their own."""


_SAME: Any = object()


@dataclass(frozen=True, eq=False, slots=True)
class Tensor:
    """A tensor of one rank, by its dims and their splits. `partial` names the axes over which it is a sum not yet
    carried out.

    A weight's `stays` are its model axes: how it is computed with, as opposed to how ZeRO stores it. Where both
    operands of a product are split over such an axis on different dims, the weight stays and the activation moves.
    """

    name: str
    dims: tuple[str, ...]
    split: Split
    dtype: str
    partial: tuple[str, ...] = ()
    category: str = "activations"
    stays: tuple[str, ...] = ()
    factor: Any = None  # 0 where a layout does not have it
    size: Any = None  # bytes, of a buffer without dims

    def like(
        self, *, name: str | None = None, split: Split | None = None, dtype: str | None = None,
        partial: tuple[str, ...] | None = None, factor: Any = None, size: Any = _SAME,
    ) -> Tensor:  # fmt: skip
        """The same tensor but for what is given. (A search makes tens of thousands: `dataclasses.replace` would be a
        tenth of it.)
        """
        return Tensor(
            name or self.name, self.dims, self.split if split is None else split, dtype or self.dtype,
            self.partial if partial is None else partial, self.category, self.stays,
            self.factor if factor is None else factor, self.size if size is _SAME else size,
        )  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class Move:
    """One step of a reshard: a collective of `kind` over `axes` takes `before` to `after`, both in the dtype that is
    exchanged.
    """

    kind: str
    axes: tuple[str, ...]
    before: Tensor
    after: Tensor


@dataclass
class Shapes:
    """Global sizes of dims and axes, and what is left of them on one rank.

    Where a dim does not divide, the ranks of an axis differ: `torch.chunk` gives each the ceiling, until nothing is
    left. `at` says which rank is meant, by its index along each axis (0 where it names none); without it, it is the
    first of every axis, which has the most. Sizes may be arrays only then.

    `crowded` has of a dim an axis and a factor: where the axis does not split the dim (any more), the fullest rank has
    so many times its even share of it.
    """

    mesh: Mapping[str, Any]
    dims: dict[str, Any]
    at: Mapping[str, int] | None = None
    crowded: Mapping[str, tuple[str, Any]] | None = None
    _parts: dict[tuple[str, tuple[str, ...]], Any] = field(default_factory=dict)
    _elements: dict[Any, Any] = field(default_factory=dict)
    _firsts: dict[tuple[str, ...], Shapes] = field(default_factory=dict)

    def ranks(self, axes: Iterable[str]) -> Any:
        return prod(self.mesh[a] for a in axes)

    def part(self, dim: str, axes: tuple[str, ...]) -> Any:
        """Size of this rank's shard of `dim`: of the first rank the ceiling, to which torch and Megatron pad."""
        key = dim, axes
        if key not in self._parts:
            if self.at is None:
                self._parts[key] = -(-self.dims[dim] // self.ranks(axes)) if axes else self.dims[dim]
            else:
                self._parts[key] = self._chunk(self.dims[dim], axes)
            if self.crowded and dim in self.crowded and self.crowded[dim][0] not in axes:
                self._parts[key] = ceiling(self._parts[key] * self.crowded[dim][1])
        return self._parts[key]

    def _chunk(self, size: int, axes: tuple[str, ...]) -> int:
        """`torch.chunk`, axis by axis from the outermost; ZeRO's axes are flattened, and cut at once."""
        for level in _levels(axes):
            most = -(-size // self.ranks(level))
            size = max(0, min(most, size - self.index(level) * most))
        return size

    def index(self, axes: Iterable[str]) -> int:
        """Which of the ranks of `axes` is meant, the last axis varying fastest."""
        index = 0
        for axis in axes if self.at else ():
            index = index * self.mesh[axis] + self.at.get(axis, 0)  # type: ignore[union-attr]
        return index

    def first(self, axes: tuple[str, ...]) -> Shapes:
        """The same, seen from the first rank of `axes`: its shards are what every rank of theirs is padded to."""
        if self.at is None or not any(self.at.get(axis) for axis in axes):
            return self
        if axes not in self._firsts:
            at = {axis: index for axis, index in self.at.items() if axis not in axes}
            self._firsts[axes] = Shapes(self.mesh, self.dims, at, self.crowded)
        return self._firsts[axes]

    def shape(self, dims: tuple[str, ...], split: Split) -> tuple[Any, ...]:
        """Of this rank's shard of a tensor."""
        return tuple(self.part(d, split.get(d, ())) for d in dims)

    def elements(self, dims: tuple[str, ...], split: Split) -> Any:
        key = tuple((d, split.get(d, ())) for d in dims)
        if key not in self._elements:
            self._elements[key] = prod(self.part(*k) for k in key)
        return self._elements[key]

    def bytes(self, t: Tensor) -> Any:
        if t.size is not None:
            return t.size
        size = bytes_of(self.elements(t.dims, t.split), t.dtype)
        return size if t.factor is None else size * t.factor


def _levels(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Axes that cut a dim one after the other, ZeRO's together."""
    runs = groupby(axes, lambda axis: axis in ZERO_AXES)
    return [level for zero, run in runs for level in ([tuple(run)] if zero else [(axis,) for axis in run])]


def places(split: Split) -> dict[str, str]:
    """axis -> the dim that it splits."""
    return {axis: dim for dim, axes in split.items() for axis in axes}


def frozen(split: Split) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple(sorted((d, a) for d, a in split.items() if a))


def arrange(at: Mapping[str, str], *orders: Split) -> dict[str, tuple[str, ...]]:
    """The split that puts each axis on dim `at[axis]`, in the order in which `orders` list the axes."""
    out: dict[str, tuple[str, ...]] = {}
    for axis in dict.fromkeys(a for s in orders for axes in s.values() for a in axes):
        if axis in at:
            out[at[axis]] = (*out.get(at[axis], ()), axis)
    return out


def reshard(
    t: Tensor, goal: Split, *, dtype: str | None = None, only: tuple[str, ...] | None = None
) -> tuple[Tensor, list[Move]]:
    """Take `t` to the split `goal`, carrying out its pending sums (or `only` those over the named axes).

    A pending sum that is wanted split is reduce-scattered, else all-reduced; an axis that changes dim is an all-to-all;
    one that is no longer wanted is all-gathered; slicing what is whole costs nothing. `dtype` is the one it is
    exchanged and kept in.
    """
    wanted, at = places(goal), places(t.split)
    due = [a for a in t.partial if only is None or a in only]
    new = t.like(dtype=dtype or t.dtype, partial=tuple(a for a in t.partial if a not in due))
    moves: list[Move] = []
    for kind, axes in (
        ("reduce_scatter", [a for a in due if a in wanted]),
        ("all_reduce", [a for a in due if a not in wanted]),
        ("all_to_all", [a for a in at if wanted.get(a, at[a]) != at[a]]),
        ("all_gather", [a for a in at if a not in wanted]),
    ):
        if not axes:
            continue
        at = {a: d for a, d in at.items() if a not in axes} | {a: wanted[a] for a in axes if a in wanted}
        before, new = new, new.like(split=arrange(at, goal, t.split))
        moves.append(Move(kind, tuple(axes), before, new))
    if frozen(new.split) != frozen(goal):
        new = new.like(split=goal)
    elif not moves and new.dtype == t.dtype:
        new = t
    return new, moves


@dataclass(frozen=True, slots=True)
class Contraction:
    """How two operands must lie, and what their product then is: its split, and the axes over which it is a pending
    sum.
    """

    left: Split
    right: Split
    split: Split
    partial: tuple[str, ...]


def contract(a: Tensor, b: Tensor, dims: tuple[str, ...], want: Split) -> Contraction:
    """`out[dims] = a . b`, wanted in the split `want`, decided for each axis on its own.

    Split alike on a kept dim: nothing to do. Split alike on the contracted dim: a pending sum. Otherwise the wanted
    result says whose split stays, and the other operand is gathered; a weight on one of its model axes always stays.
    """
    goal, pa, pb = places(want), places(a.split), places(b.split)
    to_a: dict[str, str] = {}
    to_b: dict[str, str] = {}
    partial: list[str] = []
    for axis in dict.fromkeys((*pa, *pb, *goal)):
        da, db, spot = pa.get(axis), pb.get(axis), goal.get(axis)
        both = db if db and (da == db or axis in b.stays) else None
        if both:
            to_b[axis] = both
            if both in a.dims:
                to_a[axis] = both
            if both not in dims:
                partial.append(axis)
        elif spot:
            if spot in a.dims:
                to_a[axis] = spot
            if spot in b.dims:
                to_b[axis] = spot
    left, right = arrange(to_a, a.split, want, b.split), arrange(to_b, b.split, want, a.split)
    return Contraction(left, right, {d: left.get(d) or right.get(d, ()) for d in dims}, tuple(partial))
