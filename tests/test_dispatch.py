"""Tokens that go to experts by way of nodes: how many places they reach, and the bytes of DeepEP's two exchanges."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nanum
from nanum import cluster
from nanum import model as models
from nanum.account.coefficients import coefficients
from nanum.account.memory import peak
from nanum.account.traffic import flops, traffic
from nanum.build import build
from nanum.engines.megatron import MEGATRON
from nanum.errors import Refused
from nanum.job import DROPLESS, Job, Routing
from nanum.layout import Layout, Structure
from nanum.model import Attention, Experts, Mlp, Model
from nanum.operators.routing import places_reached
from nanum.rules.dispatch import sharing_a_node

H, F, E, K, S, B, LAYERS, V, M = 1024, 512, 32, 4, 2048, 2, 4, 32768, 3
MIXTURE = Experts(E, K, Mlp(F, True, "silu"))
MODEL = Model("moe", H, V, LAYERS, 8192, Attention(16, 4, 64), MIXTURE, "rms_norm", "rotary", False)
FLEX = Structure(zero=1, own_experts=True, dispatcher="flex")
LAYOUT = Layout(dp_shard=16, ep=16, ep_intra=8, micro_batch_size=B, structure=FLEX)
TOKENS = B * S


# --- places that a token reaches --------------------------------------------------------------------------------------
@pytest.mark.parametrize(("experts", "choices", "places"), [(256, 8, 8), (64, 6, 4), (8, 2, 8), (16, 1, 4), (12, 5, 3)])
def test_without_groups_it_is_hypergeometric(experts: int, choices: int, places: int) -> None:
    """N (1 - C(E - E/N, k) / C(E, k)); with one choice it is one place."""
    missed = comb(experts - experts // places, choices) / comb(experts, choices)
    assert places_reached(experts, choices, 1, 1, places) == pytest.approx(places * (1 - missed), rel=1e-12)


def drawn(experts: int, choices: int, groups: int, topk: int, places: int, tokens: int, seed: int) -> np.ndarray:
    """Places that each of many tokens reaches, by the largest of random scores: of groups, then of experts in them."""
    rng = np.random.default_rng(seed)
    of_groups = np.argsort(rng.random((tokens, groups)), axis=1)[:, :topk]
    scores = rng.random((tokens, groups, experts // groups))
    allowed = np.zeros((tokens, groups), bool)
    np.put_along_axis(allowed, of_groups, True, axis=1)
    scores[~allowed] = -1
    chosen = np.argpartition(-scores.reshape(tokens, experts), choices - 1, axis=1)[:, :choices]
    where = np.zeros((tokens, places), bool)
    np.put_along_axis(where, chosen // (experts // places), True, axis=1)
    return where.sum(1)


@pytest.mark.parametrize(
    ("experts", "choices", "groups", "topk", "places"),
    [
        (256, 8, 8, 4, 8),  # DeepSeek-V3: a group is a node
        (256, 8, 8, 4, 4),  # two groups are one
        (256, 8, 8, 4, 64),  # its ranks
        (160, 6, 8, 3, 8),  # DeepSeek-V2
        (48, 4, 6, 2, 8),  # a node has parts of two groups
        (64, 8, 1, 1, 8),
    ],
)
def test_places_reached_are_what_drawing_says(experts: int, choices: int, groups: int, topk: int, places: int) -> None:
    """Within five standard errors of 20,000 tokens."""
    found = drawn(experts, choices, groups, topk, places, 20_000, seed=places)
    expected = places_reached(experts, choices, groups, topk, places)
    assert abs(found.mean() - expected) <= 5 * found.std() / np.sqrt(len(found)) + 1e-9
    assert found.max() <= topk * max(1, places // groups) or groups == 1 or places % groups


@given(st.integers(0, 4), st.integers(0, 3), st.integers(1, 6), st.data())
def test_places_reached_are_bounded(places: int, groups: int, choices: int, data: Any) -> None:
    """At least one, at most every choice, every place, and where a group is a place, every group."""
    e, n, g = 64, 2**places, 2**groups
    m = data.draw(st.integers(1, g))
    if choices > m * (e // g):
        return
    found = places_reached(e, choices, g, m, n)
    assert 1 - 1e-12 <= found <= min(n, choices) + 1e-12
    if n <= g:
        assert found <= m + 1e-12
    assert found <= places_reached(e, choices, 1, 1, n) + 1e-9


# --- bytes ------------------------------------------------------------------------------------------------------------
def step(layout: Layout = LAYOUT, routing: Routing = DROPLESS, imbalance: float = 1.0, precision: Any = "bf16") -> Any:
    job = Job(S, B * M * 16, precision, expert_imbalance=imbalance, routing=routing)
    return build(MODEL, job, layout, MEGATRON, 0 * np.asarray(layout.ep) if np.ndim(layout.ep) else 0)


def rows(found: Any) -> dict[tuple[str, str, str], tuple[int, int, int]]:
    """(calls, payload, wire) of the all-to-alls, by axis, phase and dtype."""
    return {
        ("+".join(k.axes), k.phase, k.dtype): (int(t.calls), int(t.payload_bytes), int(t.wire_bytes))
        for k, t in traffic(found.program).items()
        if k.kind == "all_to_all"
    }


def row_bytes(itemsize: float, words: int) -> int:
    """DeepEP's `get_num_bytes_per_token`: the token, two numbers of its source, and so many of its choices; by 16."""
    return 16 * ceil((H * itemsize + 8 + 4 * words) / 16)


@pytest.mark.parametrize("routing", [DROPLESS, Routing(groups=4, group_topk=2), Routing(groups=2, group_topk=1)])
def test_between_nodes_a_token_goes_once_to_each(routing: Routing) -> None:
    """Of each token E[nodes] copies between nodes, and E[ranks] within: dispatch forward with the choices, the way back
    of gradients with those of their weights, the other two without.
    """
    found = rows(step(routing=routing))
    groups = (routing.groups or 1, routing.group_topk or 1)
    for axis, size, places in (("ep_inter", 2, 2), ("ep_intra", 8, 16)):
        copies = TOKENS * places_reached(E, K, *groups, places)
        for phase, words in (("forward", 2 * K), ("backward", K)):
            calls, payload, wire = found[axis, phase, "bf16"]
            assert calls == 2 * LAYERS * M
            expected = copies * LAYERS * M * (row_bytes(2, words) + row_bytes(2, 0))
            assert payload == pytest.approx(expected, rel=2e-3)  # copies are rounded up on each rank
            assert wire == pytest.approx(payload * (size - 1) / size, rel=1e-9)
    if routing.group_topk == 1:
        assert found["ep_inter", "forward", "bf16"][0] > 0
        assert places_reached(E, K, *groups, 2) == 1


def test_what_goes_between_nodes_is_less_than_all_slots() -> None:
    """The ratio is E[nodes] over the experts of a token (DeepSeek-V3, section 3.2.2: at most 4 nodes of 8 experts)."""
    v3 = models.load("deepseek-v3")
    job = Job(4096, 64)
    base = Layout(dp_shard=64, ep=64, ep_intra=8, structure=FLEX)
    slots = replace(base, ep_intra=1, structure=replace(FLEX, dispatcher="alltoall"))
    by_nodes, by_slots = (rows(build(v3, job, at, MEGATRON, 0)) for at in (base, slots))
    between = by_nodes["ep_inter", "forward", "bf16"][1] / by_slots["ep", "forward", "bf16"][1]
    nodes = places_reached(256, 8, 8, 4, 8)
    assert 3.5 < nodes < 4
    assert between == pytest.approx(nodes / 8, rel=5e-3)  # and what goes along with a token


def test_fp8_sends_a_byte_and_a_scale_for_each_32_and_brings_back_bf16() -> None:
    fp8 = replace(LAYOUT, structure=replace(FLEX, dispatch_dtype="fp8"))
    small, large = rows(step(fp8, precision="fp8")), rows(step(precision="fp8"))
    for axis, places in (("ep_inter", 2), ("ep_intra", 16)):
        copies = TOKENS * places_reached(E, K, 1, 1, places) * LAYERS * M
        sent, back = small[axis, "forward", "mxfp8"], small[axis, "forward", "bf16"]
        assert sent[0] == back[0] == LAYERS * M
        assert sent[1] == pytest.approx(copies * row_bytes(1 + 1 / 32, 2 * K), rel=2e-3)
        assert sent[1] + back[1] < large[axis, "forward", "bf16"][1]
        assert small[axis, "backward", "bf16"] == large[axis, "backward", "bf16"]


# --- memory, work -----------------------------------------------------------------------------------------------------
def test_experts_do_the_same_work_whatever_the_way() -> None:
    by_slots = replace(LAYOUT, ep_intra=1, structure=replace(FLEX, dispatcher="alltoall"))
    assert flops(step().program) == pytest.approx(flops(step(by_slots).program), rel=1e-12)


def saved(layout: Layout, precision: Any = "bf16") -> int:
    return int(peak(step(layout, precision=precision).actions["forward.first"]).net)


def test_a_layer_saves_the_choices_of_the_tokens_that_arrive() -> None:
    """Besides the slots themselves, which are as many: weights of what arrived are int64 and fp32 on each rank that a
    token reaches, not where it is from alone.
    """
    by_slots = replace(LAYOUT, ep_intra=1, structure=replace(FLEX, dispatcher="alltoall"))
    more = saved(LAYOUT) - saved(by_slots)
    arrived = TOKENS * places_reached(E, K, 1, 1, 16)
    assert abs(more) <= LAYERS * (arrived + TOKENS) * K * (8 + 4)


def test_tokens_that_come_in_fp8_are_not_kept_in_bf16() -> None:
    """What came is the products' own fp8 input, with its scales; no order of slots is kept, which come in order."""
    fp8 = replace(LAYOUT, structure=replace(FLEX, dispatch_dtype="fp8"))
    scales, order = H // 32, 2 * 8
    assert saved(fp8, "fp8") - saved(LAYOUT, "fp8") == LAYERS * TOKENS * K * (scales - order)


def test_the_fullest_rank_receives_more_tokens() -> None:
    """So many times its share, up to all tokens of the group."""
    even, full, most = (rows(step(imbalance=x))["ep_intra", "forward", "bf16"][1] for x in (1.0, 1.5, 16.0))
    assert full == pytest.approx(1.5 * even, rel=2e-3)
    assert most == pytest.approx(16 / places_reached(E, K, 1, 1, 16) * even, rel=2e-3)
    assert rows(step(imbalance=1.5))["ep_inter", "forward", "bf16"] == rows(step())["ep_inter", "forward", "bf16"]


def test_layouts_at_once() -> None:
    """Emitted together they are those emitted one by one."""
    ep = np.array([4, 8, 16])
    ones = np.ones(3, np.int64)
    columns = {"dp_replicate": ones, "dp_shard": 16 * ones, "tp": ones, "cp": ones, "pp": ones, "ep": ep, "etp": ones}
    many = Layout(**columns, micro_batch_size=B * ones, structure=FLEX)
    many = replace(many, ep_intra=sharing_a_node(many, 8))
    assert list(many.ep_intra) == [4, 8, 8]
    together = step(many, imbalance=1.3)
    for i, ranks in enumerate(ep):
        one = step(replace(LAYOUT, ep=int(ranks), ep_intra=min(int(ranks), 8)), imbalance=1.3)
        assert peak(together.program).peak[i] == peak(one.program).peak
        for key, total in traffic(one.program).items():
            assert traffic(together.program)[key].wire_bytes[i] == total.wire_bytes


# --- questions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ep", "etp", "gpus", "order", "shared"),
    [
        (16, 1, 8, None, 8),
        (4, 1, 8, None, 4),
        (12, 1, 8, None, 4),  # nodes have 8 and 4 of a group: four that always share one
        (16, 2, 8, None, 4),
        (16, 1, 8, ("dp_replicate", "dp_shard", "cp", "tp", "pp"), 4),  # a pipeline of two between neighbours
    ],
)
def test_ranks_that_share_a_node(ep: int, etp: int, gpus: int, order: Any, shared: int) -> None:
    at = Layout(dp_shard=48 * etp, ep=ep, etp=etp, pp=2 if order else 1, structure=FLEX)
    assert sharing_a_node(replace(at, rank_order=order) if order else at, gpus) == shared


@pytest.mark.parametrize(
    ("changes", "job", "why"),
    [
        ({"ep_intra": 1}, {}, "ep_intra=1, but 8 of the ranks of ep=16 share a node of 2x8xh100-sxm"),
        ({"etp": 2, "ep": 8, "ep_intra": 4}, {}, "etp=2 with --dispatcher flex is not modelled: use --etp 1"),
        ({"ep": 1, "ep_intra": 1}, {}, "--dispatcher flex sends tokens to other ranks' experts: it needs --ep over 1"),
        ({}, {"routing": Routing(1.5)}, "--expert-capacity with --dispatcher flex is not modelled"),
        ({}, {"routing": Routing(groups=5, group_topk=2)}, "router_groups=5 does not divide num_experts=32"),
        (
            {},
            {"routing": Routing(groups=4, group_topk=5)},
            "router_group_topk=5: a token is sent to 1 to 4 of 4",
        ),
        ({}, {"routing": Routing(groups=16, group_topk=1)}, "have 2 experts, fewer than num_experts_per_tok=4"),
        ({"dispatch_dtype": "fp8"}, {}, "so that these are of fp8 too: add --precision fp8 (megatron)"),
        ({"dispatch_dtype": "fp8", "dispatcher": "alltoall", "ep_intra": 1}, {}, "--dispatch-dtype fp8 is of --disp"),
        ({"engine": "torchtitan", "zero": 3}, {}, "--dispatcher flex is not modelled for torchtitan: megatron has it"),
    ],
)
def test_impossible_ways_are_said(changes: dict[str, Any], job: dict[str, Any], why: str) -> None:
    engine = changes.pop("engine", "megatron")
    of_structure = {k: changes.pop(k) for k in ("dispatch_dtype", "dispatcher", "zero") if k in changes}
    at = replace(LAYOUT, **changes, structure=replace(FLEX, **of_structure))
    with pytest.raises(Refused) as refused:
        nanum.predict(MODEL, Job(S, 64, **job), cluster.load("2x8xh100-sxm"), at, engine=engine)
    assert any(why in reason for reason in refused.value.reasons), refused.value.reasons


def test_bytes_saved_between_nodes_are_time() -> None:
    """The same step on the same machine, with slots or with tokens once a node; and in fp8."""
    machine, job = cluster.load("2x8xh100-sxm"), Job(S, 64, "fp8")
    by_slots = replace(LAYOUT, ep_intra=1, structure=replace(FLEX, dispatcher="alltoall"))
    fp8 = replace(LAYOUT, structure=replace(FLEX, dispatch_dtype="fp8"))
    slots, nodes, small = (
        nanum.predict(MODEL, job, machine, at, engine="megatron").to_dict()["time"] for at in (by_slots, LAYOUT, fp8)
    )
    assert small["step_seconds"] < nodes["step_seconds"] < slots["step_seconds"]


def test_exchanges_between_and_within_nodes_run_at_once() -> None:
    """What is exposed of both is about the longer of them (DeepEP forwards what has arrived while more comes), where
    launches take no time.
    """
    answer = nanum.predict(MODEL, Job(S, 64), cluster.load("2x8xh100-sxm"), LAYOUT, engine="megatron")
    found = replace(answer, coefficients=coefficients().alone).communication
    seconds, exposed = (
        {axis: sum(getattr(row, what) for row in found if row.axis == axis) for axis in ("ep_inter", "ep_intra")}
        for what in ("seconds", "exposed_seconds")
    )
    assert sum(exposed.values()) == pytest.approx(max(seconds.values()), rel=0.05)
    assert max(seconds.values()) < 0.8 * sum(seconds.values())
