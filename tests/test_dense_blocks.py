"""What layers other than Llama's and GPT-2's compute, save and exchange, beside counts by hand.

Letters as in `test_closed_forms`: bytes are of bf16, Megatron-LM's fused kernels, no dropout.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum import engines
from nanum.account.memory import peak
from nanum.account.traffic import flops, traffic
from nanum.build import build
from nanum.cluster import load as cluster
from nanum.division.parts import emit_parts
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Layer, LinearAttention, Mlp, Model
from nanum.model.presets import presets
from nanum.operators.attention import Window
from nanum.rules import GENERAL, broken

MEGATRON, TORCHTITAN = engines.load("megatron"), engines.load("torchtitan")
B, S, H, A, G, F, V, L = 2, 128, 256, 8, 2, 704, 1024, 4
HEAD = H // A
KEYS = G * HEAD
GATED, PLAIN = Mlp(F, gated=True, activation="silu"), Mlp(F, gated=False, activation="gelu")


def model(**more: Any) -> Model:
    given: dict[str, Any] = {"attention": Attention(A, G, HEAD), "mlp": PLAIN, "norm": "rms_norm", **more}
    return Model("a model", H, V, L, S, position="rotary", tie_word_embeddings=False, **given)


def saved(of: Model, engine: Any = MEGATRON, **structure: Any) -> int:
    """Bytes that the forward pass of a layer leaves for its backward, for each token."""
    layout = Layout(micro_batch_size=B, structure=Structure(zero=1 if engine is MEGATRON else 3, **structure))
    layer = emit_parts(of, Job(S, B), layout, engine).bodies.layers[0]
    net = int(peak(layer.forward).net)
    assert net % (B * S) == 0
    return net // (B * S)


CORE = 2 * (H + 2 * KEYS) + 2 * H + 4 * A
"""Of attention: q, k and v as the kernel reads them, its output, and fp32 log-sum-exp."""
NORM = 2 * H + 4
"""Of a fused RMSNorm: its input, and fp32 reciprocal deviation."""


# --- windows ----------------------------------------------------------------------------------------------------------
@given(st.integers(1, 60), st.integers(1, 80), st.booleans())
def test_keys_that_tokens_see(rows: int, size: int, chunked: bool) -> None:
    begin = [i - i % size if chunked else max(0, i - size + 1) for i in range(rows)]
    pairs = sum(i - first + 0.5 for i, first in enumerate(begin))
    assert Window(size, chunked).keys(rows) * rows / 2 == pytest.approx(pairs, rel=1e-12)


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    assert Window(S).keys(S) == Window(2 * S).keys(S) == Window(S, chunked=True).keys(S) == Window().keys(S) == S


def test_a_window_s_flops_and_bytes() -> None:
    """Four operations an entry of q and key seen, forward; twice as many back. Bytes are those of all keys."""
    window = 32
    wide, narrow = model(), model(attention=Attention(A, G, HEAD, window=window))
    layout = Layout(micro_batch_size=B, structure=Structure(zero=1))
    both = [build(m, Job(S, B), layout, MEGATRON, 0) for m in (wide, narrow)]
    seen = sum(min(i + 1, window) - 0.5 for i in range(S))
    fewer = 3 * 4 * L * B * H * (S * S / 2 - seen)
    assert float(flops(both[0].program)) - float(flops(both[1].program)) == pytest.approx(fewer)
    assert saved(wide) == saved(narrow)


def test_an_encoder_computes_the_whole_square_of_scores() -> None:
    """Twice the FLOPs of attention that sees what is before alone, and the same bytes."""
    causal, whole = model(), model(attention=Attention(A, G, HEAD, causal=False))
    layout = Layout(micro_batch_size=B, structure=Structure(zero=1))
    both = [float(flops(build(m, Job(S, B), layout, MEGATRON, 0).program)) for m in (causal, whole)]
    assert both[1] - both[0] == 3 * 4 * L * B * H * S * S / 2
    assert saved(causal) == saved(whole)


def test_layers_with_and_without_a_window() -> None:
    full, sliding = Layer(Attention(A, G, HEAD), PLAIN), Layer(Attention(A, G, HEAD, window=16), PLAIN)
    layout = Layout(micro_batch_size=B, structure=Structure(zero=1))

    def of(m: Model) -> float:
        return float(flops(build(m, Job(S, B), layout, MEGATRON, 0).program))

    half = of(model(alternates=(sliding,)))
    both = of(model()), of(model(attention=sliding.attention))
    assert half == pytest.approx(sum(both) / 2)
    assert of(model(leading=(full, full, sliding, sliding))) == pytest.approx(half)


def test_an_eager_kernel_masks_a_window() -> None:
    layout = Layout(micro_batch_size=B, structure=Structure(zero=1, attention="eager"))
    counted = [
        float(flops(build(model(attention=Attention(A, G, HEAD, window=w)), Job(S, B), layout, MEGATRON, 0).program))
        for w in (None, 16)
    ]
    assert counted[0] == counted[1]


# --- what is saved ----------------------------------------------------------------------------------------------------
def test_saved_by_norms_before_blocks() -> None:
    """Two norms and what they write; the core; what GELU reads, and what it writes."""
    assert saved(model()) == 2 * (NORM + 2 * H) + CORE + 4 * F


def test_saved_by_blocks_side_by_side() -> None:
    """One norm, whose result both blocks read; or two of the same input, which is saved once."""
    assert saved(model(placement="parallel")) == NORM + 2 * H + CORE + 4 * F
    assert saved(model(placement="parallel_two_norms")) == NORM + 4 + 4 * H + CORE + 4 * F


def test_saved_by_norms_after_blocks() -> None:
    """OLMo 2: blocks read the residual stream itself; norms read what blocks wrote. Gemma 2 has both. A norm of the sum
    is read by what comes after: a layer's input, and what the last norm reads.
    """
    assert saved(model(placement="post")) == 2 * (2 * H + NORM) + CORE + 4 * F
    assert saved(model(placement="sandwich")) == saved(model()) + 2 * NORM
    assert saved(model(placement="post_residual")) == 2 * (2 * H + NORM) + CORE + 4 * F


def test_saved_by_norms_of_queries_and_keys() -> None:
    """Of each head: what they read, and a reciprocal deviation of each head; by weights of one head's size, or none."""
    plain = saved(model())
    more = 2 * (H + KEYS)
    for kind, deviations, weights in (("head", A + G, 2 * HEAD), ("bare_head", A + G, 0), ("width", 2, H + KEYS)):
        normed = model(attention=Attention(A, G, HEAD, qk_norm=kind))  # type: ignore[arg-type]
        assert saved(normed) == plain + more + 4 * deviations
        layout = Layout(structure=Structure(zero=0))
        parts = [emit_parts(m, Job(S, B), layout, MEGATRON) for m in (model(), normed)]
        held = [sum(p.shapes.layers[0].elements(w.dims, w.split) for w in p.bodies.layers[0].weights) for p in parts]
        assert held[1] - held[0] == weights


@pytest.mark.parametrize(
    ("activation", "gated", "compiled", "eager"),
    [
        ("gelu", False, 2, 2),  # reads x, writes y
        ("relu", False, 1, 1),  # its slope is known by y
        ("relu2", False, 2, 2),  # fused: x and y; eager: relu(x), which squares itself, and y
        ("silu", True, 3, 4),  # gate, up and the product; eager: silu(gate) too
        ("gelu", True, 3, 4),
        ("relu", True, 3, 3),  # eager: relu(gate) instead of gate
    ],
)
def test_saved_by_activations(activation: str, gated: bool, compiled: int, eager: int) -> None:
    """Tensors as wide as the block: those that the activation reads or writes."""
    here = model(mlp=Mlp(F, gated=gated, activation=activation))  # type: ignore[arg-type]
    around = 2 * (NORM + 2 * H) + CORE
    assert saved(here) == around + compiled * 2 * F
    assert saved(here, TORCHTITAN, compile=True) == around + compiled * 2 * F
    assert saved(here, TORCHTITAN) == around + eager * 2 * F


def test_saved_by_sinks_and_gates_of_attention() -> None:
    """A share of each head, and the output before it is scaled (cuDNN's kernel, which Megatron runs, has sinks inside);
    a gate's sigmoid, and the output before it.
    """
    plain = saved(model())
    sinks = model(attention=Attention(A, G, HEAD, sinks=True))
    assert saved(sinks) == plain
    assert saved(sinks, TORCHTITAN) == saved(model(), TORCHTITAN) + 2 * A + 2 * H
    assert saved(model(attention=Attention(A, G, HEAD, gated=True))) == plain + 2 * H + 2 * H


def test_norms_without_weights_save_the_same() -> None:
    means = 2 * 4
    for norm in ("layer_norm", "layer_norm_no_bias", "layer_norm_no_weight"):
        assert saved(model(norm=norm)) == saved(model()) + means


def test_a_part_of_each_head_that_turns_changes_nothing_that_is_saved() -> None:
    for turned in (None, HEAD // 2, 0):
        here = model(attention=Attention(A, G, HEAD, rotary=turned))
        assert saved(here) == saved(model())
        assert saved(here, TORCHTITAN) == saved(model(), TORCHTITAN)


# --- linear attention -------------------------------------------------------------------------------------------------
DELTA = LinearAttention("delta", 4, 8, 32, 64, convolved=4)
LIGHTNING = LinearAttention("lightning", A, A, HEAD, HEAD)


def weights_of(of: Model) -> dict[str, int]:
    parts = emit_parts(of, Job(S, B), Layout(structure=Structure(zero=0)), MEGATRON)
    shapes = parts.shapes.layers[0]
    return {w.name: int(shapes.elements(w.dims, w.split)) for w in parts.bodies.layers[0].weights}


def test_weights_of_linear_attention() -> None:
    """Of the delta rule, by its published module: projections in, a convolution, a decay and its bias, a norm of one
    head, a projection out; of lightning attention projections in, a norm of all heads, one out.
    """
    keys, values = 4 * 32, 8 * 64
    block = sum(weights_of(model(attention=DELTA)).values()) - 2 * H * F - 2 * H
    assert block == H * (2 * keys + 2 * values + 2 * 8) + 4 * (2 * keys + values) + 2 * 8 + 64 + values * H
    block = sum(weights_of(model(attention=LIGHTNING)).values()) - 2 * H * F - 2 * H
    assert block == 4 * H * H + H + H * H


def test_linear_attention_costs_the_same_for_each_token() -> None:
    """Its FLOPs grow as the sequence does, where full attention's grow as its square."""

    def of(m: Model, s: int) -> float:
        layout = Layout(micro_batch_size=1, structure=Structure(zero=1))
        return float(flops(build(replace(m, max_position_embeddings=8 * S), Job(s, 1), layout, MEGATRON, 0).program))

    for linear in (DELTA, LIGHTNING):
        assert of(model(attention=linear), 4 * S) == pytest.approx(4 * of(model(attention=linear), S))
    assert of(model(), 4 * S) > 4 * of(model(), S)


def test_flops_of_the_delta_rule_are_of_its_chunkwise_form() -> None:
    """A chunk of C tokens, forward: scores of queries and of keys by keys, 2C²·d_k each; they weigh values, and the
    inverse of the latter makes new keys and values: 2C²(2d_v + d_k); three products with the state, 2C·d_k·d_v each.
    """
    c, k, v = 64, 32, 64
    chunk = 2 * c * c * (k + k) + 2 * c * c * (2 * v + k) + 3 * 2 * c * k * v
    both = [model(attention=DELTA), model(attention=replace(DELTA, convolved=8))]
    layout = Layout(micro_batch_size=B, structure=Structure(zero=1))
    counted = [float(flops(build(m, Job(S, B), layout, MEGATRON, 0).program)) for m in both]
    taps = 3 * 2 * 4 * (2 * 4 * 32 + 8 * 64) * B * S * L
    assert counted[1] - counted[0] == taps
    matmuls = 3 * 2 * B * S * (L * sum(weights_of(both[0])[name] for name in MATRICES) + V * H)
    assert counted[0] - matmuls - taps == 3 * L * B * 8 * (S // c) * chunk


MATRICES = ("wqkv", "wgate", "wrates", "wo", "up", "down")


@pytest.mark.parametrize("linear", [DELTA, LIGHTNING], ids=lambda a: a.rule)
@pytest.mark.parametrize("tensor", ["tensor", "sequence"])
def test_linear_attention_exchanges_what_attention_does(linear: LinearAttention, tensor: str) -> None:
    """A layer's own inputs and outputs; and where a norm is of all heads, sums of each token's squares, both ways."""
    found, plain = tp_rows(model(attention=linear), 2, tensor), tp_rows(model(), 2, tensor)
    more = L if linear.rule == "lightning" else 0
    for phase in ("forward", "backward"):
        calls = [rows.get(("all_reduce", phase), (0, 0))[0] for rows in (found, plain)]
        assert calls[0] - calls[1] == more
    others = [{key: row for key, row in rows.items() if key[0] != "all_reduce"} for rows in (found, plain)]
    assert others[0] == others[1]


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        (DELTA, "cp=2 would pass the state of a model's linear attention from rank to rank: not modelled"),
        (
            Attention(A, G, HEAD, causal=False),
            "cp=2 is modelled for causal attention, and a model sees the tokens that follow",
        ),
    ],
)
def test_what_is_not_divided_over_the_sequence(attention: Any, said: str) -> None:
    layout = Layout(cp=2, structure=Structure(zero=3, cp_kind="ring"))
    assert broken(GENERAL, model(attention=attention), Job(S, 8), cluster("1x2xh100-sxm"), layout) == [said]


# --- what is exchanged ------------------------------------------------------------------------------------------------
def tp_rows(of: Model, t: int, tensor: str, what: str = "activations") -> dict[tuple[str, str], tuple[int, int]]:
    structure = Structure(zero=1, tensor=tensor)  # type: ignore[arg-type]
    layout = Layout(tp=t, micro_batch_size=B, structure=structure)
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for key, total in traffic(build(of, Job(S, B), layout, MEGATRON, 0).program).items():
        if key.axes == ("tp",) and key.what == what:
            calls, sent = found.get((key.kind, key.phase), (0, 0))
            found[key.kind, key.phase] = calls + int(total.calls), sent + int(total.wire_bytes)
    return found


@pytest.mark.parametrize("tensor", ["tensor", "sequence"])
@pytest.mark.parametrize("placement", ["post", "sandwich", "post_residual", "parallel", "parallel_two_norms"])
def test_norms_elsewhere_exchange_the_same(placement: str, tensor: str) -> None:
    """Norms lie between the exchanges of a layer, wherever they are; of blocks side by side each has its own (as
    DTensor's and Megatron's parallel linear layers do, and PyTorch was seen to).
    """
    moved = model(placement=placement)  # type: ignore[arg-type]
    assert tp_rows(moved, 2, tensor) == tp_rows(model(), 2, tensor)


def test_a_norm_of_all_heads_adds_up_squares_over_ranks() -> None:
    """OLMo 2: an fp32 sum of each token for queries and for keys, both ways: 2(t - 1)/t of 4bs bytes each."""
    t = 2
    plain, normed = (
        tp_rows(model(attention=Attention(A, G, HEAD, qk_norm=kind)), t, "tensor")  # type: ignore[arg-type]
        for kind in ("none", "width")
    )
    for phase in ("forward", "backward"):
        calls, sent = (normed["all_reduce", phase][i] - plain["all_reduce", phase][i] for i in (0, 1))
        assert calls == 2 * L
        assert sent == 2 * L * 2 * (t - 1) * 4 * B * S // t


def test_weights_that_heads_share_are_summed_over_the_ranks_that_have_the_heads() -> None:
    """Qwen 3: once a step in fp32, 2·head_dim a layer, though sequences are whole: Megatron's finalize_model_grads."""
    t = 2
    found = tp_rows(model(attention=Attention(A, G, HEAD, qk_norm="head")), t, "tensor", "grads")
    (sent,) = (bytes_ for _, bytes_ in found.values())
    assert sent == 2 * (t - 1) * 4 * L * 2 * HEAD // t
    assert tp_rows(model(), t, "tensor", "grads") == {}


def test_tensor_parallel_parameters_of_every_variant_add_up() -> None:
    """What the ranks of tp hold is the model, with a copy on each of what none divides."""
    a = Attention(A, G, HEAD, qkv_bias=True, output_bias=True, qk_norm="width", sinks=True, gated=True)
    here = model(attention=a, placement="sandwich", norm="layer_norm", head_bias=True, embedding_norm=True)
    layout = Layout(tp=2, structure=Structure(zero=0, tensor="tensor"))
    one, two = (emit_parts(here, Job(S, B), each, TORCHTITAN) for each in (Layout(structure=Structure(zero=0)), layout))

    def held(parts: Any, *, divided: bool) -> int:
        bodies = parts.shapes.zip(parts.bodies)
        pairs = [bodies.embedding, *bodies.layers, bodies.head]
        return sum(
            int(shapes.elements(w.dims, w.split))
            for shapes, body in pairs
            for w in body.weights
            if bool(w.split) == divided
        )

    assert 2 * held(two, divided=True) + held(two, divided=False) == held(one, divided=False)
    assert held(one, divided=True) == 0
    assert held(two, divided=False) == 4 * 2 * H + H + 2 * 2 * H  # a layer's norms and output bias, the ends' norms


# --- ends -------------------------------------------------------------------------------------------------------------
def test_a_narrow_table_is_projected() -> None:
    """OPT-350m: rows of W entries, W·h in, h·W out, and the head is W wide."""
    narrow = 64
    here = model(embedding_size=narrow, final_norm=False)
    parts = emit_parts(here, Job(S, B), Layout(structure=Structure(zero=0)), MEGATRON)
    names = [w.name for w in parts.bodies.embedding.weights], [w.name for w in parts.bodies.head.weights]
    assert names == (["embedding", "project_in"], ["project_out", "head"])
    layout = Layout(micro_batch_size=B, structure=Structure(zero=1))
    counted = [float(flops(build(m, Job(S, B), layout, MEGATRON, 0).program)) for m in (here, model())]
    assert counted[1] - counted[0] == 3 * 2 * B * S * (V * H - V * narrow - 2 * H * narrow)


@pytest.mark.parametrize(("compiled", "more"), [(False, 2 * B * S * V + 2 * 8), (True, 0)])
def test_a_cap_of_logits_keeps_one_more_of_them(compiled: bool, more: int) -> None:
    """Its tanh is read in backward, and so is the cap, twice as a double; what one kernel wrote the loss keeps too."""
    layout = Layout(micro_batch_size=B, structure=Structure(zero=3, compile=compiled))
    heads = [emit_parts(m, Job(S, B), layout, TORCHTITAN).bodies.head for m in (model(), model(logit_cap=30.0))]
    plain, capped = (int(peak((*head.forward, *head.loss)).net) for head in heads)
    assert capped - plain == more


@pytest.mark.parametrize("engine", [MEGATRON, TORCHTITAN], ids=lambda e: e.name)
def test_arrays_of_layouts_say_what_each_says_alone(engine: Any) -> None:
    """Windows, narrow tables and norms of heads under several layouts at once."""
    here = model(
        attention=Attention(A, G, HEAD, qk_norm="head", window=32), placement="sandwich", embedding_size=64,
        alternates=(Layer(Attention(A, G, HEAD, qk_norm="width", sinks=True), GATED),),
    )  # fmt: skip
    structure = Structure(zero=1 if engine is MEGATRON else 3, tensor="sequence")
    sizes = [(2, 2), (4, 2), (8, 1)]
    columns = {"dp_shard": np.array([d for d, _ in sizes]), "micro_batch_size": np.array([b for _, b in sizes])}
    many = build(here, Job(S, 64), Layout(tp=2, **columns, structure=structure), engine, np.zeros(3, int))
    for i, (d, b) in enumerate(sizes):
        alone = build(here, Job(S, 64), Layout(tp=2, dp_shard=d, micro_batch_size=b, structure=structure), engine, 0)
        assert int(np.broadcast_to(peak(many.program).peak, 3)[i]) == int(peak(alone.program).peak)
        assert float(np.broadcast_to(flops(many.program), 3)[i]) == float(flops(alone.program))


def test_replace_keeps_layers_apart() -> None:
    here = model(alternates=(Layer(Attention(A, G, HEAD, window=16), PLAIN),))
    assert len(here.kinds) == 2
    assert len(replace(here, alternates=()).kinds) == 1


def test_no_two_weights_of_a_layer_have_one_name() -> None:
    """Engines name weights: what is kept, what is in fp8, what has an adapter."""
    layout = Layout(structure=Structure(zero=0))
    for preset in presets():
        here = preset.model()
        for body in emit_parts(here, Job(64, 1), layout, MEGATRON).bodies.layers:
            names = [w.name for w in body.weights]
            assert len(names) == len(set(names)), preset.name
