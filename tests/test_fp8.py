"""Linear layers of fp8: what is kept, what is computed in which precision, and what others measured of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import nanum
from nanum import cluster, engines
from nanum.account.memory import held_after, peak
from nanum.account.traffic import Total, traffic
from nanum.build import build
from nanum.division.parts import emit_parts
from nanum.engines.engine import Engine
from nanum.engines.torchtitan_kin import TENSORWISE, TORCHTITAN_2024
from nanum.errors import Refused
from nanum.job import Job, Precision
from nanum.layout import Layout, Structure
from nanum.model import Attention, Mlp, Model
from nanum.model import load as load_model
from nanum.prediction import Prediction, parameters
from nanum.program import Compute
from nanum.units import GIB

H, F, S, B = 1024, 2816, 2048, 2
MODEL = Model("llama", H, 32768, 4, 8192, Attention(16, 4, 64), Mlp(F, True, "silu"), "rms_norm", "rotary", False)


def parts(engine: str, precision: Precision) -> Any:
    zero = 0 if engine == "megatron" else 3
    layout = Layout(micro_batch_size=B, structure=Structure(zero=zero))
    return emit_parts(MODEL, Job(S, B, precision), layout, engines.load(engine))


def kernels(body: Any) -> list[Compute]:
    return [node for node in (*body.forward, *body.backward) if isinstance(node, Compute)]


@pytest.mark.parametrize("engine", ["torchtitan", "torch", "megatron"])
def test_linear_layers_alone_are_in_fp8(engine: str) -> None:
    found = parts(engine, "fp8").bodies
    layer = {node.name: node.dtype for node in kernels(found.layers[0]) if node.shape}
    linear = {"wq", "wk", "wv", "wo", "gate", "up", "down"}
    products = linear | {f"{d}_{name}" for d in ("dx", "dw") for name in linear}
    if engine == "megatron":  # of several that are one matrix the first that is come to is there for all
        products -= {"wk", "wv", "up", *(f"{d}_{name}" for d in ("dx", "dw") for name in ("wq", "wk", "gate"))}
    assert {name for name, dtype in layer.items() if dtype == "fp8"} == products
    assert {name for name, dtype in layer.items() if dtype != "fp8"} == {"attention", "attention_backward"}
    assert all(node.dtype == "bf16" for node in kernels(found.head) if node.shape)


def test_transformer_engine_keeps_inputs_of_linear_layers_in_a_byte() -> None:
    """A layer keeps, of each token, what its norms and its activation made, to multiply it once more: h, h and f
    entries, now of one byte. What attention made stays in bf16 for its own backward, and is kept in fp8 besides.
    """
    half, eighth = (int(peak(parts("megatron", p).bodies.layers[0].forward).net) for p in ("bf16", "fp8"))
    assert half - eighth == B * S * (H + H + F - H)


def test_torchao_keeps_what_it_kept() -> None:
    half, eighth = (int(peak(parts("torchtitan", p).bodies.layers[0].forward).net) for p in ("bf16", "fp8"))
    assert half == eighth


def test_each_operand_is_quantized_where_it_is_used() -> None:
    """Of seven linear layers forward: seven weights, and four inputs (q, k and v share one, gate and up another).
    Backward: seven gradients and seven weights, and with torchao the four inputs again; by rows (float8_linear.py:
    `grad_output_reshaped_maybe_fp8_dim1`) each gradient once more, which is a copy where one scale is a tensor's.
    """
    for engine, backward in (("megatron", 14), ("torch", 18), ("torchtitan", 25)):
        layer = parts(engine, "fp8").bodies.layers[0]
        quantized = [node.phase for node in kernels(layer) if node.name == "quantize"]
        assert (quantized.count("forward"), quantized.count("backward")) == (11, backward), engine


def llama_8b(precision: str) -> dict:
    """On 8 H100, compiled, as torchtitan's benchmark had it."""
    structure = Structure(zero=3, recompute="selective", compile=True)
    layout = Layout(dp_shard=8, micro_batch_size=2, structure=structure)
    machine, job = cluster.load("1x8xh100-sxm"), Job(8192, 16, precision)
    return nanum.predict(load_model("llama-3.1-8b"), job, machine, layout, engine="torchtitan").to_dict()


def test_llama_8b_in_fp8_is_as_much_faster_as_torchtitan_measured() -> None:
    """github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412: 6,667 tokens a second and GPU compiled, 8,532 in
    fp8 (with weights gathered in fp8, on 8 GPUs within a node): to a tenth.
    """
    ratio = llama_8b("bf16")["time"]["step_seconds"] / llama_8b("fp8")["time"]["step_seconds"]
    assert ratio == pytest.approx(8532 / 6667, rel=0.1)


def test_llama_8b_in_fp8_holds_what_it_does_in_bf16() -> None:
    assert llama_8b("fp8")["memory"] == llama_8b("bf16")["memory"]


@pytest.mark.parametrize(
    ("engine", "chip", "said"),
    [
        ("deepspeed", "h100-sxm", "is not modelled for deepspeed: torchtitan, torch and megatron have it"),
        ("megatron", "a100-sxm-80gb", "states no peak for precision fp8"),
    ],
)
def test_where_there_is_no_fp8_it_is_said(engine: str, chip: str, said: str) -> None:
    layout = Layout(dp_replicate=8, structure=Structure(zero=0))
    with pytest.raises(Refused, match=said):
        nanum.predict(replace(MODEL), Job(S, 16, "fp8"), cluster.load(f"1x8x{chip}"), layout, engine=engine)


# --- gathered in fp8 --------------------------------------------------------------------------------------------------
LAYER = 2 * H * H + 2 * H * 256 + 3 * F * H  # of linear layers: 16 heads of 64, 4 of them for keys and values
NORMS, TABLE = 2 * H, 32768 * H
D = 4
TP2 = Layout(dp_shard=D, tp=2, micro_batch_size=B, structure=Structure(zero=3, tensor="sequence"))


def rows(engine: str, zero: int, *, gathers: bool, tp: int = 1, m: int = 1, **given: Any) -> dict[Any, Total]:
    tensor = "tensor" if tp > 1 else "none"
    structure = Structure(zero=zero, fp8_gather=gathers, tensor=tensor, **given)
    layout = Layout(dp_shard=D, tp=tp, structure=structure)
    program = build(MODEL, Job(S, m * D, "fp8"), layout, engines.load(engine), 0).program
    return traffic(program)


def test_torchao_gathers_a_byte_for_each_weight_of_a_linear_layer() -> None:
    """fsdp_utils.py: WeightWithDynamicFloat8CastTensor. Norms go along in bf16, so that all are sent as bytes
    (`_fsdp_param_group.py`: `all_gather_dtype`); the root's table, head and norm stay in bf16.
    """
    found = rows("torch", 3, gathers=True)
    for phase in ("forward", "backward"):
        sent = {k.dtype: t for k, t in found.items() if (k.kind, k.phase) == ("all_gather", phase)}
        assert sent["uint8"].payload_bytes == 4 * (LAYER + 2 * NORMS)
        assert sent["uint8"].calls == 4
        assert sent["bf16"].payload_bytes == 2 * (2 * TABLE + H)
    wide = rows("torch", 3, gathers=False)
    reduced, as_before = ([t.payload_bytes for k, t in r.items() if k.kind == "reduce_scatter"] for r in (found, wide))
    assert reduced == as_before


@pytest.mark.parametrize("tp", [1, 2])
def test_scales_are_of_one_all_reduce_over_each_axis_that_cuts(tp: int) -> None:
    """`precompute_float8_dynamic_scale_for_fsdp`: the largest entry of seven weights of four layers, in fp32."""
    found = rows("torch", 3, gathers=True, tp=tp, m=3)
    scales = {k.axes[-1]: t for k, t in found.items() if k.what == "scales"}
    assert len(scales) == (2 if tp > 1 else 1)
    assert all((t.calls, t.payload_bytes) == (1, 4 * 7 * 4) for t in scales.values())
    assert not [k for k in rows("torch", 3, gathers=False) if k.what == "scales"]


def with_tp(engine: Engine, precision: Precision) -> Any:
    return build(MODEL, Job(S, B * D, precision), TP2, engine, 0).program


def test_what_tensor_parallelism_gathers_for_linear_layers_is_of_a_byte() -> None:
    """torchao, float8_tensor_parallel.py (June 2025): what attention and the feed-forward read is quantized, and then
    gathered; so are the gradients of what their last layers scatter. What is scattered stays in bf16, and so does the
    head's. Of each quantized part of a DTensor ranks agree on one scale: two inputs that are gathered, two that are
    split over heads and columns; backward two gradients that are gathered, and those five and the two inputs that are
    split.
    """
    half, small = (traffic(with_tp(TENSORWISE, precision)) for precision in ("bf16", "fp8"))
    for phase, calls in (("forward", 8), ("backward", 8)):
        by_dtype = {k.dtype: t for k, t in small.items() if (k.axes, k.kind, k.phase) == (("tp",), "all_gather", phase)}
        wide = next(t for k, t in half.items() if (k.axes, k.kind, k.phase) == (("tp",), "all_gather", phase))
        assert by_dtype["fp8"].calls == calls
        assert by_dtype["fp8"].payload_bytes == calls * B * S * H
        others = by_dtype["bf16"].payload_bytes if "bf16" in by_dtype else 0
        assert wide.payload_bytes == 2 * by_dtype["fp8"].payload_bytes + others
    scattered = [
        {k: t.payload_bytes for k, t in found.items() if k.axes == ("tp",) and k.kind == "reduce_scatter"}
        for found in (half, small)
    ]
    assert scattered[0] == scattered[1]
    scales = {k.phase: t for k, t in small.items() if k.axes == ("tp",) and k.what == "scales"}
    assert {phase: t.calls for phase, t in scales.items()} == {"forward": 4 * 4, "backward": 4 * 9}
    assert all(t.payload_bytes == 4 * t.calls for t in scales.values())


def test_products_by_rows_are_of_today_s_torchtitan_alone() -> None:
    for engine, scales in (("torchtitan", "rows"), ("torch", "tensor"), ("megatron", "tensor")):
        products = [n for n in kernels(parts(engine, "fp8").bodies.layers[0]) if n.shape and n.dtype == "fp8"]
        assert products
        assert {n.scales for n in products} == {scales}, engine


def test_today_s_torchtitan_gathers_activations_in_high_precision() -> None:
    """components/quantization/float8.md: with rowwise scaling, all communication is."""
    found = traffic(with_tp(engines.load("torchtitan"), "fp8"))
    assert {k.dtype for k in found if k.axes == ("tp",) and k.kind == "all_gather"} == {"bf16"}


def test_what_is_gathered_in_a_byte_is_kept_so() -> None:
    """`ctx.save_for_backward(input_hp, …)` gets what is a Float8Tensor already: of each token 2 x h entries."""
    half, small = (
        int(peak(emit_parts(MODEL, Job(S, B * D, p), TP2, TENSORWISE).bodies.layers[0].forward).net)
        for p in ("bf16", "fp8")
    )
    assert half - small == B * S * 2 * H


def test_a_weight_that_arrives_in_fp8_is_only_turned_round_for_backward() -> None:
    """Four inputs are quantized forward; backward seven gradients, and the four inputs again: no weights. A weight is
    turned round for the input's gradient, and that which came for its own.
    """
    structure = Structure(zero=3, fp8_gather=True)
    layout = Layout(dp_shard=D, micro_batch_size=B, structure=structure)
    layer = emit_parts(MODEL, Job(S, B * D, "fp8"), layout, engines.load("torch")).bodies.layers[0]
    named = [(node.name, node.phase) for node in kernels(layer)]
    assert [named.count(("quantize", phase)) for phase in ("forward", "backward")] == [4, 11]
    assert [named.count(("transpose", phase)) for phase in ("forward", "backward")] == [0, 7 + 7]


def test_gathered_weights_are_half_as_large() -> None:
    """What a layer's weights hold while they are gathered, and what FSDP2's pool of gathers has."""
    halves = []
    for gathers in (False, True):
        structure = Structure(zero=3, fp8_gather=gathers)
        layout = Layout(dp_shard=D, structure=structure)
        step = build(MODEL, Job(S, D, "fp8"), layout, engines.load("torch"), 0)
        halves.append(step.actions.data.units.layers[0])  # type: ignore[attr-defined]
    wide, narrow = halves
    assert (wide.weights_bytes, narrow.weights_bytes) == (2 * (LAYER + NORMS), LAYER + 2 * NORMS)
    assert (wide.stored_bytes, wide.grads_bytes) == (narrow.stored_bytes, narrow.grads_bytes)


@pytest.mark.parametrize(("gpus", "before", "after"), [(8, 77.0, 76.8), (128, 62.0, 61.8)])
def test_fp8_gathers_save_torchtitan_what_it_measured(gpus: int, before: float, after: float) -> None:
    """github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412: reserved GiB of Llama 3.1 8B, compiled, in bf16 and
    with weights gathered in fp8: 0.2 less on 8 GPUs and on 128, to a digit that is printed.
    """
    machine, model = cluster.load(f"{gpus // 8}x8xh100-sxm"), load_model("llama-3.1-8b")
    reserved = []
    for precision, gathers in (("bf16", False), ("fp8", True)):
        structure = Structure(zero=3, recompute="selective", compile=True, fp8_gather=gathers)
        layout = Layout(dp_shard=gpus, micro_batch_size=2, structure=structure)
        job = Job(8192, 2 * gpus, precision)  # type: ignore[arg-type]
        reserved.append(Prediction(model, job, machine, layout, TORCHTITAN_2024).worst.reserved_bytes / GIB)
    assert reserved[0] == pytest.approx(before, rel=0.01)
    assert reserved[0] - reserved[1] == pytest.approx(before - after, abs=0.1)


def test_megatron_keeps_and_gathers_weights_of_a_byte() -> None:
    """--fp8-param-gather: a buffer of their own. Laid the other way round as well, they take what they did in bf16."""
    narrow, wide = (rows("megatron", 1, gathers=g) for g in (True, False))
    sent = {k.dtype: t.payload_bytes for k, t in narrow.items() if k.kind == "all_gather"}
    assert sent == {"fp8": 4 * LAYER, "bf16": 2 * (4 * NORMS + 2 * TABLE + H)}
    as_before = {k.dtype: t.payload_bytes for k, t in wide.items() if k.kind == "all_gather"}
    assert as_before == {"bf16": 2 * parameters(MODEL)}
    reduced = [{(k.dtype, t.payload_bytes) for k, t in r.items() if k.kind == "reduce_scatter"} for r in (narrow, wide)]
    assert reduced[0] == reduced[1]
    held = []
    for gathers in (True, False):
        layout = Layout(dp_shard=D, structure=Structure(zero=1, fp8_gather=gathers))
        held.append(held_after(build(MODEL, Job(S, D, "fp8"), layout, engines.load("megatron"), 0).resident))
    assert held[0] == held[1]


@pytest.mark.parametrize(
    ("engine", "zero", "precision", "said"),
    [
        ("torchtitan", 3, "fp8", "--fp8-gather is not in torchtitan any more: its recipes scale by rows"),
        ("accelerate", 3, "bf16", "--fp8-gather is not in accelerate; torch"),
        ("torch", 3, "bf16", "is of linear layers in fp8, and --precision is bf16"),
        ("torch", 1, "fp8", "FSDP2 is what gathers weights"),
        ("megatron", 3, "fp8", "--fp8-param-gather is of the distributed optimizer"),
    ],
)
def test_who_gathers_no_weights_in_fp8_says_so(engine: str, zero: int, precision: Any, said: str) -> None:
    layout = Layout(dp_shard=8, structure=Structure(zero=zero, fp8_gather=True))
    with pytest.raises(Refused, match=said):
        nanum.predict(MODEL, Job(S, 16, precision), cluster.load("1x8xh100-sxm"), layout, engine=engine)
