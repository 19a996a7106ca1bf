"""Experts and latent attention: exchanges, parameters and saved bytes beside published formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import nanum
from nanum import cluster
from nanum.account.memory import peak
from nanum.account.traffic import flops, traffic
from nanum.build import build
from nanum.division.parts import emit_parts
from nanum.engines.megatron import MEGATRON
from nanum.engines.torchtitan import TORCHTITAN
from nanum.errors import Refused
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Experts, LatentAttention, Layer, Mlp, Model
from nanum.prediction.reference import parameters

H, F, E, K, S, B, LAYERS, V = 1024, 512, 8, 2, 2048, 2, 4, 32768
MIXTURE = Experts(E, K, Mlp(F, True, "silu"))
MODEL = Model("moe", H, V, LAYERS, 8192, Attention(16, 4, 64), MIXTURE, "rms_norm", "rotary", False)
LATENT = LatentAttention(16, 768, 256, 64, 32, 64)


def rho(n: int) -> float:
    return (n - 1) / n


def rows(model: Model, engine: Any, micro_batches: int = 3, **sizes: Any) -> dict[tuple[str, str, str, str], Any]:
    """Totals of the only stage, by (axes, kind, phase, dtype)."""
    zero = 3 if engine is TORCHTITAN else 1
    structure = Structure(zero=zero, own_experts=sizes.get("ep", 1) > 1, tensor="sequence" if "tp" in sizes else "none")
    layout = Layout(**sizes, micro_batch_size=B, structure=structure)
    job = Job(S, B * layout.data_ranks * micro_batches)
    found: dict[tuple[str, str, str, str], Any] = {}
    for key, total in traffic(build(model, job, layout, engine, 0).program).items():
        found[layout.named(key.axes), key.kind, key.phase, key.dtype] = total
    return found


@pytest.mark.parametrize("engine", [TORCHTITAN, MEGATRON], ids=lambda e: e.name)
def test_dispatch_is_gshard_s(engine: Any) -> None:
    """2 rho(e) T k h (w + w) a layer and micro-batch, forward and backward (GShard; DeepSeek-V3, section 3.2)."""
    ep, m = 4, 3
    found = rows(MODEL, engine, m, dp_shard=8, ep=ep)
    tokens = B * S
    both = [found["ep", "all_to_all", phase, "bf16"] for phase in ("forward", "backward")]
    assert [int(total.calls) for total in both] == [2 * LAYERS * m] * 2
    assert sum(float(total.wire_bytes) for total in both) == LAYERS * m * 2 * rho(ep) * tokens * K * H * (2 + 2)


@pytest.mark.parametrize("engine", [TORCHTITAN, MEGATRON], ids=lambda e: e.name)
def test_gradients_of_experts_are_added_among_their_copies(engine: Any) -> None:
    """Those of experts in the smaller group, all others among all data ranks."""
    m = 2
    found = rows(MODEL, engine, m, dp_shard=8, ep=4)
    times = m if engine is TORCHTITAN else 1  # FSDP2 reduces in each micro-batch
    of_experts = LAYERS * 3 * H * F * E // 4
    rest = parameters(MODEL) - LAYERS * 3 * H * F * E
    assert found["edp", "reduce_scatter", "backward", "fp32"].payload_bytes == 4 * of_experts * times
    assert found["dp_shard", "reduce_scatter", "backward", "fp32"].payload_bytes == 4 * rest * times


def test_an_expert_split_over_its_own_tensor_axis_gathers_and_scatters_slots() -> None:
    """Megatron's etp: tokens of its ranks are gathered before an expert, and what it makes is scattered among them."""
    m, ep, etp = 1, 2, 2
    found = rows(MODEL, MEGATRON, m, dp_shard=4, tp=2, ep=ep, etp=etp)
    slots = B * S // 2 * K * H * 2  # bytes of a rank's own slots, bf16
    assert found["ep", "all_to_all", "forward", "bf16"].payload_bytes == LAYERS * m * 2 * slots
    assert found["etp", "all_gather", "forward", "bf16"].payload_bytes == LAYERS * m * etp * slots
    assert found["etp", "reduce_scatter", "forward", "bf16"].payload_bytes == LAYERS * m * etp * slots


def test_expert_parallelism_of_one_is_none() -> None:
    """On the mesh of all other weights, or on one of its own with ep = 1 and etp = tp, experts lie the same."""
    layout = Layout(dp_shard=4, tp=2, structure=Structure(zero=1, tensor="sequence"))
    own = replace(layout, etp=2, structure=replace(layout.structure, own_experts=True))
    job, machine = Job(S, 16), cluster.load("1x8xh100-sxm")
    one, other = (nanum.predict(MODEL, job, machine, at, engine="megatron").to_dict() for at in (layout, own))
    assert one["memory"]["worst"]["allocated_bytes"] == other["memory"]["worst"]["allocated_bytes"]
    assert one["time"]["step_seconds"] == pytest.approx(other["time"]["step_seconds"], rel=0.02)


def saved(model: Model, engine: Any) -> int:
    """Bytes that one layer's forward pass keeps for its backward, on one GPU."""
    structure = Structure(zero=0 if engine is MEGATRON else 3)
    parts = emit_parts(model, Job(S, B), Layout(micro_batch_size=B, structure=structure), engine)
    return int(peak(parts.bodies.layers[0].forward).net)


def test_a_layer_of_experts_saves_what_the_formula_says() -> None:
    """A = 8h + 2(q + kv) + 2q + 6f + 4a + 8 (formulas.md section 5), with k(2h + 6f) + scores and choices for 6f: fused
    kernels, probabilities inside the activation.
    """
    q, kv, a = 16 * 64, 2 * 4 * 64, 16
    attention = 2 * H + 2 * H + 4 + 2 * (q + kv) + 2 * q + 4 * a + 2 * H + 2 * H + 4
    routed = K * (2 * H + 6 * F) + 4 * E + 3 * 8 * K + 4 * K  # scores fp32; choice, its order, rows int64; weights fp32
    output = 2 * H  # the next layer's input, which this one hands on
    assert saved(MODEL, MEGATRON) == B * S * (attention - 2 * H + routed + output)


def test_a_layer_of_latent_attention_saves_whole_heads_and_latents() -> None:
    """2 a (2 (nope + rope) + 2 v) for q, k, v and the output, beside the latent vectors (DeepSeek-V2, section 2.1)."""
    model = replace(MODEL, attention=LATENT, mlp=Mlp(F, True, "silu"))
    plain = replace(MODEL, mlp=Mlp(F, True, "silu"))
    heads = 16
    cores = 2 * heads * (2 * (64 + 32) + 2 * 64)
    latents = 2 * 2 * 768 + 4 + 2 * 2 * 256 + 4  # of queries, of keys: before their norm, its root, and after it
    usual = 2 * (16 * 64 + 2 * 4 * 64) + 2 * 16 * 64
    assert saved(model, MEGATRON) - saved(plain, MEGATRON) == B * S * (cores + latents - usual)


@pytest.mark.parametrize("rank", [768, None])
def test_latent_attention_has_deepseek_s_parameters(rank: int | None) -> None:
    a = replace(LATENT, q_lora_rank=rank)
    model = replace(MODEL, attention=a, mlp=Mlp(F, True, "silu"), num_hidden_layers=1)
    queries = H * rank + rank + rank * 16 * 96 if rank else H * 16 * 96
    keys = H * (256 + 32) + 256 + 256 * 16 * (64 + 64)
    assert parameters(model) == 2 * V * H + queries + keys + 16 * 64 * H + 3 * H * F + 3 * H


def test_deepseek_v3_is_671_billion() -> None:
    """671,026,419,200 without its multi-token prediction (the published count of the checkpoint's main model)."""
    a = LatentAttention(128, 1536, 512, 128, 64, 128)
    experts = Experts(256, 8, Mlp(2048, True, "silu"), shared=Mlp(2048, True, "silu"), correction_bias=True)
    dense = Layer(a, Mlp(18432, True, "silu"))
    model = Model("v3", 7168, 129280, 61, 4096, a, experts, "rms_norm", "rotary", False, leading=(dense,) * 3)
    assert parameters(model) == 671_026_419_200


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"ep": 3, "dp_shard": 6}, "ep=3 does not divide num_experts=8"),
        ({"ep": 8, "dp_shard": 4}, "ep·etp=8·1=8 does not divide dp_shard·cp·tp=4"),
        ({"ep": 2, "etp": 3, "dp_shard": 6}, "etp=3 does not divide an expert's intermediate_size=512"),
    ],
)
def test_impossible_divisions_of_experts_are_said(sizes: dict[str, int], said: str) -> None:
    gpus = sizes["dp_shard"]
    with pytest.raises(Refused) as refused:
        nanum.predict(MODEL, Job(S, 24), cluster.load(f"1x{gpus}xh100-sxm"), Layout(**sizes), engine="megatron")
    assert any(said in reason for reason in refused.value.reasons), refused.value.reasons


def test_a_dense_model_has_no_experts_to_spread() -> None:
    dense = replace(MODEL, mlp=Mlp(F, True, "silu"))
    with pytest.raises(Refused, match="ep=2, but moe has no experts"):
        nanum.predict(dense, Job(S, 16), cluster.load("1x8xh100-sxm"), Layout(dp_shard=8, ep=2))


# --- the fullest rank -------------------------------------------------------------------------------------------------
def uneven(engine: Any, imbalance: float, *, tp: int = 1, **sizes: Any) -> Any:
    zero, tensor = 3 if engine is TORCHTITAN else 1, "sequence" if tp > 1 else "none"
    structure = Structure(zero=zero, own_experts=True, tensor=tensor)  # type: ignore[arg-type]
    at = Layout(**sizes, tp=tp, micro_batch_size=B, structure=structure)
    return build(MODEL, Job(S, B * 24, expert_imbalance=imbalance), at, engine, 0)


@pytest.mark.parametrize("engine", [TORCHTITAN, MEGATRON], ids=lambda e: e.name)
@pytest.mark.parametrize("imbalance", [1.25, 1.5, 3])
def test_the_fullest_rank_has_so_many_times_its_share(engine: Any, imbalance: float) -> None:
    """Its all-to-alls, its experts' products and what it saves of its slots; all else is as it was."""
    ep, m = 4, 3
    even, full = (uneven(engine, x, dp_shard=8, ep=ep) for x in (1.0, imbalance))
    products = m * LAYERS * 18.0 * B * S * K * H * F
    assert flops(full.program) - flops(even.program) == pytest.approx((imbalance - 1) * products, rel=1e-9)

    def sent(found: Any, *, slots: bool) -> dict[Any, float]:
        rows = traffic(found.program).items()
        return {k: float(t.wire_bytes) for k, t in rows if (k.kind == "all_to_all" and "ep" in k.axes) == slots}

    assert sent(full, slots=False) == sent(even, slots=False)
    assert sent(full, slots=True) == pytest.approx({k: imbalance * n for k, n in sent(even, slots=True).items()})


@pytest.mark.parametrize(("engine", "tp"), [(TORCHTITAN, 1), (MEGATRON, 1), (MEGATRON, 2)], ids=lambda x: str(x)[:4])
def test_the_fullest_rank_saves_more_of_its_slots(engine: Any, tp: int) -> None:
    """Linear in the imbalance, and by at least what its last matrices read: 2·F bytes a slot."""

    def saved(imbalance: float) -> int:
        found = uneven(engine, imbalance, tp=tp, dp_shard=8 // tp, ep=4)
        return int(peak(found.actions["forward.first"]).net)

    more = [saved(x) - saved(1.0) for x in (1.5, 2.0)]
    assert more[1] == pytest.approx(2 * more[0], rel=1e-6)
    assert more[1] >= LAYERS * 2 * F * B * S * K // tp


def test_uneven_layouts_at_once() -> None:
    """Emitted together they are those emitted one by one; where nothing is spread, nothing is uneven."""
    ep = np.array([2, 4, 8])
    ones = np.ones(3, np.int64)
    columns = {"dp_replicate": ones, "dp_shard": 8 * ones, "tp": ones, "cp": ones, "pp": ones, "ep": ep, "etp": ones}
    structure = Structure(zero=1, own_experts=True)
    job = Job(S, B * 24, expert_imbalance=1.3)
    together = build(MODEL, job, Layout(**columns, micro_batch_size=B * ones, structure=structure), MEGATRON, 0 * ones)
    for i, ranks in enumerate(ep):
        one = build(MODEL, job, Layout(dp_shard=8, ep=int(ranks), micro_batch_size=B, structure=structure), MEGATRON, 0)
        assert peak(together.program).peak[i] == peak(one.program).peak
        assert flops(together.program)[i] == flops(one.program)
    alone = Layout(dp_shard=8, micro_batch_size=B, structure=Structure(zero=1))
    even = build(MODEL, Job(S, B * 24), alone, MEGATRON, 0)
    assert peak(build(MODEL, job, alone, MEGATRON, 0).program).peak == peak(even.program).peak


@pytest.mark.parametrize(
    ("model", "imbalance", "why"),
    [
        (MODEL, 5.0, "expert_imbalance=5 with ep=4: a rank that has all slots has 4 times its share"),
        (MODEL, 0.5, "expert_imbalance=0.5: the fullest rank's slots over its even share, at least 1"),
        (replace(MODEL, mlp=Mlp(F, True, "silu")), 1.5, "expert_imbalance=1.5, but moe has no experts"),
    ],
)
def test_impossible_shares(model: Model, imbalance: float, why: str) -> None:
    at = Layout(dp_shard=8, ep=4, structure=Structure(zero=3))
    with pytest.raises(Refused) as refused:
        nanum.predict(model, Job(S, 8, expert_imbalance=imbalance), cluster.load("1x8xh100-sxm"), at)
    assert any(why in reason for reason in refused.value.reasons), refused.value.reasons
