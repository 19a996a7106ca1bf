"""Sharding is stated, communication is derived: the rules one by one, and the numbers that come out on a mesh of ranks.

The mesh of the last part is simulated: every rank holds its shards as arrays, the derived exchanges move them between
ranks, and what they hold in the end is compared with the product of the whole operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum.sharding import Contraction, Shapes, Split, Tensor, arrange, contract, frozen, places, reshard

ORDER = ("reduce_scatter", "all_reduce", "all_to_all", "all_gather")
X: tuple[str, ...] = ("x",)


def tensor(dims: str, split: Split | None = None, **given: Any) -> Tensor:
    return Tensor("t", tuple(dims), split or {}, given.pop("dtype", "bf16"), **given)


def moved(t: Tensor, goal: Split, **how: Any) -> list[tuple[str, tuple[str, ...]]]:
    return [(move.kind, move.axes) for move in reshard(t, goal, **how)[1]]


# --- a product, axis by axis: in[i, k] . weight[k, j] -> out[i, j] ----------------------------------------------------
def matmul(a: Split, b: Split, want: Split, **of_b: Any) -> tuple[Contraction, list[str], list[str]]:
    """The contraction, and the kinds of exchange that bring its operands to where it needs them."""
    left, right = tensor("ik", a), tensor("kj", b, **of_b)
    c = contract(left, right, ("i", "j"), want)
    return c, [kind for kind, _ in moved(left, c.left)], [kind for kind, _ in moved(right, c.right)]


def test_a_kept_dim_stays_split() -> None:
    for a, b, split in (({"i": X}, {}, {"i": X}), ({}, {"j": X}, {"j": X})):
        c, of_a, of_b = matmul(a, b, split)
        assert (of_a, of_b, places(c.split), c.partial) == ([], [], places(split), ())


def test_a_batch_dim_split_alike_stays_split() -> None:
    a, b = tensor("gik", {"g": X}), tensor("gkj", {"g": X})
    c = contract(a, b, ("g", "i", "j"), {"g": X})
    assert (moved(a, c.left), moved(b, c.right), frozen(c.split), c.partial) == ([], [], (("g", X),), ())


def test_an_operand_split_alone_on_the_contracted_dim_is_gathered() -> None:
    c, of_a, of_b = matmul({"k": X}, {}, {})
    assert (of_a, of_b, frozen(c.split), c.partial) == (["all_gather"], [], (), ())
    c, of_a, of_b = matmul({}, {"k": X}, {})
    assert (of_a, of_b, frozen(c.split), c.partial) == ([], ["all_gather"], (), ())


@pytest.mark.parametrize(("want", "kind"), [({}, "all_reduce"), ({"i": X}, "reduce_scatter")])
def test_operands_split_alike_on_the_contracted_dim_leave_a_sum(want: Split, kind: str) -> None:
    c, of_a, of_b = matmul({"k": X}, {"k": X}, want)
    assert (of_a, of_b, frozen(c.split), c.partial) == ([], [], (), X)
    assert moved(tensor("ij", c.split, partial=c.partial), want) == [(kind, X)]


def test_of_two_kept_dims_over_one_axis_the_wanted_one_stays() -> None:
    c, of_a, of_b = matmul({"i": X}, {"j": X}, {"i": X})
    assert (of_a, of_b, places(c.split)) == ([], ["all_gather"], {"x": "i"})
    c, of_a, of_b = matmul({"i": X}, {"j": X}, {"j": X})
    assert (of_a, of_b, places(c.split)) == (["all_gather"], [], {"x": "j"})
    c, of_a, of_b = matmul({"i": X}, {"j": X}, {})
    assert (of_a, of_b, places(c.split)) == (["all_gather"], ["all_gather"], {})


def test_a_whole_operand_is_cut_to_the_part_of_the_result_that_is_wanted() -> None:
    c, of_a, of_b = matmul({}, {}, {"i": X})
    assert (of_a, of_b, places(c.left), places(c.split)) == ([], [], {"x": "i"}, {"x": "i"})
    pending = tensor("ik", partial=X)  # a sum too: it is scattered, not carried out whole
    assert moved(pending, contract(pending, tensor("kj"), ("i", "j"), {"i": X}).left) == [("reduce_scatter", X)]


def test_a_weight_stays_on_its_model_axis() -> None:
    """Column-parallel: in[i_x, k] is gathered. Row-parallel: it goes to where the weight lies, and leaves a sum."""
    c, of_a, of_b = matmul({"i": X}, {"j": X}, {"i": X}, stays=X)
    assert (of_a, of_b, places(c.split), c.partial) == (["all_gather"], [], {"x": "j"}, ())
    c, of_a, of_b = matmul({"i": X}, {"k": X}, {"i": X}, stays=X)
    assert (of_a, of_b, places(c.split), c.partial) == (["all_to_all"], [], {}, X)
    c, of_a, of_b = matmul({}, {"k": X}, {}, stays=X)
    assert (of_a, of_b, places(c.split), c.partial) == ([], [], {}, X)  # a slice of what is whole is free


def test_axes_are_decided_one_by_one() -> None:
    """A row-parallel product under FSDP: the sum over tp is left, and the weight is gathered over dp_shard alone."""
    a, b = {"i": ("dp_shard",), "k": ("tp",)}, {"k": ("tp", "dp_shard")}
    c, of_a, of_b = matmul(a, b, {"i": ("dp_shard",)}, stays=("tp",))
    assert (of_a, of_b, places(c.split), c.partial) == ([], ["all_gather"], {"dp_shard": "i"}, ("tp",))
    assert moved(tensor("kj", b), c.right) == [("all_gather", ("dp_shard",))]


# --- an exchange ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("t", "goal", "moves"),
    [
        pytest.param(tensor("ij", {"i": X}), {"i": X}, [], id="there already"),
        pytest.param(tensor("ij"), {"i": X}, [], id="a slice"),
        pytest.param(tensor("ij", {"i": X}), {}, [("all_gather", X)], id="wanted whole"),
        pytest.param(tensor("ij", {"i": X}), {"j": X}, [("all_to_all", X)], id="another dim"),
        pytest.param(tensor("ij", partial=X), {}, [("all_reduce", X)], id="a sum"),
        pytest.param(tensor("ij", partial=X), {"i": X}, [("reduce_scatter", X)], id="a sum wanted split"),
        pytest.param(
            tensor("ij", {"i": ("x", "y")}), {}, [("all_gather", ("x", "y"))], id="two axes are gathered at once"
        ),
        pytest.param(
            tensor("ij", {"i": ("x", "y"), "j": ("z",)}, partial=("v", "w")),
            {"j": ("w", "x")},
            [("reduce_scatter", ("w",)), ("all_reduce", ("v",)), ("all_to_all", X), ("all_gather", ("y", "z"))],
            id="all of it",
        ),
    ],
)
def test_what_is_exchanged(t: Tensor, goal: Split, moves: list[tuple[str, tuple[str, ...]]]) -> None:
    assert moved(t, goal) == moves


def test_only_the_named_sums_are_carried_out() -> None:
    t = tensor("ij", partial=("x", "y"))
    new, moves = reshard(t, {"i": ("y",)}, only=X)
    assert ([move.kind for move in moves], new.partial) == (["all_reduce"], ("y",))
    new, moves = reshard(t, {}, only=())
    assert (moves, new) == ([], t)


def test_an_exchange_is_in_the_dtype_that_is_asked_for() -> None:
    """As a weight's gradient, reduced in fp32: what is exchanged and what is kept."""
    new, (move,) = reshard(tensor("ij", partial=X), {"i": X}, dtype="fp32")
    assert (move.before.dtype, move.after.dtype, new.dtype) == ("fp32", "fp32", "fp32")
    shapes = Shapes({"x": 4}, {"i": 8, "j": 3})
    assert (shapes.bytes(move.before), shapes.bytes(move.after)) == (8 * 3 * 4, 2 * 3 * 4)
    new, moves = reshard(tensor("ij"), {}, dtype="fp32")  # a cast alone
    assert (new.dtype, moves) == ("fp32", [])


def test_shapes_pad_what_does_not_divide() -> None:
    shapes = Shapes({"x": 4, "y": np.array([1, 3])}, {"v": 1003, "h": 8})
    assert shapes.part("v", ()) == 1003
    assert shapes.part("v", X) == 251  # 4 x 251 = 1004
    assert shapes.part("v", ("x", "y")).tolist() == [251, 84]
    assert shapes.ranks(("x", "y")).tolist() == [4, 12]
    assert shapes.elements(("v", "h"), {"v": X}) == 251 * 8
    assert shapes.bytes(tensor("vh", {"v": X})) == 251 * 8 * 2
    assert shapes.bytes(tensor("vh", {"v": X}, dtype="fp32", factor=np.array([0, 1]))).tolist() == [0, 251 * 8 * 4]
    assert shapes.bytes(tensor("", size=7)) == 7
    assert shapes.bytes(tensor("vh", dtype="onehot")) == 0  # token ids are never made one-hot


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_the_ranks_of_a_dim_have_all_of_it_the_first_ones_the_most(size: int, tp: int, shard: int, cp: int) -> None:
    """Chunks of tp, each cut over the flattened ranks of dp_shard and cp: equal ones, what is left, then nothing."""
    mesh, axes = {"tp": tp, "dp_shard": shard, "cp": cp}, ("tp", "dp_shard", "cp")
    first = Shapes(mesh, {"v": size})

    def parts(of: tuple[str, ...], **at: int) -> list[int]:
        places = product(*(range(mesh[a]) for a in of))
        return [
            Shapes(mesh, {"v": size}, {**at, **dict(zip(of, place, strict=True))}).part("v", axes) for place in places
        ]

    assert parts(())[0] == first.part("v", axes)
    rows = [Shapes(mesh, {"v": size}, {"tp": i}).part("v", ("tp",)) for i in range(tp)]
    for i, whole in [(None, size), *enumerate(rows)]:
        chunks = rows if i is None else parts(("dp_shard", "cp"), tp=i)
        full = -(-whole // len(chunks))
        assert sum(chunks) == whole
        assert chunks == [min(full, max(0, whole - full * j)) for j in range(len(chunks))]
    last = Shapes(mesh, {"v": size}, {axis: n - 1 for axis, n in mesh.items()})
    assert last.first(axes).part("v", axes) == first.part("v", axes)
    assert last.first(("dp_shard", "cp")).part("v", axes) == parts((), tp=tp - 1)[0]


def test_arrange_keeps_the_order_in_which_axes_are_listed() -> None:
    assert arrange({"x": "i", "y": "i", "z": "j"}, {"i": ("y", "x")}, {"j": ("z", "x")}) == {
        "i": ("y", "x"),
        "j": ("z",),
    }
    assert arrange({"x": "j"}, {"i": ("x", "y")}) == {"j": X}
    assert arrange({}, {"i": X}) == {}


# --- any exchange, on a mesh of ranks ---------------------------------------------------------------------------------
MESH = {"x": 2, "y": 3}
RANKS = tuple(product(*map(range, MESH.values())))
DIMS = {"g": 6, "i": 12, "k": 6, "j": 6}

# Each dim is an array axis for each mesh axis, and one for the rest: index = (place on x, place on y, within). A rank
# holds, of a dim that x splits, what has its own place on x: whichever axes split it else, and in whichever order.
Local = dict[tuple[int, ...], np.ndarray]  # by rank


def digit(dims: tuple[str, ...], dim: str, axis: str) -> int:
    """The array axis that stands for `axis` in `dim`."""
    return dims.index(dim) * (len(MESH) + 1) + list(MESH).index(axis)


def whole(random: np.random.Generator, dims: tuple[str, ...]) -> np.ndarray:
    return random.integers(-9, 10, [n for d in dims for n in (*MESH.values(), DIMS[d] // prod(MESH.values()))])


def own(block: np.ndarray, rank: tuple[int, ...], dims: tuple[str, ...], at: Mapping[str, str]) -> np.ndarray:
    """What of a block `rank` keeps where the axes `at` newly split its dims."""
    for axis, dim in at.items():
        place = rank[list(MESH).index(axis)]
        block = block.take([place], axis=digit(dims, dim, axis))
    return block


def shards(array: np.ndarray, t: Tensor, random: np.random.Generator) -> Local:
    """What each rank holds of `t`; of a pending sum, addends."""
    found = {rank: own(array, rank, t.dims, places(t.split)) for rank in RANKS}
    for axis in t.partial:
        for first in (rank for rank in RANKS if rank[list(MESH).index(axis)] == 0):
            for other in group(first, (axis,))[1:]:
                addend = random.integers(-9, 10, found[other].shape)
                found[first], found[other] = found[first] - addend, addend
    return found


def group(rank: tuple[int, ...], axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """The ranks that differ from `rank` in their place on `axes` alone."""
    fixed = [i for i, axis in enumerate(MESH) if axis not in axes]
    return [other for other in RANKS if all(other[i] == rank[i] for i in fixed)]


def gathered(held: Local, rank: tuple[int, ...], dims: tuple[str, ...], at: Mapping[str, str]) -> np.ndarray:
    """What `rank` has from its group once all have sent it all, of dims that the axes `at` split."""
    if not at:
        return held[rank]
    axis, dim = next(iter(at.items()))
    rest = {a: d for a, d in at.items() if a != axis}
    pieces = [gathered(held, other, dims, rest) for other in group(rank, (axis,))]
    return np.concatenate(pieces, axis=digit(dims, dim, axis))


def summed(held: Local, rank: tuple[int, ...], axes: tuple[str, ...]) -> np.ndarray:
    return np.sum([held[other] for other in group(rank, axes)], axis=0)


def exchanged(t: Tensor, held: Local, goal: Split) -> tuple[Tensor, Local]:
    """`t` on every rank, taken to `goal` by what `reshard` says must be exchanged, and by nothing else."""
    new, moves = reshard(t, goal)
    shapes = Shapes(MESH, DIMS)
    do: dict[str, Callable[[tuple[int, ...], Any, Any, Any], np.ndarray]] = {
        "reduce_scatter": lambda rank, axes, old, at: own(summed(held, rank, axes), rank, t.dims, at),
        "all_reduce": lambda rank, axes, old, at: summed(held, rank, axes),
        "all_to_all": lambda rank, axes, old, at: own(gathered(held, rank, t.dims, old), rank, t.dims, at),
        "all_gather": lambda rank, axes, old, at: gathered(held, rank, t.dims, old),
    }
    at = places(t.split)
    for move in moves:
        before, after = places(move.before.split), places(move.after.split)
        assert before == at
        assert {h.size for h in held.values()} == {shapes.elements(t.dims, move.before.split)}
        old = {a: before[a] for a in move.axes if a in before}
        gained = {a: after[a] for a in move.axes if a in after}
        held = {rank: do[move.kind](rank, move.axes, old, gained) for rank in RANKS}
        assert {h.size for h in held.values()} == {shapes.elements(t.dims, move.after.split)}
        at = after
    wanted = places(goal)
    assert at.items() <= wanted.items()  # what is left to do is to slice
    return new, {
        rank: own(held[rank], rank, t.dims, {a: d for a, d in wanted.items() if a not in at}) for rank in RANKS
    }


@st.composite
def splits(draw: st.DrawFn, dims: tuple[str, ...], axes: tuple[str, ...] = tuple(MESH)) -> Split:
    """Each axis splits one of the dims, or none; where two split one dim, either may be the outer."""
    at = {axis: draw(st.sampled_from((None, *dims))) for axis in draw(st.permutations(axes))}
    return {dim: tuple(a for a, d in at.items() if d == dim) for dim in dims if dim in at.values()}


@st.composite
def tensors(draw: st.DrawFn, dims: tuple[str, ...], **fixed: Any) -> Tensor:
    """A tensor that is split over some of the axes, and over some others is a sum that is pending."""
    partial = tuple(axis for axis in MESH if draw(st.booleans()))
    split = draw(splits(dims, tuple(axis for axis in MESH if axis not in partial)))
    return Tensor("t", dims, split, "fp32", partial, **fixed)


seeds = st.integers(0, 2**32 - 1)


@given(tensors(("i", "j")), splits(("i", "j")), st.none() | st.sets(st.sampled_from(tuple(MESH))).map(tuple))
def test_a_reshard_ends_where_it_is_wanted_in_the_order_of_its_kinds(t: Tensor, goal: Split, only: Any) -> None:
    pending = () if only is None else tuple(a for a in t.partial if a not in only)
    goal = {d: axes for d in goal if (axes := tuple(a for a in goal[d] if a not in pending))}
    new, moves = reshard(t, goal, only=only)
    assert frozen(new.split) == frozen(goal)
    assert new.partial == pending
    kinds = [move.kind for move in moves]
    assert kinds == [kind for kind in ORDER if kind in kinds]
    ends = [(frozen(move.before.split), frozen(move.after.split)) for move in moves]
    assert [before for before, _ in ends] == [frozen(t.split), *(after for _, after in ends)][: len(ends)]


@given(tensors(("i", "j")), splits(("i", "j")), seeds)
def test_an_exchange_leaves_each_rank_its_part_of_the_whole(t: Tensor, goal: Split, seed: int) -> None:
    random = np.random.default_rng(seed)
    array = whole(random, t.dims)
    new, held = exchanged(t, shards(array, t, random), goal)
    for rank in RANKS:
        assert np.array_equal(held[rank], own(array, rank, t.dims, places(goal))), rank
    assert new.partial == ()


@st.composite
def products(draw: st.DrawFn) -> tuple[Tensor, Tensor, Split]:
    """Of activations and a weight, with a dim that both have, one that is contracted, and one of each one's own."""
    stays = tuple(axis for axis in MESH if draw(st.booleans()))
    return draw(tensors(("g", "i", "k"))), draw(tensors(("g", "k", "j"), stays=stays)), draw(splits(("g", "i", "j")))


@given(products(), seeds)
def test_a_product_of_shards_is_the_product(operands: tuple[Tensor, Tensor, Split], seed: int) -> None:
    """The strongest of them: whatever the splits, the derived exchanges give the right numbers on every rank."""
    a, b, want = operands
    random = np.random.default_rng(seed)
    whole_a, whole_b = whole(random, a.dims), whole(random, b.dims)
    letters = {"g": "abc", "i": "def", "k": "klm", "j": "nop"}
    out = ("g", "i", "j")
    subscripts = ["".join(letters[d] for d in dims) for dims in (a.dims, b.dims, out)]
    multiply = "{},{}->{}".format(*subscripts)

    c = contract(a, b, out, want)
    _, left = exchanged(a, shards(whole_a, a, random), c.left)
    _, right = exchanged(b, shards(whole_b, b, random), c.right)
    for d in ("g", "k"):  # a broadcast would hide that operands do not lie alike
        assert set(c.left.get(d, ())) == set(c.right.get(d, ()))
    pending = {rank: np.einsum(multiply, left[rank], right[rank]) for rank in RANKS}
    _, held = exchanged(Tensor("out", out, c.split, "fp32", c.partial), pending, want)

    truth = np.einsum(multiply, whole_a, whole_b)
    for rank in RANKS:
        assert np.array_equal(held[rank], own(truth, rank, out, places(want))), rank
