"""Plain PyTorch's data parallelism beside what real gloo ranks held and exchanged: DDP's buckets, the owners of
ZeRO-1's optimizer, shards that do not divide.

`data/real_states.json` has, for each run, the bytes of parameters and of optimizer states (AdamW's two, and its 4-byte
steps) that each rank held: distinct storages under `parameters()`, and under `optimizer.state`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum import engines
from nanum.account.memory import held_after
from nanum.account.traffic import Key, Total, traffic
from nanum.build import build
from nanum.dtypes import ITEMSIZE
from nanum.engines.torch import on_gloo
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Mlp, Model
from nanum.parallel.buckets import _count
from nanum.parallel.chain import Each
from nanum.parallel.owners import _shares
from nanum.parallel.pipeline import Step
from nanum.rules import broken

STATES = json.loads((Path(__file__).parent / "data" / "real_states.json").read_text(encoding="utf-8"))["runs"]
TORCH = engines.load("torch")
LLAMA = Model(
    "llama", 64, 128, 2, 64, Attention(8, 4, 8), Mlp(96, gated=True, activation="silu"), "rms_norm", "rotary", False
)
GPT = Model(
    "gpt", 64, 128, 2, 64, Attention(8, 8, 8, True, True), Mlp(96, False, "gelu", True), "layer_norm", "learned", False
)
MODELS = {"llama": LLAMA, "gpt": GPT}


def step(
    model: Model, layout: Layout, *, m: int = 1, precision: str = "fp32", cap: float | None = None, **at: int
) -> Step:
    """One step of the rank at `at`, of `m` micro-batches."""
    job = Job(32, layout.micro_batch_size * m * layout.data_ranks, precision)  # type: ignore[arg-type]
    return build(model, job, layout, on_gloo(cap), at.get("pp", 0), at=at)


def rows(step: Step, kind: str, phase: str) -> tuple[int, int]:
    """Calls and bytes."""
    found: list[tuple[Key, Total]] = [each for each in traffic(step.program).items() if each[0].kind == kind]
    totals = [total for key, total in found if key.phase == phase]
    return sum(int(t.calls) for t in totals), sum(int(t.payload_bytes) for t in totals)


# --- what ranks hold --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", STATES)
def test_states_of_real_ranks(name: str) -> None:
    run = STATES[name]
    model = replace(MODELS[run["model"]], **run["sizes"])
    layout = Layout(**run["mesh"], micro_batch_size=2, structure=Structure(**run["structure"]))
    for rank, (params, states) in enumerate(run["ranks"]):
        place = np.unravel_index(rank, tuple(layout.sizes.values()))
        at = dict(zip(layout.sizes, map(int, place), strict=True))
        held = held_after(step(model, layout, m=run["num_microbatches"], precision=run["precision"], **at).resident)
        assert (held["params"], held["optimizer_states"]) == (params, states), rank


def test_ranks_of_a_run_differ() -> None:
    """Else the coordinates are not looked at."""
    assert sum(len({tuple(held) for held in run["ranks"]}) > 1 for run in STATES.values()) >= 6


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 6))
def test_owners_have_all_parameters_between_them_and_none_much_more(sizes: list[int], ranks: int) -> None:
    """Each goes to the least laden: no rank is ahead of another by more than one parameter."""
    states, counters = tuple(8 * size + 1 for size in sizes), (4,) * len(sizes)
    turns = tuple(Each((), (of_layer,), ()) for of_layer in (tuple(sizes), states, counters))
    shares = _shares(turns, (0,), ranks)
    assert sum(share.elements for share in shares) == sum(sizes)
    assert sum(share.tensors for share in shares) == len(sizes)
    assert sum(share.states_bytes for share in shares) == sum(states)
    assert [share.counters_bytes for share in shares] == [4 * share.tensors for share in shares]
    assert shares[0].largest_elements == max(sizes)
    most, least = (of(share.elements for share in shares) for of in (max, min))
    assert most - least <= max(sizes)


def test_the_first_rank_is_the_one_meant_where_none_is_named() -> None:
    layout = Layout(dp_shard=3, structure=Structure(zero=1))
    named = step(LLAMA, layout, dp_shard=0)
    alone = build(LLAMA, Job(32, 3, "fp32"), layout, on_gloo(), 0)
    assert held_after(named.resident) == held_after(alone.resident)


@pytest.mark.parametrize("sync", ["each", "last"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("zero", "axis"), [(0, "dp_replicate"), (1, "dp_shard"), (3, "dp_shard")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_of_several_micro_batches_leaves_what_it_found(
    precision: str, zero: int, axis: str, tied: bool, sync: Any
) -> None:
    """Under tensor parallelism, where gradients are views into larger ones."""
    layout = Layout(**{axis: 2}, tp=2, structure=Structure(zero=zero, tensor="sequence", grad_sync=sync))
    of = step(replace(LLAMA, tie_word_embeddings=tied), layout, m=3, precision=precision)
    found, left = held_after(of.before_update[:2]), held_after(of.program)
    assert {category: size for category, size in left.items() if size} == found


def test_ddp_holds_a_copy_of_all_gradients_in_its_buckets() -> None:
    one, two = (held_after(step(LLAMA, Layout(dp_replicate=n, structure=Structure(zero=0))).resident) for n in (1, 2))
    assert two["buffers"] - one["buffers"] == one["params"] == two["params"]
    assert two["optimizer_states"] == one["optimizer_states"]


# --- what ranks exchange ----------------------------------------------------------------------------------------------
DDP = Structure(zero=0)


@pytest.mark.parametrize(
    ("first", "later", "sizes", "count"),
    [
        (1, 1, [4, 4, 4], 3),  # each is large enough alone
        (5, 5, [4, 4, 4], 2),  # two, and what is left
        (1, 9, [4, 4, 4, 4], 2),  # a small first one, to begin with
        (4, 9, [1, 1, 4, 4, 4, 4], 3),  # 1 1 4 | 4 4 4 | 4, counted from the last tensor of the model
        (99, 99, [4, 0, 4], 1),
        (1, 1, [0, 0], 0),  # a stage that has none of them
    ],
)
def test_buckets(first: int, later: int, sizes: list[int], count: int) -> None:
    assert _count((Each((), (), tuple(sizes)),), (), (first, later)) == count


def test_tensors_of_a_later_turn_fill_the_bucket_that_is_open() -> None:
    norms, rest = Each((), ((1,),), ()), Each((), ((0, 4),), ())
    assert _count((norms, rest), (0, 0), (5, 5)) == 2  # 1 1 4 | 4
    assert _count((Each((), ((1, 4),), ()),), (0, 0), (5, 5)) == 2
    assert _count((norms, rest), (0, 0), (2, 4)) == 3  # 1 1 | 4 | 4


@pytest.mark.parametrize("cap", [None, 0.01, 1e-6, 1e6])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_buckets_carry_every_gradient_once(name: str, tied: bool, cap: float | None) -> None:
    model = replace(MODELS[name], tie_word_embeddings=tied)
    of = step(model, Layout(dp_replicate=2, structure=DDP), cap=cap)
    calls, payload = rows(of, "all_reduce", "backward")
    assert payload == held_after(of.resident)["params"]
    tensors = {"llama": 9, "gpt": 16}[name] * 2 + {"llama": 3, "gpt": 5}[name] - tied
    if cap == 1e-6:
        assert calls == tensors
    elif cap == 1e6:
        assert calls == 1
    else:
        assert 1 <= calls <= tensors


@pytest.mark.parametrize(("sync", "times"), [("each", 3), ("last", 1)])
def test_without_sync_the_last_micro_batch_alone_reduces(sync: Any, times: int) -> None:
    layout = Layout(dp_replicate=2, structure=replace(DDP, grad_sync=sync))
    once = rows(step(LLAMA, layout), "all_reduce", "backward")
    thrice = step(LLAMA, layout, m=3)
    assert rows(thrice, "all_reduce", "backward") == tuple(times * n for n in once)
    # Tables of positions are sent before each forward pass that follows a backward that reduced.
    assert rows(thrice, "broadcast", "forward") == tuple(times * n for n in (1, 2 * 32 * 8 * 4))


def test_a_pipeline_reduces_in_its_last_backward_and_sends_no_tables() -> None:
    layout = Layout(dp_replicate=2, pp=2, structure=replace(DDP, pipelined=True))
    for stage in (0, 1):
        of = step(LLAMA, layout, m=4, pp=stage)
        assert rows(of, "all_reduce", "backward")[1] == held_after(of.resident)["params"]
        assert rows(of, "broadcast", "forward") == (0, 0)


def test_zero_1_reduces_as_ddp_and_broadcasts_each_parameter() -> None:
    of = step(LLAMA, Layout(dp_shard=3, structure=Structure(zero=1)), cap=0.03)
    ddp = step(LLAMA, Layout(dp_replicate=3, structure=DDP), cap=0.03)
    assert rows(of, "all_reduce", "backward") == rows(ddp, "all_reduce", "backward")
    assert rows(of, "broadcast", "optimizer") == (9 * 2 + 3, held_after(of.resident)["params"])


def sums_over_tp(step: Step) -> set[tuple[str, str, int, int]]:
    """Phase, dtype, calls and bytes."""
    found = traffic(step.program).items()
    sums = [(key, total) for key, total in found if (key.axes, key.kind) == (("tp",), "all_reduce")]
    return {(key.phase, key.dtype, int(total.calls), int(total.payload_bytes)) for key, total in sums}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_norms_under_sequence_parallelism_are_summed_where_gradients_are(precision: str) -> None:
    """In each backward of DDP; where nothing reduces gradients, three times by AdamW."""
    layout = Layout(dp_replicate=2, tp=2, structure=replace(DDP, tensor="sequence"))
    norm = 64 * ITEMSIZE[precision]
    ddp = step(LLAMA, layout, m=2, precision=precision)
    assert sums_over_tp(ddp) == {("backward", precision, 2 * 5, 2 * 5 * norm)}
    alone = step(LLAMA, replace(layout, dp_replicate=1), m=2, precision=precision)
    assert sums_over_tp(alone) == {("optimizer", precision, 3 * 5, 3 * 5 * norm)}


@pytest.mark.parametrize(("m", "dtype"), [(1, "bf16"), (2, "fp32")])
def test_fsdp2_sums_norms_in_the_dtype_of_what_it_added_up(m: int, dtype: str) -> None:
    structure = Structure(zero=3, tensor="sequence", grad_sync="last")
    of = step(LLAMA, Layout(dp_shard=2, tp=2, structure=structure), m=m, precision="bf16")
    assert sums_over_tp(of) == {("backward", dtype, 5, 5 * 64 * ITEMSIZE[dtype])}


# --- what PyTorch refuses ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layout", "m", "why"),
    [
        (Layout(dp_replicate=2, structure=DDP), 1, None),
        (Layout(dp_shard=2, structure=Structure(zero=1)), 1, None),
        (Layout(dp_shard=2, structure=Structure(zero=2)), 1, "zero=2 is not in torch"),
        (Layout(dp_shard=2, structure=DDP), 1, "DDP is --dp-replicate 2 --dp-shard 1"),
        (
            Layout(dp_replicate=2, dp_shard=2, structure=Structure(zero=1)),
            1,
            "zero=1 splits the optimizer over all ranks",
        ),
        # run, and it failed: reducer.cpp, "rebuilt parameter indices size is not same as original model parameters"
        (Layout(dp_replicate=2, pp=2, structure=Structure(zero=0, pipelined=True)), 2, "come in a row"),
        (Layout(dp_replicate=2, pp=4, structure=Structure(zero=0, pipelined=True)), 4, "come in a row"),
        (
            Layout(dp_replicate=2, pp=2, structure=Structure(zero=0, pipelined=True, schedule="gpipe")),
            4,
            "come in a row",
        ),
        # run, and it went through
        (Layout(dp_replicate=2, pp=2, structure=Structure(zero=0, pipelined=True)), 3, None),
        (Layout(dp_replicate=2, pp=4, structure=Structure(zero=0, pipelined=True)), 5, None),
        (Layout(dp_shard=2, pp=2, structure=Structure(zero=1, pipelined=True)), 3, None),
        (Layout(dp_shard=2, pp=2, structure=Structure(zero=3, pipelined=True)), 2, None),
    ],
)
def test_rules(layout: Layout, m: int, why: str | None) -> None:
    model = replace(LLAMA, num_hidden_layers=4)
    job = Job(32, m * layout.data_ranks)
    said = broken(TORCH.rules, model, job, None, layout)  # type: ignore[arg-type]
    assert [why in reason for reason in said if why] == [True] * (why is not None)
    assert bool(said) == (why is not None)


def test_the_runs_cover_every_way() -> None:
    ways = {(run["structure"]["zero"], prod(run["mesh"].values())) for run in STATES.values()}
    assert {zero for zero, _ in ways} == {0, 1, 3}
    assert {ranks for _, ranks in ways} >= {2, 3, 4}
