"""Experts of a limited capacity (GShard, arXiv 2006.16668), as Megatron has it."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import pytest

import nanum
from nanum import cluster
from nanum.account.memory import peak
from nanum.account.traffic import flops, traffic
from nanum.build import build
from nanum.engines.megatron import MEGATRON
from nanum.errors import Refused
from nanum.job import DROPLESS, Job, Routing
from nanum.layout import Layout, Structure
from nanum.model import Attention, Experts, Mlp, Model

H, F, E, K, S, B, LAYERS, V, M = 1024, 512, 8, 2, 2048, 2, 4, 32768, 3
MIXTURE = Experts(E, K, Mlp(F, True, "silu"))
MODEL = Model("moe", H, V, LAYERS, 8192, Attention(16, 4, 64), MIXTURE, "rms_norm", "rotary", False)
LAYOUT = Layout(dp_shard=8, ep=4, micro_batch_size=B, structure=Structure(zero=1, own_experts=True))


def step(routing: Routing = DROPLESS, imbalance: float = 1.0, layout: Layout = LAYOUT) -> Any:
    job = Job(S, B * M * 8, expert_imbalance=imbalance, routing=routing)
    return build(MODEL, job, layout, MEGATRON, 0 * np.asarray(layout.ep) if np.ndim(layout.ep) else 0)


def sent(found: Any) -> int:
    """Bytes of the slots' all-to-alls."""
    rows = traffic(found.program).items()
    return sum(int(t.payload_bytes) for k, t in rows if k.kind == "all_to_all" and k.dtype == "bf16")


@pytest.mark.parametrize("capacity", [0.5, 1.0, 1.3, 2.0, 4.0])
def test_padded_experts_have_their_capacity_whatever_is_sent(capacity: float) -> None:
    """E · ceil(T k / E · c) slots of each rank, dispatched and returned, forward and backward, and as many rows of the
    three products of an expert, forward and twice backward.
    """
    slots = E * ceil(B * S * K / E * capacity)
    padded = Routing(capacity, padded=True)
    found = step(padded)
    assert sent(found) == LAYERS * M * 4 * slots * H * 2
    products = M * LAYERS * 18.0 * H * F
    assert flops(found.program) - flops(step().program) == pytest.approx(products * (slots - B * S * K), rel=1e-9)
    uneven = step(padded, imbalance=2.0)
    assert sent(uneven) == sent(found)
    assert peak(uneven.program).peak == peak(found.program).peak


@pytest.mark.parametrize(("imbalance", "capacity"), [(1.0, 1.5), (1.5, 1.25), (3.0, 2.0), (1.5, 1.5), (1.5, 2.0)])
def test_what_is_over_the_capacity_is_dropped(imbalance: float, capacity: float) -> None:
    """The fullest rank has min(imbalance, capacity) times its share: as if no more had been sent to it."""
    dropping, without = step(Routing(capacity), imbalance), step(DROPLESS, min(imbalance, capacity))
    assert sent(dropping) == sent(without)
    assert flops(dropping.program) == flops(without.program)
    assert peak(dropping.program).peak == peak(without.program).peak


def test_a_capacity_below_the_even_share_drops_everywhere() -> None:
    assert sent(step(Routing(0.5))) == sent(step()) // 2
    assert sent(step(Routing(0.5), imbalance=2.0)) == sent(step()) // 2


def test_capacity_is_of_a_dispatch_within_a_rank_too() -> None:
    """Without expert parallelism slots are dropped all the same (router.py applies it before any dispatch)."""
    alone = Layout(dp_shard=8, micro_batch_size=B, structure=Structure(zero=1))
    more = flops(step(Routing(2.0, padded=True), layout=alone).program) - flops(step(layout=alone).program)
    assert more == pytest.approx(M * LAYERS * 18.0 * B * S * K * H * F, rel=1e-9)


def test_capacities_of_layouts_at_once() -> None:
    ep = np.array([2, 4, 8])
    ones = np.ones(3, np.int64)
    columns = {"dp_replicate": ones, "dp_shard": 8 * ones, "tp": ones, "cp": ones, "pp": ones, "ep": ep, "etp": ones}
    many = Layout(**columns, micro_batch_size=B * ones, structure=LAYOUT.structure)
    for routing in (Routing(1.25), Routing(1.3, padded=True)):
        together = step(routing, 1.5, many)
        for i, ranks in enumerate(ep):
            one = step(routing, 1.5, replace(LAYOUT, ep=int(ranks)))
            assert peak(together.program).peak[i] == peak(one.program).peak
            assert flops(together.program)[i] == flops(one.program)


@pytest.mark.parametrize(
    ("model", "routing", "engine", "why"),
    [
        (MODEL, Routing(4.5), "megatron", "expert_capacity=4.5: an expert that has every token has 4 times its even"),
        (MODEL, Routing(0.0), "megatron", "expert_capacity=0: slots of an expert over its even share, over 0"),
        (MODEL, Routing(None, padded=True), "megatron", "padded experts have no capacity to be padded to"),
        (replace(MODEL, mlp=Mlp(F, True, "silu")), Routing(1.5), "megatron", "expert_capacity=1.5, but moe has no exp"),
        (MODEL, Routing(1.5), "torchtitan", "--expert-capacity 1.5 is not for torchtitan, whose experts take all"),
    ],
)
def test_impossible_capacities(model: Model, routing: Routing, engine: str, why: str) -> None:
    zero = 3 if engine == "torchtitan" else 1
    at = Layout(dp_shard=8, ep=4, structure=Structure(zero=zero, own_experts=True))
    with pytest.raises(Refused) as refused:
        nanum.predict(model, Job(S, 8, routing=routing), cluster.load("1x8xh100-sxm"), at, engine=engine)
    assert any(why in reason for reason in refused.value.reasons), refused.value.reasons
