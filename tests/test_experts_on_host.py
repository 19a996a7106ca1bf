"""What the host has to do with experts: launches that a CUDA graph has, loops over experts, and what these add to a
layer; read off Megatron-LM's and Transformer Engine's code, which the module of each says where.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nanum import cluster, engines
from nanum import model as models
from nanum.account.coefficients import coefficients
from nanum.account.traffic import traffic
from nanum.build import build
from nanum.engines import megatron_kin as kin
from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Experts, Mlp, Model
from nanum.prediction import Prediction, consistent
from nanum.program import Compute, Node, Repeat

MEGATRON, TORCHTITAN = engines.load("megatron"), engines.load("torchtitan")
B, S, E, K, D, F = 2, 256, 8, 2, 512, 384
MOE = replace(models.load("tiny-llama"), hidden_size=D, mlp=Experts(E, K, Mlp(F, gated=True, activation="silu")))
BIASED = replace(MOE, mlp=Experts(E, K, Mlp(F, gated=True, activation="silu", bias=True), router_bias=True))
AT = Layout(dp_shard=4, ep=4, micro_batch_size=B, structure=Structure(zero=1, own_experts=True))


def kernels(nodes: Any, times: float = 1) -> Iterator[tuple[Compute, float]]:
    """Every kernel of a Program, and how often a step does it."""
    for node in nodes:
        if isinstance(node, Repeat):
            yield from kernels(node.body, times * node.count)
        elif isinstance(node, Compute) and times:
            yield node, times


def of_step(model: Model, engine: Engine, layout: Layout = AT) -> dict[str, list[Compute]]:
    """By name."""
    found: dict[str, list[Compute]] = defaultdict(list)
    nodes: tuple[Node, ...] = build(model, Job(S, 16), layout, engine, 0).program
    for node, _ in kernels(nodes):
        found[node.name].append(node)
    return found


def launched(engine: Engine) -> set[str]:
    """Names of what the host launches in the layers."""
    return {name for name, nodes in of_step(MOE, engine).items() if any(node.calls for node in nodes)}


ATTENTION = {"norm1", "wq", "attention", "wo", "attention_backward", "dx_wo", "dw_wv", "d_norm1"}
ROUTER = {"norm2", "router", "router_softmax", "topk", "sort", "dx_router", "d_router_softmax", "d_norm2"}
SLOTS = {"spread", "expert_gate", "swiglu", "scale", "expert_down", "combine", "dx_expert_down", "d_swiglu", "d_spread"}


def test_a_graph_s_scopes_are_its_parts_forward_and_backward() -> None:
    """`cuda_graph_scope` of Megatron-Core: attn, moe_router and moe_preprocess; what is sent and computed by experts
    is in none.
    """
    scopes = ("none", "router", "partial", "full")
    none, router, partial, full = (launched(kin.bridge(overlaps="none", graphs=of, grads="")) for of in scopes)
    assert none >= ATTENTION | ROUTER | SLOTS
    assert router >= ATTENTION | SLOTS
    assert not router & ROUTER
    assert partial >= SLOTS
    assert not partial & (ROUTER | ATTENTION)
    assert not full & (ROUTER | ATTENTION | SLOTS)


def test_the_host_goes_through_slots_by_expert_and_through_nothing_else() -> None:
    by_expert = {name for name, nodes in of_step(MOE, MEGATRON).items() if any(n.expert_by_expert for n in nodes)}
    assert by_expert >= SLOTS
    assert not by_expert & (ROUTER | ATTENTION | {"head", "optimizer"})
    assert not any(node.expert_by_expert for nodes in of_step(MOE, TORCHTITAN).values() for node in nodes)


def test_what_all_tokens_go_through_is_no_slot() -> None:
    """Shared experts are an ordinary feed-forward block, and their residual is added whole."""
    shared = replace(MOE, mlp=replace(MOE.mlp, shared=Mlp(F, gated=True, activation="silu")))
    found = of_step(shared, MEGATRON)
    assert {"shared_gate", "shared_down", "dx_shared_down"} <= found.keys()
    assert not any(node.expert_by_expert for name in found if "shared" in name for node in found[name])
    assert not any(node.expert_by_expert for node in found["residual"])


def test_a_bias_exchanges_nothing() -> None:
    """Also where each expert is split, and its output a sum that is not yet carried out."""
    at = replace(AT, tp=2, dp_shard=2, ep=2, etp=2, structure=replace(AT.structure, tensor="sequence"))

    def exchanged(model: Model) -> dict[Any, tuple[int, int]]:
        found = traffic(build(model, Job(S, 16), at, MEGATRON, 0).program)
        return {key: (int(t.calls), int(t.payload_bytes)) for key, t in found.items() if key.what == "activations"}

    assert exchanged(BIASED) == exchanged(replace(MOE, mlp=replace(MOE.mlp, router_bias=True)))


def test_what_a_launch_costs_there_is_a_coefficient_of_its_own() -> None:
    """A step that is bound by launches grows with it, one without experts does not."""
    known, at = coefficients(), consistent(AT)

    def step(model: Model, factor: float) -> float:
        slow = replace(known.fitted.expert_seconds, value=factor * known.fitted.expert_seconds.value)
        own = replace(known, fitted=replace(known.fitted, expert_seconds=slow))
        layout = at if isinstance(model.mlp, Experts) else consistent(Layout(dp_shard=4, structure=Structure(zero=1)))
        return float(Prediction(model, Job(S, 16), cluster.load("1x4xh100-sxm"), layout, MEGATRON, own).parts.step[0])

    assert 1.5 < step(MOE, 2) / step(MOE, 1) < 2
    assert step(models.load("tiny-llama"), 2) == step(models.load("tiny-llama"), 1)


def test_a_bias_is_added_by_loops_over_experts_in_fp32() -> None:
    """`_apply_bias` of Megatron-LM's experts: bias times probability in fp32 (written, read), added to the half output
    into fp32, joined, and back to half; of the gradients each step the other way round. Bytes of a slot's entry, but
    for the biases' and probabilities' own.
    """
    entries = B * S * K * D  # slots of a rank: its tokens' share, E ranks' worth of tokens over E experts
    plain, biased = of_step(MOE, MEGATRON), of_step(BIASED, MEGATRON)
    assert not {"expert_bias", "d_expert_bias"} & plain.keys()

    def a_layer(name: str, phase: str) -> float:
        of = [node for node in biased[name] if node.phase == phase]
        before = [node for node in plain.get(name, []) if node.phase == phase]
        return float(sum(n.bytes_moved for n in of) - sum(n.bytes_moved for n in before)) / len(biased["expert_bias"])

    small = E // 4 * D * 2 + B * S * K * 4  # a rank's biases, and a number for each slot
    assert a_layer("expert_bias", "forward") == (2 + 4 + 2 * 4) * entries + small
    assert a_layer("cat", "forward") == (4 + 4) * entries
    assert a_layer("to_half", "forward") == (4 + 2) * entries
    assert a_layer("to_float", "backward") == (2 + 4) * entries
    assert a_layer("to_half", "backward") == (4 + 2) * entries
    assert a_layer("cat", "backward") == (2 + 2) * entries
    assert a_layer("d_expert_bias", "backward") == (4 + 5 * 4) * entries + 2 * small
    (loop,) = {node.launches for node in biased["expert_bias"]}
    assert loop == 2 * E // 4


@pytest.mark.parametrize("engine", [MEGATRON, TORCHTITAN], ids=lambda engine: engine.name)
def test_biases_and_sinks_are_parameters_whoever_adds_them(engine: Engine) -> None:
    """gpt-oss's published count, in bf16 parameters (torchtitan's are fp32)."""
    model = models.load("gpt-oss-20b")
    layout = consistent(Layout(dp_shard=1, structure=Structure(zero=1 if engine is MEGATRON else 3)))
    (stage,) = Prediction(model, Job(4096, 1), cluster.load("1x1xb200"), layout, engine).memory
    held = stage.moment.by_category["params"]
    padded = 128 * -(-model.vocab_size // 128) if engine is MEGATRON else model.vocab_size
    more = 2 * (padded - model.vocab_size) * model.hidden_size
    assert held == (2 if engine is MEGATRON else 4) * (20_914_757_184 + more)


def test_sinks_are_in_cudnn_s_kernel_and_beside_pytorch_s() -> None:
    model = models.load("gpt-oss-20b")
    inside = of_step(replace(model, max_position_embeddings=S), MEGATRON)
    beside = of_step(
        replace(model, max_position_embeddings=S), TORCHTITAN, replace(AT, structure=replace(AT.structure, zero=3))
    )
    assert "d_sinks" in inside
    assert "d_sinks" not in beside
    assert {"mul", "d_mul"} & beside.keys()
    assert not {"mul", "d_mul"} & inside.keys()


def test_what_waits_for_the_host_is_told() -> None:
    """Small experts on a fast GPU: the step is that much shorter where launches are free, and never longer."""
    model, machine = models.load("qwen3-30b-a3b"), cluster.load("1x8xb200")
    at = consistent(Layout(dp_shard=8, ep=8, micro_batch_size=1, structure=Structure(zero=1)))
    known = coefficients()
    none = replace(known.fitted.host_seconds, value=0.0)
    free = replace(known, fitted=replace(known.fitted, host_seconds=none, expert_seconds=none))
    asked = model, Job(4096, 64), machine, at, MEGATRON
    bound, without = Prediction(*asked, known), Prediction(*asked, free)
    assert bound.launch_seconds == pytest.approx(float(bound.parts.step[0] - without.parts.step[0]), rel=1e-2)
    assert bound.launch_seconds > 0.4 * float(bound.parts.step[0])
    dense = Prediction(models.load("llama-3.1-8b"), Job(8192, 8), machine, consistent(Layout(dp_shard=8)), TORCHTITAN)
    assert dense.launch_seconds == pytest.approx(0, abs=1e-6)
