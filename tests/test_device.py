"""What lies beyond tensors, beside what others saw on their devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum import cluster as clusters
from nanum.account.device import ALL_TO_ALL, COMMUNICATOR, CONTEXT, RESERVED, WORKSPACES, context_bytes, reserved_bytes
from nanum.account.traffic import groups_of
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Mlp, Model
from nanum.prediction import predict
from nanum.program import Collective, Repeat

LEVELS: tuple[Any, ...] = ("low", "value", "high")
ONE = frozenset({(("dp_shard",), False)})
SWAPPING = frozenset({(("dp_shard",), False), (("dp_shard",), True)})
MODEL = Model(
    "llama",
    256,
    1024,
    4,
    128,
    Attention(8, 8, 32),
    Mlp(704, gated=True, activation="silu"),
    "rms_norm",
    "rotary",
    False,
)


@pytest.mark.parametrize("term", [RESERVED, WORKSPACES, CONTEXT, *COMMUNICATOR.values(), ALL_TO_ALL])
def test_what_is_expected_lies_in_what_was_seen(term: Any) -> None:
    assert term.low <= term.value <= term.high
    assert term.source


@pytest.mark.parametrize(
    ("groups", "ranks", "seen"),
    [
        (ONE, 8, 1.06e9),  # NCCL issue 1685: 8 H100 before the first all-to-all
        (SWAPPING, 8, 4.34e9),  # and after it
        (frozenset({((axis,), False) for axis in ("a", "b", "c")}), 8, 6e9),  # issue 864: three communicators
        (ONE, 8, 1.6e9),  # issue 864: one
    ],
)
def test_devices_held_what_the_range_says(groups: Any, ranks: int, seen: float) -> None:
    sizes = dict.fromkeys(("dp_shard", "a", "b", "c"), ranks)
    low, _, high = (context_bytes(groups, sizes, level) for level in LEVELS)
    assert low <= seen <= high


def test_a_communicator_is_of_more_than_one_rank() -> None:
    """And of two it is smaller (NCCL issue 964)."""
    found = [context_bytes(ONE, {"dp_shard": n}) - context_bytes(frozenset(), {}) for n in (1, 2, 4)]
    assert found == [0, 544e6, 688e6]


def test_workspaces_are_pytorchs() -> None:
    """Of a handle and a stream: two buffers of 4096 KiB and eight of 16, before Hopper; 32 MiB from there on, for the
    threads of forward and backward."""
    assert WORKSPACES.low == (2 * 4096 + 8 * 16) * 1024
    assert WORKSPACES.value == 2 * 32 * 2**20
    assert reserved_bytes(0) == WORKSPACES.value * 104 // 100


@given(st.lists(st.integers(1, 64), min_size=3, max_size=3), st.integers(0, 10**12))
def test_arrays_are_many_layouts(ranks: list[int], allocated: int) -> None:
    for level in LEVELS:
        together = context_bytes(SWAPPING, {"dp_shard": np.array(ranks)}, level)
        assert together.tolist() == [context_bytes(SWAPPING, {"dp_shard": n}, level) for n in ranks]
    low, expected, high = (reserved_bytes(allocated, level) for level in LEVELS)
    assert allocated <= low <= expected <= high


def test_groups_are_those_that_exchange_anything() -> None:
    def exchange(kind: str, *axes: str) -> Collective:
        return Collective(kind, axes, "forward", "activations", "bf16", 2, 1, 8, 8)

    program = exchange("all_gather", "tp"), Repeat(3, (exchange("all_to_all", "ep"), exchange("all_reduce", "tp")))
    assert groups_of(program) == {(("tp",), False), (("ep",), False), (("ep",), True)}


def test_three_numbers_of_one_device() -> None:
    """Allocated, reserved and the device's total: each adds its terms to the one before."""
    layout = Layout(dp_shard=4, tp=2, structure=Structure(zero=3, tensor="sequence"))
    prediction = predict(MODEL, Job(128, 16), clusters.load("1x8xh100-sxm"), layout)
    worst = prediction.to_dict()["memory"]["worst"]
    assert worst["reserved_bytes"] == (prediction.worst.pooled_bytes + WORKSPACES.value) * 104 // 100
    assert worst["communicator_bytes"] == 544e6 + 688e6  # of tp and of dp_shard
    assert worst["context_bytes"] == CONTEXT.value + worst["communicator_bytes"]
    assert worst["device_bytes"] == worst["reserved_bytes"] + worst["context_bytes"]
    assert worst["device_bytes_low"] < worst["device_bytes"] < worst["device_bytes_high"]
    stated = {one["what"]: one for one in prediction.assumptions if "low" in one}
    assert set(stated) == {term.what for term in (RESERVED, WORKSPACES, CONTEXT, *COMMUNICATOR.values())}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(("shards", "reshard", "batch"), [(2, True, 8), (4, False, 16), (2, True, 4)])
def test_pools_of_streams_have_at_least_what_is_held(
    schedule: Any, pp: int, shards: int, reshard: bool, batch: int
) -> None:
    """FSDP2's gathers and its gradients lie in pools of their own streams, and other engines have but one."""
    chunks = 2 if schedule == "interleaved" and pp > 1 else 1
    structure = Structure(zero=3, reshard=reshard, schedule=schedule if pp > 1 else "1f1b", virtual_stages=chunks)
    layout = Layout(dp_shard=shards, pp=pp, structure=structure)
    machine = clusters.load(f"1x{shards * pp}xh100-sxm")
    for stage in predict(MODEL, Job(128, batch), machine, layout).memory:
        assert stage.pooled_bytes >= stage.moment.bytes
    layout = Layout(dp_shard=shards, pp=pp, structure=replace(structure, zero=1, reshard=True))
    for stage in predict(MODEL, Job(128, batch), machine, layout, engine="megatron").memory:
        assert stage.pooled_bytes == stage.moment.bytes
