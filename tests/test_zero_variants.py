"""ZeRO in groups of ranks: DeepSpeed's MiCS and hpZ, and Megatron's distributed optimizer in several instances.

P parameters, r groups of h ranks, m micro-batches. ρ(n) = (n - 1)/n of a gathered buffer is what a ring sends, twice
that of an all-reduced one.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from nanum import cluster, engines
from nanum.account.memory import held_after, peak
from nanum.account.traffic import traffic
from nanum.build import build
from nanum.conventions import Buckets, Conventions
from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Experts, Mlp, Model
from nanum.prediction import parameters, predict, reasons

DEEPSPEED, MEGATRON = engines.load("deepspeed"), engines.load("megatron")
H, F, V, L, S, M = 512, 1408, 2048, 4, 64, 3
DENSE = Model("llama", H, V, L, 256, Attention(8, 8, 64), Mlp(F, True, "silu"), "rms_norm", "rotary", False)
MIXED = replace(DENSE, name="moe", mlp=Experts(8, 2, Mlp(F, True, "silu")))
P = parameters(DENSE)
HEAD = V * H + H  # its weights are used again at once, and stay gathered from forward to backward
GROUPS = [(4, 2), (2, 8), (8, 4)]


def rho(n: int) -> Fraction:
    return Fraction(n - 1, n)


def forgetful(model: Model, job: Job, structure: Structure) -> Conventions:
    """DeepSpeed where nothing stays gathered, and no tensor is too small to be split."""
    return replace(DEEPSPEED.conventions(model, job, structure), buckets=Buckets(reuse=0, persist=0, overlaps=True))


def step(engine: Engine, model: Model = DENSE, zero: int = 3, m: int = M, hpz: bool = False, **sizes: Any) -> Any:
    structure = Structure(zero=zero, hpz=hpz, own_experts=sizes.get("ep", 1) > 1)
    at = Layout(**sizes, structure=structure)
    engine = replace(engine, conventions=forgetful) if engine is DEEPSPEED else engine
    return build(model, Job(S, m * at.data_ranks), at, engine, 0)


def rows(found: Any) -> dict[tuple[str, str, str], tuple[int, int]]:
    """(calls, bytes sent), by axes of more than one rank, kind and phase."""
    out: dict[tuple[str, str, str], tuple[int, int]] = {}
    for key, total in traffic(found.program).items():
        out["+".join(key.axes), key.kind, key.phase] = int(total.calls), int(total.wire_bytes)
    return out


# --- MiCS -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("r", "h"), GROUPS)
def test_mics_gathers_in_its_group_and_adds_shares_once(r: int, h: int) -> None:
    """mρ(h)·2·2P of gathers (less the head's second), mρ(h)·2P of reductions as ZeRO-3 of h ranks alone, and
    2ρ(r)·2P/h once a step (Zhang et al., arXiv 2205.00119: 2-hop gradient synchronization).
    """
    found, alone = rows(step(DEEPSPEED, dp_replicate=r, dp_shard=h)), rows(step(DEEPSPEED, dp_shard=h))
    among = found.pop(("dp_replicate", "all_reduce", "backward"))
    assert among[1] == 2 * rho(r) * 2 * P / h
    assert found == alone
    gathered = sum(sent for (_, kind, _), (_, sent) in found.items() if kind == "all_gather")
    assert gathered == M * rho(h) * 2 * (2 * P - HEAD)
    assert among[0] * M == found["dp_shard+cp", "reduce_scatter", "backward"][0]  # a call for each bucket


def test_mics_holds_what_zero_of_a_group_holds() -> None:
    both, alone = step(DEEPSPEED, dp_replicate=4, dp_shard=2), step(DEEPSPEED, dp_shard=2)
    assert held_after(both.resident) == held_after(alone.resident)
    assert peak(both.program).peak == peak(alone.program).peak


# --- hpZ --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("r", "h"), GROUPS)
def test_hpz_gathers_from_all_ranks_once_a_step(r: int, h: int) -> None:
    """The first forward pass gathers ρ(d)·2P from all d = rh ranks, all later passes ρ(h)·2P within a group; gradients
    are reduced as in ZeRO-3 (ZeRO++, arXiv 2306.10209, section 4.2: of 3P between nodes 2P are left).
    """
    d = r * h
    found, plain = rows(step(DEEPSPEED, dp_replicate=r, dp_shard=h, hpz=True)), rows(step(DEEPSPEED, dp_shard=d))
    everywhere, group = "dp_replicate+dp_shard+cp", "dp_shard+cp"
    assert found[everywhere, "all_gather", "forward"][1] == rho(d) * 2 * P
    assert (everywhere, "all_gather", "backward") not in found
    assert found[group, "all_gather", "forward"][1] == (M - 1) * rho(h) * 2 * P
    assert found[group, "all_gather", "backward"][1] == M * rho(h) * 2 * (P - HEAD)
    scattered = found[everywhere, "reduce_scatter", "backward"]
    assert scattered == plain["dp_shard+cp", "reduce_scatter", "backward"]
    assert scattered[1] == M * rho(d) * 2 * P


@pytest.mark.parametrize(("r", "h"), GROUPS)
def test_hpz_holds_a_second_share_from_the_first_forward_to_the_end(r: int, h: int) -> None:
    """2P/h bytes besides ZeRO-3's of all ranks; what is there between steps is the same."""
    second, plain = (
        step(DEEPSPEED, dp_replicate=r, dp_shard=h, hpz=True),
        step(DEEPSPEED, dp_shard=r * h),
    )
    assert held_after(second.resident) == held_after(plain.resident)
    more = peak(second.actions["forward.first"]).net - peak(plain.actions["forward.first"]).net
    assert more == 2 * (P - HEAD) // h  # the head's goes after its backward
    assert held_after(second.program) == held_after(plain.program)
    assert 2 * P // h - 1 <= peak(second.program).peak - peak(plain.program).peak <= 2 * P // h


def test_hpz_of_what_lives_on_is_kept_when_it_goes() -> None:
    """With DeepSpeed's own distance of reuse, all second shares are there once the first backward has passed, and they
    are gone when the step ends.
    """

    def at(r: int, h: int, *, hpz: bool) -> Any:
        layout = Layout(dp_replicate=r, dp_shard=h, structure=Structure(zero=3, hpz=hpz))
        return build(DENSE, Job(S, M * r * h), layout, DEEPSPEED, 0)

    second, plain = at(4, 2, hpz=True), at(1, 8, hpz=False)
    assert held_after(second.program) == held_after(plain.program)
    split = [P_i for P_i in _sizes() if P_i > Buckets().persist]
    more = peak(second.program).peak - peak(plain.program).peak
    assert more == sum(split) * 2 // 2


def _sizes() -> list[int]:
    return [V * H, V * H, *([H * H] * 4 + [H * F] * 3 + [H] * 2) * L, H]


# --- instances of Megatron's distributed optimizer --------------------------------------------------------------------
@pytest.mark.parametrize(("r", "h"), GROUPS)
def test_instances_of_the_distributed_optimizer(r: int, h: int) -> None:
    """ρ(h)(4 + 2)P within an instance, and 2ρ(r)·4P/h among instances; 6 + 12/h bytes a parameter (Megatron's
    --num-distributed-optimizer-instances: distributed/param_and_grad_buffer.py, start_grad_sync).
    """
    found = step(MEGATRON, zero=1, dp_replicate=r, dp_shard=h)
    sent = rows(found)
    assert sent["dp_shard+cp", "reduce_scatter", "backward"][1] == rho(h) * 4 * P
    assert sent["dp_shard+cp", "all_gather", "forward"][1] == rho(h) * 2 * P
    assert sent["dp_replicate", "all_reduce", "backward"][1] == 2 * rho(r) * 4 * P / h
    held = held_after(found.resident)
    assert (held["params"], held["grads"], held["optimizer_states"]) == (2 * P, 4 * P, 12 * P // h)


def test_instances_of_experts_optimizer() -> None:
    """Experts' own data ranks of one instance have their shards: edp = h/ep (parallel_state.py:
    intra_partial_expert_data_parallel_size).
    """
    r, h, ep = 2, 8, 4
    sent = rows(step(MEGATRON, MIXED, zero=1, dp_replicate=r, dp_shard=h, ep=ep))
    of_experts = L * 3 * H * F * 8 // ep
    edp = h // ep
    assert sent["edp", "reduce_scatter", "backward"][1] == rho(edp) * 4 * of_experts
    both = 4 * of_experts // edp + 4 * (parameters(MIXED) - L * 3 * H * F * 8) // h
    assert sent["dp_replicate", "all_reduce", "backward"][1] == 2 * rho(r) * both


# --- questions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("hpz", [False, True])
def test_groups_of_many_layouts_at_once(hpz: bool) -> None:
    r, h = np.array([2, 4, 8]), np.array([8, 4, 2])
    ones = np.ones(3, np.int64)
    columns = dict.fromkeys(("cp", "tp", "pp", "ep", "etp", "micro_batch_size"), ones)
    structure = Structure(zero=3, hpz=hpz)
    together = build(
        DENSE, Job(S, 48), Layout(dp_replicate=r, dp_shard=h, **columns, structure=structure), DEEPSPEED, 0 * ones
    )
    for i in range(3):
        alone = Layout(dp_replicate=int(r[i]), dp_shard=int(h[i]), structure=structure)
        one = build(DENSE, Job(S, 48), alone, DEEPSPEED, 0)
        assert peak(together.program).peak[i] == peak(one.program).peak
        for key, total in traffic(one.program).items():
            found = traffic(together.program)[key]
            assert np.broadcast_to(found.wire_bytes, 3)[i] == total.wire_bytes
            assert np.broadcast_to(found.calls, 3)[i] == total.calls


def test_groups_within_nodes_gather_over_their_link() -> None:
    """Within a node by its own link, and faster than between nodes."""
    model, machine, job = DENSE, cluster.load("2x8xh100-sxm"), Job(256, 48)
    at = Layout(dp_replicate=2, dp_shard=8, structure=Structure(zero=3, hpz=True))
    links = {(row.axis, row.phase): row.link for row in predict(model, job, machine, at, "deepspeed").communication}
    assert links["dp_shard", "forward"].startswith("NVLink")
    assert links["dp_replicate+dp_shard", "forward"] == "network"


@pytest.mark.parametrize(
    ("engine", "layout", "why"),
    [
        ("torchtitan", {"dp_replicate": 2, "dp_shard": 4, "hpz": True}, "--hpz is not in torchtitan: deepspeed has it"),
        ("deepspeed", {"dp_shard": 8, "hpz": True}, "dp_replicate=1 groups of dp_shard·cp=8 ranks (deepspeed)"),
        ("deepspeed", {"dp_replicate": 8, "hpz": True}, "dp_replicate=8 groups of dp_shard·cp=1 ranks"),
        ("deepspeed", {"dp_replicate": 2, "dp_shard": 4, "zero": 2}, "zero=2 shards over all data ranks"),
        (
            "deepspeed",
            {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "cp_kind": "ulysses"},
            "deepspeed's MiCS (mics_shard_size=2), which is not modelled beside cp=2",
        ),
    ],
)
def test_impossible_groups_are_said(engine: str, layout: dict[str, Any], why: str) -> None:
    of_structure = {k: v for k, v in layout.items() if k in ("zero", "hpz", "cp_kind")}
    sizes = {k: v for k, v in layout.items() if k not in of_structure}
    at = Layout(**sizes, structure=Structure(**{"zero": 3, **of_structure}))
    found = reasons(DENSE, Job(S, 16), cluster.load("1x8xh100-sxm"), at, engines.load(engine))
    assert any(why in reason for reason in found), found
