"""What is kept in the host's memory: bytes on either side, what crosses the link between them, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import nanum
from nanum import cluster, engines
from nanum.account.memory import held_after, peak
from nanum.account.traffic import traffic
from nanum.build import build
from nanum.division.parts import emit_parts
from nanum.errors import Refused
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Mlp, Model
from nanum.model import load as load_model
from nanum.parallel.pipeline import Step
from nanum.prediction.reference import parameters
from nanum.program import FROM_HOST, TO_HOST, OnHost

H, F, V, L, S = 512, 1408, 2048, 4, 64
ATTENTION, MLP = Attention(8, 8, 64), Mlp(F, gated=True, activation="silu")
MODEL = Model("llama", H, V, L, 256, ATTENTION, MLP, "rms_norm", "rotary", False)
NORMS, LARGEST = (2 * L + 1) * H, V * H
P = parameters(MODEL)
NODE = cluster.load("1x8xh100-sxm")


def step(engine: str, zero: int, d: int, m: int, *offload: str, precision: str = "bf16", **given: Any) -> Step:
    structure = Structure(zero=zero, offload=offload, **given)
    layout = Layout(dp_shard=d, structure=structure)
    return build(MODEL, Job(S, m * d, precision), layout, engines.load(engine), 0)  # type: ignore[arg-type]


def crossed(program: Step, kind: str, what: str | None = None, dtype: str | None = None) -> int:
    rows = traffic(program.program).items()
    return sum(
        int(t.payload_bytes) for k, t in rows if k.kind == kind and what in (None, k.what) and dtype in (None, k.dtype)
    )


def on_host(program: Step) -> int:
    return sum(int(node.bytes) for node in program.resident if isinstance(node, OnHost))


def at_rest(program: Step) -> tuple[int, ...]:
    held = held_after(program.resident)
    return tuple(held.get(c, 0) for c in ("params", "grads", "optimizer_states"))


# --- DeepSpeed --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("d", [1, 4])
def test_zero_offload_keeps_half_precision_weights_alone_on_the_device(zero: int, d: int) -> None:
    """ZeRO-Offload (arXiv 2101.06840, section 3): 2M bytes on the device, the 14M of gradients, masters and AdamW on
    the host, each rank's M/d of them. DeepSpeed 0.19.6 has the gradients there in fp32, a half-precision copy of the
    masters, and room for one gradient on either side.
    """
    program = step("deepspeed", zero, d, 1, "optimizer")
    assert at_rest(program) == (2 * P, 0, 0)
    room, without = (held_after(p.resident)["buffers"] for p in (program, step("deepspeed", zero, d, 1)))
    assert room - without == 2 * LARGEST
    assert on_host(program) == (12 + 4 + 2) * P // d + 2 * LARGEST
    assert held_after(program.program).get("grads", 0) == 0


@pytest.mark.parametrize("d", [1, 4])
def test_zero_offload_moves_each_weight_once_a_step(d: int) -> None:
    """The paper's traffic is 4M a step: gradients down and weights up, 2M each. Weights do; gradients are made fp32 on
    the device before they go (stage_1_and_2.py: `async_inplace_copy_grad_to_fp32_buffer_from_gpu`), which is 4M.
    """
    program = step("deepspeed", 2, d, 1, "optimizer")
    assert crossed(program, FROM_HOST) == 2 * P // d
    assert crossed(program, TO_HOST) == 4 * P // d


@pytest.mark.parametrize(("zero", "downs", "ups"), [(2, 3, 2), (1, 1, 1)])
def test_sums_of_gradients_go_by_the_device(zero: int, downs: int, ups: int) -> None:
    """Of three micro-batches ZeRO-2 brings the sum down after each, and up before all but the first; ZeRO-1, which
    reduces in the last alone, once. Both send it down in fp32 besides.
    """
    program = step("deepspeed", zero, 4, 3, "optimizer")
    share = 2 * P // 4
    assert crossed(program, TO_HOST, "grads", "bf16") == downs * share
    assert crossed(program, FROM_HOST, "grads", "bf16") == ups * share
    assert crossed(program, TO_HOST, "grads", "fp32") == 2 * share
    assert peak(program.program, host=True).peak == on_host(program) + share


@pytest.mark.parametrize("m", [1, 3])
def test_zero_3_offloads_optimizer_and_weights_apart(m: int) -> None:
    d = 4
    plain, optimizer, params, both = (
        step("deepspeed", 3, d, m, *way) for way in ((), ("optimizer",), ("params",), ("optimizer", "params"))
    )
    assert at_rest(plain) == (2 * P // d + 2 * NORMS, 2 * P // d, 12 * P // d)
    assert at_rest(optimizer) == (2 * P // d + 2 * NORMS, 0, 0)
    assert at_rest(params) == (2 * NORMS, 2 * P // d, 12 * P // d)
    assert at_rest(both) == (2 * NORMS, 0, 0)
    assert [on_host(p) for p in (optimizer, params, both)] == [18 * P // d, 2 * P // d, 20 * P // d]
    # A share's gradient goes down and comes back in each micro-batch, and down once more in fp32.
    assert crossed(optimizer, TO_HOST) == m * 2 * P // d + 4 * P // d
    assert crossed(optimizer, FROM_HOST, "grads") == m * 2 * P // d
    # Weights come up after the update, or before each gather; between the two nothing crosses.
    assert crossed(optimizer, FROM_HOST, "params") == 2 * P // d
    assert crossed(params, TO_HOST) == 2 * P // d
    assert crossed(both, TO_HOST) == crossed(optimizer, TO_HOST)
    gathered = sum(int(t.payload_bytes) for k, t in traffic(both.program).items() if k.kind == "all_gather")
    persistent = 2 * NORMS
    assert crossed(both, FROM_HOST, "params") == (gathered - persistent) // d


def test_weights_come_up_to_a_rank_that_is_alone() -> None:
    """ZeRO-Infinity (arXiv 2104.07857): a model larger than the device trains on one."""
    program = step("deepspeed", 3, 1, 1, "optimizer", "params")
    moved = 2 * (P - NORMS)
    assert moved <= crossed(program, FROM_HOST, "params") <= 2 * moved  # what lives on is not fetched again
    assert all(k.kind in (TO_HOST, FROM_HOST) for k in traffic(program.program))


@pytest.mark.parametrize(("way", "gib"), [(("optimizer",), 3.66), (("optimizer", "params"), 0.49)])
def test_deepspeeds_own_estimates(way: tuple[str, ...], gib: float) -> None:
    """github.com/deepspeedai/DeepSpeed/issues/4527: 2 and 0 bytes a parameter over 4 GPUs, and 4 of the largest layer.
    States at rest, per parameter, are these. (Without offload: `test_engines`.)
    """
    n, d, largest = 6805e6, 4, 131e6
    held = sum(at_rest(step("deepspeed", 3, d, 1, *way))) - 2 * NORMS
    assert (held / P * n + 4 * largest) / 2**30 == pytest.approx(gib, abs=0.005)


# --- FSDP2 ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["torch", "torchtitan", "accelerate"])
@pytest.mark.parametrize("m", [1, 3])
def test_the_offload_policy_keeps_all_shards_on_the_host(engine: str, m: int) -> None:
    """`CPUOffloadPolicy`: 4 bytes of each parameter and 8 of AdamW, and in the end 4 of its gradient; the fp32 shard
    goes up before each gather, and each reduction's output down.
    """
    d = 4
    program, plain = step(engine, 3, d, m, "params"), step(engine, 3, d, m)
    counters = 4 * (3 + 9 * L)
    assert at_rest(program) == (0, 0, 0)
    assert on_host(program) == 12 * P // d + counters
    gathered = sum(int(t.payload_bytes) for k, t in traffic(program.program).items() if k.kind == "all_gather")
    assert crossed(program, FROM_HOST) == gathered * 2 // d  # fp32 goes up, bf16 is gathered
    reduced = sum(int(t.payload_bytes) for k, t in traffic(program.program).items() if k.kind == "reduce_scatter")
    itemsize = 2 if engine == "accelerate" else 4
    assert crossed(program, TO_HOST) == reduced // itemsize * 4 // d
    assert set(held_after(program.program).values()) == {0, held_after(program.at_rest)["buffers"]}
    least = peak(plain.program).peak - peak(program.program).peak
    assert 0 < least <= 16 * P // d + counters


def test_gradients_that_are_there_are_added_on_the_host() -> None:
    """`non_blocking` is off where a gradient is accumulated: arrived ones are beside those that are there."""
    one, three = (peak(step("torchtitan", 3, 4, m, "params").program, host=True).peak for m in (1, 3))
    unit = max(4 * H * H + 3 * F * H + 2 * H, V * H + H) * 4 // 4
    assert three - one == unit


# --- Megatron ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("part", [1.0, 0.25])
def test_megatrons_hybrid_optimizer_keeps_a_fraction_on_the_host(part: float) -> None:
    """hybrid_optimizer.py: fp32 gradients down and fp32 masters up, 4 bytes each; the fp32 gradient buffer stays."""
    d = 4
    program, plain = step("megatron", 1, d, 2, "optimizer", offload_fraction=part), step("megatron", 1, d, 2)
    params, grads, states = at_rest(plain)
    assert at_rest(program) == (params, grads, states - part * states)
    assert on_host(program) == part * 16 * P // d
    assert crossed(program, TO_HOST) == crossed(program, FROM_HOST) == part * 4 * P // d


# --- activations ------------------------------------------------------------------------------------------------------
def saved(engine: str, **given: Any) -> int:
    """Of one layer, for its backward."""
    layout = Layout(dp_shard=4, structure=Structure(zero=1, **given))
    return int(peak(emit_parts(MODEL, Job(S, 8), layout, engines.load(engine)).bodies.layers[0].forward).net)


@pytest.mark.parametrize("m", [1, 2])
def test_transformer_engine_takes_all_layers_activations_but_two_to_the_host(m: int) -> None:
    """cpu_offload.py, `DefaultOffloadSynchronizer`: of n layers offloaded out of L, L - n are on the device at once."""
    program, plain = step("megatron", 1, 4, m, "activations"), step("megatron", 1, 4, m)
    moved = (L - 2) * saved("megatron")
    assert crossed(program, TO_HOST, "activations") == crossed(program, FROM_HOST, "activations") == m * moved
    assert peak(program.program, host=True).peak == moved
    assert held_after(program.program)["activations"] == held_after(plain.program)["activations"]
    deep, shallow = (activations_at_the_loss(replace(MODEL, num_hidden_layers=n), "megatron") for n in (12, 4))
    assert deep == shallow


def activations_at_the_loss(model: Model, engine: str, **given: Any) -> int:
    structure = Structure(zero=1, offload=("activations",), **given)
    program = build(model, Job(S, 4), Layout(dp_shard=4, structure=structure), engines.load(engine), 0)
    return int(held_after(program.actions["forward.first"])["activations"])


def test_deepspeed_takes_the_inputs_of_recomputed_layers_to_the_host() -> None:
    """cpu_checkpointing keeps the last input on the device (`keep_last_count`), and finds the one before it there still
    (`_fwd_stash`): of 2sbh bytes each, L - 1 go down and L - 2 come up.
    """
    program = step("deepspeed", 1, 4, 1, "activations", recompute="full")
    one = 2 * S * H
    assert saved("deepspeed", recompute="full") == one
    assert crossed(program, TO_HOST, "activations") == (L - 1) * one
    assert crossed(program, FROM_HOST, "activations") == (L - 2) * one
    assert peak(program.program, host=True).peak == (L - 1) * one
    deep, shallow = (
        activations_at_the_loss(replace(MODEL, num_hidden_layers=n), "deepspeed", recompute="full") for n in (12, 4)
    )
    assert deep == shallow


@pytest.mark.parametrize(("engine", "recompute"), [("megatron", "none"), ("deepspeed", "full")])
def test_an_endless_link_costs_activations_nothing(engine: str, recompute: Any) -> None:
    link = NODE.host.link  # type: ignore[union-attr]
    endless = replace(
        link,
        bytes_per_second=replace(link.bytes_per_second, value=1e30),
        latency_seconds=replace(link.latency_seconds, value=0.0),
    )
    machine = replace(NODE, host=replace(NODE.host, link=endless))  # type: ignore[type-var]
    plain, offloaded, waited = (
        answer(*way, machine=where, engine=engine, zero=1, recompute=recompute)["time"]["step_seconds"]
        for way, where in (((), machine), (("activations",), machine), (("activations",), NODE))
    )
    assert offloaded == pytest.approx(plain, rel=1e-9)
    assert waited > plain


# --- time, and what is said -------------------------------------------------------------------------------------------
def answer(*offload: str, machine: Any = NODE, engine: str = "deepspeed", **given: Any) -> dict[str, Any]:
    structure = Structure(zero=3, offload=offload)
    layout = Layout(dp_shard=machine.gpus, structure=replace(structure, **given))
    job = Job(2048, 2 * machine.gpus)
    return nanum.predict(load_model("llama-3.1-8b"), job, machine, layout, engine=engine).to_dict()


def test_copies_take_what_the_link_takes() -> None:
    document = answer("params", engine="torchtitan")
    rows = [row for row in document["communication"] if row["kind"] in (TO_HOST, FROM_HOST)]
    link = NODE.host.link  # type: ignore[union-attr]
    assert {row["link"] for row in rows} == {link.name}
    assert {(row["axis"], row["group_size"]) for row in rows} == {("", 1)}
    rate = link.bytes_per_second.value * link.efficiency.value
    for row in rows:
        assert row["wire_bytes"] == row["payload_bytes"]
        assert row["seconds"] == pytest.approx(row["payload_bytes"] / rate + row["calls"] * link.latency_seconds.value)
    stated = {one["what"]: one for one in document["assumptions"]}
    assert stated[f"{link.name} to the host, one direction of a GPU"]["value"] == 64e9
    assert stated["the host's memory, a GPU's share of its bandwidth"]["tag"] == "assumed"
    assert not [what for what in answer()["assumptions"] if "host" in what["what"]]


def test_the_host_updates_as_fast_as_its_memory() -> None:
    """CPUAdam on a fourth of the bandwidth takes four times as long; the device's own update does not care."""
    slow = replace(NODE.host, memory_bytes_per_second=replace(NODE.host.memory_bytes_per_second, value=76.8e9 / 4))  # type: ignore[union-attr,type-var]
    crawling = replace(NODE, host=slow)
    fast, slower = (answer("optimizer", machine=m)["time"]["optimizer_seconds"] for m in (NODE, crawling))
    assert slower == pytest.approx(4 * fast, rel=1e-9)
    assert answer(machine=crawling)["time"] == answer()["time"]


def test_an_offloaded_step_is_mostly_its_update() -> None:
    """github.com/deepspeedai/DeepSpeed/issues/6834, Qwen 72B on 32 A100: a step with optimizer and parameters offloaded
    was 50 times slower than without. Ordered alike, the update 20 times slower and more.
    """
    model, machine = load_model("qwen2.5-72b"), cluster.load("4x8xa100-sxm-80gb")
    without, offloaded = (
        nanum.predict(model, Job(256, 32), machine, Layout(dp_shard=32, structure=s), engine="deepspeed").to_dict()
        for s in (Structure(zero=3), Structure(zero=3, offload=("optimizer", "params")))
    )
    assert offloaded["time"]["step_seconds"] > without["time"]["step_seconds"]
    assert offloaded["time"]["optimizer_seconds"] > 20 * without["time"]["optimizer_seconds"]
    assert offloaded["memory"]["worst"]["device_bytes"] < without["memory"]["worst"]["device_bytes"]


def test_a_superchip_loses_less() -> None:
    """The same bytes cross a link of 64 GB/s or one of 450."""
    card, superchip = (
        answer("params", machine=cluster.load(f"1x4x{chip}"), engine="torchtitan")["communication"]
        for chip in ("b200", "gb200")
    )
    moved = [[row for row in rows if row["kind"] in (TO_HOST, FROM_HOST)] for rows in (card, superchip)]
    assert [row["payload_bytes"] for row in moved[0]] == [row["payload_bytes"] for row in moved[1]]
    assert all(a["seconds"] > 2 * b["seconds"] for a, b in zip(*moved, strict=True))


def test_host_bytes_are_in_the_document() -> None:
    document = answer("optimizer")
    (stage,) = document["memory"]["stages"]
    assert stage["host_bytes"] >= 18 * 8.03e9 / 8
    assert answer()["memory"]["stages"][0]["host_bytes"] == 0
    assert (document["layout"]["offload"], document["layout"]["offload_fraction"]) == ("optimizer", 1.0)


@pytest.mark.parametrize(
    ("engine", "zero", "offload", "said"),
    [
        ("torchtitan", 3, ("optimizer",), "not in torchtitan: training.enable_cpu_offload is FSDP2's CPUOffloadPolicy"),
        ("torchtitan", 3, ("activations",), "not in torchtitan"),
        ("accelerate", 3, ("optimizer",), "not in accelerate: fsdp_offload_params"),
        ("torch", 1, ("params",), "not in torch: FSDP2's CPUOffloadPolicy is what offloads"),
        ("deepspeed", 2, ("params",), "not in deepspeed: offload_param is of ZeRO-3"),
        ("megatron", 1, ("params",), "not in megatron: parameters stay on the device"),
        ("megatron", 3, ("optimizer",), "not in megatron: --optimizer-cpu-offload needs"),
        ("megatron", 1, ("activations",), "is not for a model that recomputes: use --recompute none"),
        ("deepspeed", 1, ("activations",), "of what activation checkpointing keeps: use --recompute full"),
        ("nanotron", 1, ("optimizer",), "not in nanotron: it keeps all on the device"),
    ],
)
def test_what_an_engine_does_not_offload_is_refused_in_its_name(
    engine: str, zero: int, offload: Any, said: str
) -> None:
    recompute: Any = "full" if engine == "megatron" else "none"
    layout = Layout(dp_shard=8, structure=Structure(zero=zero, offload=offload, recompute=recompute))
    with pytest.raises(Refused, match=said):
        nanum.predict(MODEL, Job(S, 16), NODE, layout, engine=engine)


def test_activations_stay_in_a_pipeline_and_in_two_layers() -> None:
    structure = Structure(zero=1, offload=("activations",), pipelined=True)
    two = replace(MODEL, num_hidden_layers=2)
    with pytest.raises(Refused, match=r"use --pp 1; has nothing to offload below three layers \(megatron\)"):
        nanum.predict(two, Job(S, 16), NODE, Layout(dp_shard=4, pp=2, structure=structure), engine="megatron")


@pytest.mark.parametrize(
    ("engine", "optimizer", "given", "said"),
    [
        ("torchtitan", "muon", {"offload": ("params",)}, "its products on the host are not modelled"),
        ("deepspeed", "lion", {"offload": ("optimizer",)}, "CPUAdam is modelled: use adamw"),
        ("megatron", "sgd", {"offload": ("optimizer",), "zero": 1}, "of Adam alone"),
        ("deepspeed", "adamw", {"offload": ("optimizer",), "offload_fraction": 0.5}, "not modelled for deepspeed"),
        ("megatron", "adamw", {"offload_fraction": 0.5, "zero": 1}, "--offload-fraction is of what --offload"),
        ("megatron", "adamw", {"offload": ("disk",), "zero": 1}, "what may be offloaded is optimizer, params"),
    ],
)
def test_what_the_host_does_not_update_is_refused(engine: str, optimizer: Any, given: Any, said: str) -> None:
    layout = Layout(dp_shard=8, structure=Structure(**{"zero": 3, **given}))
    with pytest.raises(Refused, match=said):
        nanum.predict(MODEL, Job(S, 16, optimizer=optimizer), NODE, layout, engine=engine)
