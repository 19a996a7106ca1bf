"""What recompute keeps, runs again and sends again: by module, and of some layers of a stage."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanum
from nanum import cluster, engines
from nanum.account.memory import moment, peak
from nanum.account.traffic import flops, traffic
from nanum.build import build
from nanum.division.parts import emit_parts
from nanum.engines.engine import Engine
from nanum.errors import Refused
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Experts, LatentAttention, Layer, Mlp, Model, load
from nanum.parallel.pipeline import Step

MEGATRON, TORCHTITAN, TORCH = (engines.load(name) for name in ("megatron", "torchtitan", "torch"))
B, S, H, A, F, E, K, FE = 2, 256, 256, 8, 704, 8, 2, 320
T = B * S
ATTENTION, MLP = Attention(A, A, H // A), Mlp(F, True, "silu")
DENSE = Model("dense", H, 1024, 8, 1024, ATTENTION, MLP, "rms_norm", "rotary", False)
MIXED = replace(DENSE, name="mixed", mlp=Experts(E, K, Mlp(FE, True, "silu"), shared=Mlp(F, True, "silu")))
LATENT = LatentAttention(A, 96, 64, 32, 16, 32)
LATENT_MODEL = replace(DENSE, name="latent", attention=LATENT)
SHARED = 6 * F  # a token, of gate, up and their product


def layout(**given: Any) -> Layout:
    sizes = {k: given.pop(k) for k in ("dp_shard", "tp", "pp", "ep") if k in given}
    tensor = "sequence" if sizes.get("tp", 1) > 1 else "none"
    structure = Structure(
        **{"zero": 1, "tensor": tensor, "pipelined": sizes.get("pp", 1) > 1, "own_experts": "ep" in sizes} | given
    )
    return Layout(**sizes, micro_batch_size=B, structure=structure)


def saved(model: Model, *modules: str, **given: Any) -> int:
    """Bytes that the forward pass of one layer leaves for its backward, under Megatron."""
    if modules:
        given |= {"recompute": "selective", "recompute_modules": modules}
    at = layout(**given)
    return int(peak(emit_parts(model, Job(S, B * at.data_ranks), at, MEGATRON).bodies.layers[0].forward).net)


def step(model: Model, engine: Engine = MEGATRON, stage: int = 0, m: int = 2, **given: Any) -> Step:
    at = layout(**given)
    return build(model, Job(S, B * at.data_ranks * m), at, engine, stage)


def forward_bytes(found: Step) -> int:
    """What a stage's first forward pass leaves."""
    return int(peak(found.actions["forward.first"]).net)


# --- modules ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize(
    ("model", "module", "fewer", "whole"),
    [
        pytest.param(DENSE, "mlp", 6 * F, 0, id="gate, up and their product"),
        pytest.param(MIXED, "moe_act", 2 * FE * K, 0, id="of each slot, what an expert's last matrix reads"),
        pytest.param(MIXED, "shared_experts", SHARED, 0, id="of the shared expert as of a dense block"),
        pytest.param(MIXED, "layernorm", 2 * H + 4, 0, id="the norm's output, and its statistic"),
        pytest.param(
            LATENT_MODEL,
            "mla_up_proj",
            2 * A * (48 + 48 + 32) + 2 * (96 + 64) + 8,
            2 * 16,
            id="q, k, v and what they are made of, but not the rotary key, which was gathered",
        ),
    ],
)
def test_what_a_module_no_longer_saves(model: Model, module: str, fewer: int, whole: int, t: int) -> None:
    """Of each token, by what Megatron-LM saves; under sequence parallelism it is divided by t, but for what is `whole`
    and is kept instead.
    """
    assert saved(model, tp=t) - saved(model, module, tp=t) == T * fewer // t - T * whole


def test_recomputing_the_mixture_keeps_its_input() -> None:
    """As a dense block that is recomputed: neither leaves more than what it reads."""
    assert saved(MIXED, "moe") == saved(DENSE, "mlp")


def test_the_core_is_korthikanti_s() -> None:
    """Eager: 5as/h of 2·s·b·h bytes go, with the softmax's mask and result (selective recompute's own choice)."""
    eager = {"attention": "eager"}
    assert saved(DENSE, "core_attn", **eager) == saved(DENSE, recompute="selective", **eager)
    assert saved(DENSE, **eager) - saved(DENSE, "core_attn", **eager) == 2 * A * S * T


@pytest.mark.parametrize(
    ("model", "module", "again"),
    [
        (DENSE, "mlp", 6.0 * T * H * F),
        (MIXED, "moe", 2.0 * T * H * E + 6.0 * T * K * H * FE + 6.0 * T * H * F),
        (MIXED, "moe_act", 0.0),
        (LATENT_MODEL, "mla_up_proj", 2.0 * T * A * (96 * 48 + 64 * (32 + 32))),
        (DENSE, "core_attn", 2.0 * T * H * S),
    ],
)
def test_operations_that_a_module_runs_again(model: Model, module: str, again: float) -> None:
    """Its forward pass's once more, in the phase recompute, and no other's."""
    none, some = (step(model), step(model, recompute="selective", recompute_modules=(module,)))
    assert flops(some.program) - flops(none.program) == again * model.num_hidden_layers * 2
    assert flops(some.program, recompute=False) == flops(none.program)


def test_experts_that_are_recomputed_are_sent_again() -> None:
    """2 + 2 all-to-alls a layer and micro-batch, and 2 more."""

    def calls(*modules: str) -> dict[str, int]:
        given = {"recompute": "selective", "recompute_modules": modules} if modules else {}
        found: dict[str, int] = {}
        for key, total in traffic(step(MIXED, dp_shard=4, ep=4, **given).program).items():
            if key.kind == "all_to_all" and key.dtype == "bf16":
                found[key.phase] = found.get(key.phase, 0) + int(total.calls)
        return found

    each = 2 * MIXED.num_hidden_layers * 2
    assert calls() == calls("moe_act", "layernorm") == {"forward": each, "backward": each}
    assert calls("moe") == {"forward": each, "recompute": each, "backward": each}


def test_each_region_is_run_again_when_backward_comes_to_it() -> None:
    """The feed-forward block before its own backward, and attention after that: never both at once."""
    body = (
        emit_parts(
            DENSE,
            Job(S, B),
            layout(attention="eager", recompute="selective", recompute_modules=("core_attn", "mlp")),
            MEGATRON,
        )
        .bodies.layers[0]
        .backward
    )
    names = [getattr(node, "name", "") for node in body]
    assert names.index("gate") < names.index("dw_down") < names.index("core_scores") < names.index("d_values")


# --- some layers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", [MEGATRON, TORCH], ids=lambda e: e.name)
@pytest.mark.parametrize("model", [DENSE, replace(MIXED, leading=(DENSE.ordinary,) * 3)], ids=["alike", "of two kinds"])
@pytest.mark.parametrize("pp", [1, 2])
def test_so_many_layers_of_each_stage(engine: Engine, model: Model, pp: int) -> None:
    """N layers as under full recompute and the others as without, on every stage."""
    given = {"pp": pp, "zero": 1 if engine is MEGATRON else 0}
    for stage in range(pp):
        kept, gone = (step(model, engine, stage, recompute=mode, **given) for mode in ("none", "full"))
        first = stage * model.num_hidden_layers // pp
        layers = model.num_hidden_layers // pp
        each = dict(zip(("none", "full"), (_of_layers(model, engine, mode) for mode in ("none", "full")), strict=True))
        for n in range(1, layers + 2):
            some = step(model, engine, stage, recompute="full", recompute_layers=n, **given)
            fewer = sum(
                each["none"][kind] - each["full"][kind]
                for kind in (model.kinds.index(layer) for layer in model.layers[first : first + min(n, layers)])
            )
            # What torch's stage receives it holds itself, unless the first layer does.
            received = 2 * T * H * (engine is TORCH and stage > 0)
            assert forward_bytes(kept) - forward_bytes(some) == fewer + received
        assert forward_bytes(some) == forward_bytes(gone)
        assert moment(some.program).bytes == moment(gone.program).bytes


WINDOWED = replace(DENSE, name="windowed", alternates=(Layer(replace(ATTENTION, window=32), MLP),) * 2)


def in_full(engine: Engine, pp: int) -> dict[str, Any]:
    return {"pp": pp, "zero": 1 if engine is MEGATRON else 0, "recompute": "full"}


@cache
def one_at_a_time(model: Model, engine: Engine, stage: int, pp: int) -> Step:
    """What layers that are recomputed at once are laid beside."""
    return step(model, engine, stage, **in_full(engine, pp), recompute_chunk=1)


@pytest.mark.parametrize("engine", [MEGATRON, TORCH], ids=lambda e: e.name)
@pytest.mark.parametrize("model", [DENSE, LATENT_MODEL, WINDOWED], ids=lambda m: m.name)
@pytest.mark.parametrize(
    ("pp", "chunk"),  # of 8 layers, or of 4 a stage
    [(1, 2), (1, 3), (1, 8), (1, 9), (2, 2), (2, 3), (2, 9)],
)
def test_several_layers_at_once(engine: Engine, model: Model, pp: int, chunk: int) -> None:
    """Megatron-LM's recompute.py, `uniform`: of so many layers the first's input is kept, and at a stage's end of those
    that are left. PyTorch stops before the last product of what it runs again, Megatron does not."""
    given = in_full(engine, pp)
    for stage in range(pp):
        layers = model.num_hidden_layers // pp
        each = one_at_a_time(model, engine, stage, pp)
        at_once = step(model, engine, stage, **given, recompute_chunk=chunk)
        fewer = layers - -(-layers // chunk)
        assert forward_bytes(each) - forward_bytes(at_once) == fewer * 2 * T * H
        not_stopped = fewer * 2 * (2 * T * F * H) * (engine is TORCH)  # of two micro-batches
        assert flops(at_once.program) - flops(each.program) == not_stopped
        assert _of_states(at_once) == _of_states(each)


@pytest.mark.parametrize("model", [DENSE, MIXED, replace(MIXED, leading=(DENSE.ordinary,) * 3)], ids=["a", "b", "c"])
@pytest.mark.parametrize("pp", [1, 2])
def test_each_nth_layer_of_a_stage(model: Model, pp: int) -> None:
    """torchtitan 0.2.2, `_apply_layer_sac`: layers n, 2n and so on, counted from 1."""
    of = {mode: _of_layers(model, TORCH, mode) for mode in ("none", "full")}
    for stage in range(pp):
        layers = model.num_hidden_layers // pp
        kinds = [model.kinds.index(layer) for layer in model.layers[stage * layers : (stage + 1) * layers]]
        none = step(model, TORCH, stage, pp=pp, zero=0)
        for n in (2, 3, 5):
            some = step(model, TORCH, stage, pp=pp, zero=0, recompute="full", recompute_every=n)
            fewer = sum(of["none"][kind] - of["full"][kind] for kind in kinds[n - 1 :: n])
            assert forward_bytes(none) - forward_bytes(some) == fewer
            if len(model.kinds) == 1:
                full = step(model, TORCH, stage, pp=pp, zero=0, recompute="full")
                share = (layers // n) / layers
                assert flops(some.program) - flops(none.program) == share * (flops(full.program) - flops(none.program))
            assert _of_states(some) == _of_states(none)


def _of_layers(model: Model, engine: Engine, mode: str) -> list[int]:
    at = layout(recompute=mode, zero=1 if engine is MEGATRON else 0)
    return [int(peak(body.forward).net) for body in emit_parts(model, Job(S, B), at, engine).bodies.layers]


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from((MEGATRON, TORCHTITAN, TORCH)),
    st.sampled_from((DENSE, MIXED, LATENT_MODEL)),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 2)),
    st.sampled_from(("flash", "eager")),
)
def test_more_recompute_keeps_less(engine: Engine, model: Model, tp: int, pp: int, attention: str) -> None:
    """none >= selective >= full of what forward leaves, one layer after another between none and full; what weights'
    gradients exchange stays, and so do all FLOPs but those of recompute."""
    zero = 1 if engine is MEGATRON else 3
    given = {"tp": tp, "pp": pp, "attention": attention, "zero": zero, "dp_shard": 2}
    modes = [{"recompute": "none"}, *({"recompute": "full", "recompute_layers": n} for n in range(1, 4))]
    modes.append({"recompute": "full"})
    steps = [step(model, engine, **given, **mode) for mode in modes]
    left = [forward_bytes(found) for found in steps]
    assert left == sorted(left, reverse=True)
    selective = step(model, engine, **given, recompute="selective")
    assert left[0] >= forward_bytes(selective) >= left[-1]
    for found in (*steps, selective):
        assert flops(found.program, recompute=False) == flops(steps[0].program)
        assert _of_states(found) == _of_states(steps[0])
    again = [flops(found.program) for found in steps]
    assert again == sorted(again)


def _of_states(found: Step) -> dict[Any, Any]:
    return {
        k: (int(t.calls), int(t.payload_bytes))
        for k, t in traffic(found.program).items()
        if k.what in ("grads", "params")
    }


# --- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("engine", "model", "given", "why"),
    [
        ("torchtitan", "gpt2", {"recompute": "full", "recompute_layers": 2}, "recomputes all layers or none"),
        ("torchtitan", "gpt2", {"recompute": "selective", "recompute_modules": ("mlp",)}, "mlp is not in torchtitan"),
        ("torch", "gpt2", {"recompute": "selective", "recompute_layers": 2}, "recompute_layers=2 with recompute=sel"),
        ("torchtitan", "gpt2", {"recompute": "full", "recompute_every": 2}, "torchtitan had it until 0.2.2"),
        ("torchtitan", "gpt2", {"recompute": "full", "recompute_chunk": 2}, "--recompute-chunk 2 is not in torchtitan"),
        ("megatron", "gpt2", {"recompute": "full", "recompute_every": 2}, "--recompute-every 2 is not in megatron"),
        ("megatron", "gpt2", {"recompute_every": 2}, "recompute_every=2 with recompute=none"),
        ("megatron", "gpt2", {"recompute": "full", "recompute_chunk": 0}, "recompute_chunk=0 with recompute=full"),
        (
            "megatron",
            "gpt2",
            {"recompute": "full", "recompute_chunk": 2, "recompute_layers": 2},
            "recompute_layers=2 with recompute_chunk=2: choose one",
        ),
        ("megatron", "gpt2", {"recompute": "full", "recompute_chunk": 2, "zero": 3}, "with zero=3: what is gathered"),
        ("megatron", "deepseek-v3", {"recompute": "full", "recompute_chunk": 2}, "has layers of several sizes"),
        ("megatron", "gpt2", {"recompute": "full", "recompute_modules": ("mlp",)}, "modules are named to a selective"),
        ("megatron", "gpt2", {"recompute": "selective", "recompute_modules": ("moe",)}, "gpt2 has no experts"),
        ("megatron", "gpt2", {"recompute": "selective", "recompute_modules": ("layernorm",)}, "no norm of its own"),
        (
            "megatron",
            "deepseek-v2-lite",
            {"recompute": "selective", "recompute_modules": ("moe", "moe_act")},
            "moe recomputes moe_act already",
        ),
    ],
)
def test_refused(engine: str, model: str, given: dict[str, Any], why: str) -> None:
    zero = {"torchtitan": 3, "megatron": 1, "torch": 3}[engine]
    with pytest.raises(Refused) as refused:
        nanum.predict(
            load(model),
            Job(1024, 64),
            cluster.load("1x8xh100-sxm"),
            Layout(dp_shard=8, structure=Structure(**{"zero": zero} | given)),
            engine=engine,
        )
    assert any(why in reason for reason in refused.value.reasons), refused.value.reasons
