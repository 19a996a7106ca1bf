"""Linear layers of fp8: what is kept, what is computed in which precision, and what others measured of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import nanum
from nanum import cluster, engines
from nanum.account.memory import peak
from nanum.build import emit_parts
from nanum.errors import Refused
from nanum.job import Job, Precision
from nanum.layout import Layout, Structure
from nanum.model import Attention, Mlp, Model
from nanum.model import load as load_model
from nanum.program import Compute

H, F, S, B = 1024, 2816, 2048, 2
MODEL = Model("llama", H, 32768, 4, 8192, Attention(16, 4, 64), Mlp(F, True, "silu"), "rms_norm", "rotary", False)


def parts(engine: str, precision: Precision) -> Any:
    zero = 0 if engine == "megatron" else 3
    layout = Layout(micro_batch_size=B, structure=Structure(zero=zero))
    return emit_parts(MODEL, Job(S, B, precision), layout, engines.load(engine))


def kernels(body: Any) -> list[Compute]:
    return [node for node in (*body.forward, *body.backward) if isinstance(node, Compute)]


@pytest.mark.parametrize("engine", ["torchtitan", "megatron"])
def test_linear_layers_alone_are_in_fp8(engine: str) -> None:
    found = parts(engine, "fp8").bodies
    layer = {node.name: node.dtype for node in kernels(found.layers[0]) if node.shape}
    linear = {"wq", "wk", "wv", "wo", "gate", "up", "down"}
    products = linear | {f"{d}_{name}" for d in ("dx", "dw") for name in linear}
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
    Backward: seven gradients and seven weights, and with torchao the four inputs again.
    """
    for engine, backward in (("megatron", 14), ("torchtitan", 18)):
        layer = parts(engine, "fp8").bodies.layers[0]
        quantized = [node.phase for node in kernels(layer) if node.name == "quantize"]
        assert (quantized.count("forward"), quantized.count("backward")) == (11, backward), engine


def test_llama_8b_in_fp8_is_as_much_faster_as_torchtitan_measured() -> None:
    """github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412: 6,667 tokens a second and GPU compiled, 8,532 in
    fp8 (with weights gathered in fp8, on 8 GPUs within a node): to a tenth.
    """
    model, machine = load_model("llama-3.1-8b"), cluster.load("1x8xh100-sxm")
    structure = Structure(zero=3, recompute="selective", compile=True)
    layout = Layout(dp_shard=8, micro_batch_size=2, structure=structure)
    half, eighth = (
        nanum.predict(model, Job(8192, 16, precision), machine, layout, engine="torchtitan").to_dict()
        for precision in ("bf16", "fp8")
    )
    ratio = half["time"]["step_seconds"] / eighth["time"]["step_seconds"]
    assert ratio == pytest.approx(8532 / 6667, rel=0.1)
    assert eighth["memory"] == half["memory"]


@pytest.mark.parametrize(
    ("engine", "chip", "said"),
    [
        ("torch", "h100-sxm", "is not modelled for torch"),
        ("megatron", "a100-sxm-80gb", "states no peak for precision fp8"),
    ],
)
def test_where_there_is_no_fp8_it_is_said(engine: str, chip: str, said: str) -> None:
    layout = Layout(dp_replicate=8, structure=Structure(zero=0))
    with pytest.raises(Refused, match=said):
        nanum.predict(replace(MODEL), Job(S, 16, "fp8"), cluster.load(f"1x8x{chip}"), layout, engine=engine)
