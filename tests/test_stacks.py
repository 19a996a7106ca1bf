"""An encoder with a decoder, beside Raffel et al. 2019 (arXiv 1910.10683) and counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanum import engines
from nanum.account.memory import held_after, peak
from nanum.account.traffic import traffic
from nanum.build import build
from nanum.cluster import load as cluster
from nanum.division.parts import emit_parts
from nanum.errors import Refused
from nanum.job import Job, Trained
from nanum.layout import Layout, Structure
from nanum.model import Attention, Layer, Model, load
from nanum.model.config import from_config
from nanum.model.document import from_document
from nanum.model.presets import presets
from nanum.model.scale import scaled
from nanum.prediction.reference import parameters, reference
from nanum.rules import GENERAL, broken

T5 = {preset.name: preset for preset in presets() if preset.family == "T5"}
SMALL = {**T5["t5-small"].config, "vocab_size": 512}
B, S = 2, 64


def t5(**change: Any) -> Model:
    return from_config({**SMALL, **change}, "t5")


# --- what a config says -----------------------------------------------------------------------------------------------
def test_two_stacks_of_layers() -> None:
    model = t5(num_layers=3, num_decoder_layers=2)
    assert model.encoder_layers == 3
    assert [layer.cross is not None for layer in model.layers] == [False] * 3 + [True] * 2
    attentions = [layer.attention for layer in model.layers]
    assert all(isinstance(a, Attention) for a in attentions)
    assert [a.causal for a in attentions] == [False] * 3 + [True] * 2  # type: ignore[union-attr]
    assert [a.has_table for a in attentions] == [True, False, False, True, False]  # type: ignore[union-attr]


def test_gates_and_heads_of_their_own() -> None:
    """T5 1.1 has gated feed-forward blocks and an untied head, whose input is not scaled."""
    first, later = load("t5-3b"), load("flan-t5-xl")
    assert (first.tie_word_embeddings, first.scaled_head, first.mlp.gated) == (True, True, False)
    assert (later.tie_word_embeddings, later.scaled_head, later.mlp.gated) == (False, False, True)
    with pytest.raises(Refused, match='feed_forward_proj = "gated-tanh" is not one of'):
        t5(feed_forward_proj="gated-tanh")
    with pytest.raises(Refused, match="num_decoder_layers = 0"):
        t5(num_decoder_layers=0)


def test_another_process_is_told_the_same_model() -> None:
    from dataclasses import asdict

    for model in (t5(), t5(num_layers=1), load("ViT-B/16")):
        assert from_document(asdict(model)) == model


def test_a_smaller_one_keeps_both_stacks() -> None:
    small = scaled(load("flan-t5-base"), layers=5, hidden=96)
    assert (small.encoder_layers, small.num_hidden_layers, len(small.layers)) == (2, 5, 5)
    assert [layer.cross is not None for layer in small.layers] == [False] * 2 + [True] * 3
    for layer in small.layers:
        assert layer.cross is None or layer.cross.num_attention_heads == layer.attention.num_attention_heads
    with pytest.raises(Refused, match="of a layer each at the least"):
        scaled(load("t5-small"), layers=1)


# --- parameters and FLOPs ---------------------------------------------------------------------------------------------
@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans()
)  # fmt: skip
def test_parameters_and_flops_by_hand(n: int, m: int, heads: int, wide: int, gated: bool, tied: bool) -> None:
    """Six FLOPs for each weight of a product and token, forward and backward. Attention's two products are of all pairs
    of rows, a masked half included: twelve FLOPs for each pair and entry of a head.
    """
    d, kv, f, v = 16 * wide, 8, 24, 512
    model = t5(
        num_layers=n, num_decoder_layers=m, num_heads=heads, d_model=d, d_kv=kv, d_ff=f, tie_word_embeddings=tied,
        feed_forward_proj="gated-gelu" if gated else "relu",
    )  # fmt: skip
    inner = heads * kv
    mlp = (3 if gated else 2) * d * f
    matrices = n * (4 * d * inner + mlp) + m * (8 * d * inner + mlp)
    norms = (2 * n + 3 * m + 2) * d
    assert parameters(model) == matrices + norms + 2 * 32 * heads + v * d * (1 if tied else 2)
    products = 6 * S * (matrices + v * d)
    scores = 12 * (n + 2 * m) * S * S * inner
    assert reference(model, S).model_flops_per_sequence == pytest.approx(products + scores)


# --- what is saved ----------------------------------------------------------------------------------------------------
def saved(model: Model, kind: int, precision: Any = "fp32", **structure: Any) -> int:
    layout = Layout(micro_batch_size=B, structure=Structure(zero=0, **structure))
    return int(
        peak(emit_parts(model, Job(S, B, precision), layout, engines.load("torch")).bodies.layers[kind].forward).net
    )


def test_a_layer_s_saved_tensors() -> None:
    """fp32, eager kernels, for each token: an RMS norm saves its input, what it is scaled to and a deviation; a product
    its input; attention q, k, v, and softmaxes of all heads; ReLU its result, which the product after it has.
    What the encoder made is every decoder layer's, and counted in none.
    """
    model = t5()
    d, heads, inner, f = 512, 8, 512, 2048
    norm = d + d + 1
    block = norm + d  # and its result, which products read
    attention = 3 * inner + heads * S + inner
    cross = 3 * inner + inner + heads  # flash: q, k, v, the output, and a log-sum-exp of each head
    forward = block + attention + block + f
    assert saved(model, 1) == 4 * B * S * forward
    assert saved(model, 4) == 4 * B * S * (forward + block + cross)


def test_half_precision_keeps_the_softmax_twice() -> None:
    """In fp32, which its gradient needs, and as the product reads it (modeling_t5.py)."""
    few, many = t5(num_heads=8, d_kv=64), t5(num_heads=16, d_kv=32)
    assert saved(many, 1, "bf16") - saved(few, 1, "bf16") == (4 + 2) * B * S * S * 8


def test_the_first_layer_of_a_stack_saves_where_its_biases_come_from() -> None:
    """The int64 number of a bucket for each pair of rows; a bias that is added is not saved."""
    model = t5()
    assert saved(model, 0) - saved(model, 1) == 8 * S * S


# --- the whole step ---------------------------------------------------------------------------------------------------
WAYS = [
    *(("torch", zero) for zero in (1, 3)),
    *(("megatron", zero) for zero in (1, 2)),
    *(("deepspeed", zero) for zero in (1, 2, 3)),
    ("torchtitan", 3),
    ("accelerate", 3),
]


@pytest.mark.parametrize(("name", "zero"), WAYS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_step_lets_go_of_all_that_it_made(name: str, zero: int, recompute: Any) -> None:
    """Whatever layers share and whoever reads the table last: no activation outlives its step, in one micro-batch or
    several, and nothing but what was there before it.
    """
    for n, m, tied, rounds, tp in ((3, 2, True, 1, 1), (1, 1, False, 3, 1), (2, 3, False, 1, 2), (1, 2, True, 2, 2)):
        model = t5(num_layers=n, num_decoder_layers=m, tie_word_embeddings=tied)
        how: dict[str, Any] = {"zero": zero, "recompute": recompute, "tensor": "none" if tp == 1 else "tensor"}
        layout = Layout(dp_shard=2, tp=tp, micro_batch_size=B, structure=Structure(**how))
        step = build(model, Job(S, 2 * B * rounds), layout, engines.load(name), 0)
        left, resident = held_after(step.program), held_after(step.resident)
        left["buffers"] = left.get("buffers", 0) - 8 * B * S * rounds  # the tokens of all micro-batches stay
        assert {k: size for k, size in left.items() if size} == {k: size for k, size in resident.items() if size}


def test_exchanges_of_tensor_parallelism() -> None:
    """Megatron-LM's two of a block forward and back; of cross-attention the backward pass has one more in each layer,
    for what the encoder made.
    """
    layout = Layout(tp=2, micro_batch_size=B, structure=Structure(zero=1, tensor="tensor"))
    model = t5(num_layers=3, num_decoder_layers=2)
    rows = traffic(build(model, Job(S, B), layout, engines.load("megatron"), 0).program)
    phases = {"forward": 0, "backward": 0}
    for key, total in rows.items():
        if key.axes == ("tp",) and key.what == "activations":
            assert key.kind == "all_reduce"
            phases[key.phase] += int(total.calls)
    ends = 2  # rows of a table that is split are a sum, for either stack; the head's input has one back
    assert phases == {"forward": 2 * 3 + 3 * 2 + ends, "backward": 2 * 3 + 4 * 2 + 1}


def test_fsdp_gathers_a_layer_at_a_time_and_what_is_between_with_the_root() -> None:
    layout = Layout(dp_shard=2, micro_batch_size=B, structure=Structure(zero=3))
    model = t5(num_layers=3, num_decoder_layers=2)
    rows = traffic(build(model, Job(S, 2 * B), layout, engines.load("torch"), 0).program)
    calls = {(key.kind, key.phase): int(total.calls) for key, total in rows.items() if key.axes == ("dp_shard", "cp")}
    assert calls == {("all_gather", "forward"): 6, ("all_gather", "backward"): 6, ("reduce_scatter", "backward"): 6}
    payload = sum(int(t.payload_bytes) for key, t in rows.items() if (key.kind, key.phase) == ("all_gather", "forward"))
    assert payload == 2 * parameters(model)


# --- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["torch", "torchtitan", "megatron", "deepspeed"])
def test_no_engine_has_its_pipeline(name: str) -> None:
    engine = engines.load(name)
    layout = Layout(dp_shard=4, pp=2, structure=Structure(zero=1, pipelined=True))
    found = broken((*GENERAL, *engine.refuses), t5(), Job(S, 64), cluster("1x8xh100-sxm"), layout)
    assert any(f"pp=2 is not for t5 in {name}" in reason for reason in found), found


@pytest.mark.parametrize(
    ("job", "layout", "said"),
    [
        (Job(S, 64, trained=Trained("none", 8)), Layout(dp_shard=8), "frozen weights and adapters are not modelled"),
        (Job(S, 64), Layout(dp_shard=4, cp=2, structure=Structure(cp_kind="ulysses")), "a bias of the distance"),
        (
            Job(S, 64),
            Layout(dp_shard=8, structure=Structure(recompute="full", recompute_layers=2)),
            "of which of two stacks: leave out what counts them",
        ),
        (
            Job(S, 64),
            Layout(dp_shard=8, structure=Structure(offload=("activations",))),
            "all save what the encoder made",
        ),
    ],
)
def test_what_is_not_modelled(job: Job, layout: Layout, said: str) -> None:
    found = broken(GENERAL, t5(), job, cluster("1x8xh100-sxm"), layout)
    assert any(said in reason for reason in found), found


def test_a_layer_without_cross_attention_is_as_it_was() -> None:
    layer = load("llama-2-7b").ordinary
    assert layer == Layer(layer.attention, layer.mlp)
    assert layer.cross is None
