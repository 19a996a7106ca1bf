"""What papers and manuals state in closed form, beside the ledgers that are derived from the Program.

Letters as in the papers: b sequences of a micro-batch, s tokens, h hidden, a heads, f intermediate, V vocabulary,
L layers; t, p, d ranks of tensor, pipeline and data parallelism; m micro-batches; P parameters on a rank; X = 2·b·s·h,
the bytes of a bf16 activation. A ring sends ρ(n) = (n - 1)/n of a gathered buffer, twice that of an all-reduced one.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from nanum import engines
from nanum.account.memory import held_after, moment, peak
from nanum.account.step_time import StageTime, cut
from nanum.account.traffic import Key, Total, flops, traffic
from nanum.build import build
from nanum.conventions import Conventions
from nanum.division.parts import emit_parts
from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Mlp, Model
from nanum.model import load as load_model
from nanum.parallel.pipeline import Step

MEGATRON, TORCHTITAN = engines.load("megatron"), engines.load("torchtitan")
B, S, H, A, G, F, V, L = 2, 128, 256, 8, 2, 704, 1024, 4
X = 2 * B * S * H


def rho(n: int) -> Fraction:
    return Fraction(n - 1, n)


def gpt(layers: int = L) -> Model:
    """The model of the papers: biases, LayerNorm, GELU, and dropout in four places."""
    attention = Attention(A, A, H // A, qkv_bias=True, output_bias=True, dropout=0.1)
    mlp = Mlp(4 * H, gated=False, activation="gelu", bias=True)
    return Model("gpt", H, V, layers, S, attention, mlp, "layer_norm", "learned", False, hidden_dropout=0.1)


def llama(layers: int = L, *, tied: bool = False) -> Model:
    attention, mlp = Attention(A, G, H // A), Mlp(F, gated=True, activation="silu")
    return Model("llama", H, V, layers, S, attention, mlp, "rms_norm", "rotary", tied)


LAYER_MATMULS = 2 * H * H + 2 * H * (G * H // A) + 3 * H * F
LAYER = LAYER_MATMULS + 2 * H
PARAMETERS = 2 * V * H + L * LAYER + H


def layout(engine: Engine, *, zero: int = 1, **given: Any) -> Layout:
    """A layout whose structure says what its sizes say."""
    sizes = {k: given.pop(k) for k in ("dp_replicate", "dp_shard", "tp", "pp") if k in given}
    stated = given.pop("tensor", "tensor")
    tensor = "none" if sizes.get("tp", 1) == 1 else stated
    zero = 3 if engine is TORCHTITAN else zero
    structure = Structure(zero=zero, tensor=tensor, pipelined=sizes.get("pp", 1) > 1, **given)
    return Layout(**sizes, micro_batch_size=B, structure=structure)


def step(
    engine: Engine, m: int = 1, *, model: Model | None = None, stage: int = 0, precision: str = "bf16", **given: Any
) -> Step:
    at = layout(engine, **given)
    job = Job(S, B * m * at.data_ranks, precision)  # type: ignore[arg-type]
    return build(model or llama(), job, at, engine, stage)


def rows(program: Step, axis: str, *, what: str | None = None) -> dict[Key, Total]:
    return {k: t for k, t in traffic(program.program).items() if axis in k.axes and what in (None, k.what)}


def sent(program: Step, axis: str, *, what: str | None = None) -> int:
    return sum(int(t.wire_bytes) for t in rows(program, axis, what=what).values())


def calls(program: Step, axis: str, *, kind: str | None = None, what: str | None = None) -> int:
    return sum(int(t.calls) for k, t in rows(program, axis, what=what).items() if kind in (None, k.kind))


# --- resident bytes ---------------------------------------------------------------------------------------------------
def resident(program: Step) -> dict[str, int]:
    held = held_after(program.program)
    return {c: held.get(c, 0) for c in ("params", "grads", "optimizer_states")}


@pytest.mark.parametrize("d", [1, 8, 64])
@pytest.mark.parametrize(
    ("zero", "whole", "split"),
    [(0, (2, 4, 12), (0, 0, 0)), (1, (2, 4, 0), (0, 0, 12)), (2, (2, 0, 0), (0, 4, 12)), (3, (0, 0, 0), (2, 4, 12))],
)
def test_bytes_per_parameter_of_megatron(zero: int, whole: tuple[int, ...], split: tuple[int, ...], d: int) -> None:
    """bf16 with fp32 gradients: 18, and 6 + 12/d with the distributed optimizer (Megatron-LM's own estimate)."""
    sizes = {"dp_shard": d} if zero else {"dp_replicate": d}
    found = resident(step(MEGATRON, zero=zero, **sizes))
    assert list(found.values()) == [PARAMETERS * w + PARAMETERS * s // d for w, s in zip(whole, split, strict=True)]


@pytest.mark.parametrize(("d", "zero"), [(1, 0), (8, 1)])
def test_bytes_per_parameter_of_megatron_in_fp32(d: int, zero: int) -> None:
    """16, and 8 + 8/d: parameters are their own masters."""
    assert sum(resident(step(MEGATRON, zero=zero, dp_shard=d, precision="fp32")).values()) == PARAMETERS * (8 + 8 // d)


def as_in_the_paper(model: Model, job: Job, structure: Structure) -> Conventions:
    """Gradients in half precision, which Megatron keeps in fp32."""
    stated = MEGATRON.conventions(model, job, structure)
    return replace(stated, numerics=replace(stated.numerics, grad_dtype="bf16"))


@pytest.mark.parametrize(
    ("zero", "bytes_of", "printed_gb"),
    [
        (0, lambda n, d: 16 * n, {4: 120, 64: 120, 1024: 120}),
        (1, lambda n, d: 4 * n + 12 * n / d, {4: 52.5, 64: 31.4, 1024: 30.1}),
        (2, lambda n, d: 2 * n + 14 * n / d, {4: 41.3, 64: 16.6, 1024: 15.1}),
        (3, lambda n, d: 16 * n / d, {4: 30.0, 64: 1.88, 1024: 0.12}),
    ],
)
def test_table_1_of_zero(zero: int, bytes_of: Any, printed_gb: dict[int, float]) -> None:
    """Rajbhandari et al. (2020), table 1: 7.5 B parameters, fp16 with fp32 Adam, K = 12."""
    engine = replace(MEGATRON, conventions=as_in_the_paper)
    for d, printed in printed_gb.items():
        sizes = {"dp_shard": d} if zero else {"dp_replicate": d}
        found = sum(resident(step(engine, zero=zero, **sizes)).values())
        assert found == pytest.approx(bytes_of(PARAMETERS, d), rel=1e-3)  # 1,024 ranks divide no norm: a little padding
        gigabytes = found * 7.5 / PARAMETERS
        assert gigabytes == pytest.approx(printed, rel=0.005 if printed > 1 else 0.05)  # as many digits as are printed


@pytest.mark.parametrize("d", [1, 8, 64])
def test_bytes_per_parameter_of_fsdp2(d: int) -> None:
    """fp32 shards and Adam states, 12/d, and between backward and optimizer fp32 gradients: 16/d. AdamW counts its
    steps in four bytes a tensor."""
    program = step(TORCHTITAN, dp_shard=d)
    tensors = 2 + 1 + 9 * L
    assert resident(program) == {
        "params": 4 * PARAMETERS // d,
        "grads": 0,
        "optimizer_states": 8 * PARAMETERS // d + 4 * tensors,
    }
    *all_but_the_optimizer, _ = program.program
    assert held_after(all_but_the_optimizer)["grads"] == 4 * PARAMETERS // d


# --- floating-point operations ----------------------------------------------------------------------------------------
def test_six_n_d() -> None:
    """6 for each parameter of a matmul and token (Kaplan et al., 2020), and 6·L·b·s²·h of causal attention."""
    tokens = 3 * B * S
    matmuls = L * LAYER_MATMULS + V * H
    for engine in (MEGATRON, TORCHTITAN):
        assert flops(step(engine, 3).program) == 6 * matmuls * tokens + 3 * 6 * L * B * S * S * H


def test_published_flops_of_a_gpt() -> None:
    """Narayanan et al. (2021), eq. 3, with full recompute: 96·B·s·L·h²(1 + s/6h + V/16Lh); attention's upper half is
    computed. Korthikanti et al. (2022), app. A: 72·B·s·L·h²(1 + s/6h + V/12Lh) without, and the core's 4·B·s²·h again
    with selective."""

    def of(recompute: str) -> float:
        return float(flops(step(MEGATRON, 1, model=gpt(), attention="eager", recompute=recompute).program))

    none = 72 * B * S * L * H**2 * (1 + Fraction(S, 6 * H) + Fraction(V, 12 * L * H))
    assert of("none") == none
    assert of("full") == 96 * B * S * L * H**2 * (1 + Fraction(S, 6 * H) + Fraction(V, 16 * L * H))
    assert of("selective") == none + 4 * B * S**2 * H * L
    program = step(MEGATRON, 1, model=gpt(), attention="eager", recompute="full").program
    assert flops(program, recompute=False) == none


# --- data parallelism -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("d", [2, 8])
@pytest.mark.parametrize(
    ("zero", "share"),
    [(0, lambda m: 2 * 4), (1, lambda m: 4 + 2), (2, lambda m: 4 * m + 2), (3, lambda m: m * (4 + 4))],
)
def test_data_parallel_bytes_of_megatron(zero: int, share: Any, d: int, m: int) -> None:
    """Of fp32 gradients (γ = 4) and bf16 parameters, ρ(d)·P times 2γ, γ + 2, mγ + 2, m(4 + γ): ZeRO, section 7."""
    axis = "dp_shard" if zero else "dp_replicate"
    assert sent(step(MEGATRON, m, zero=zero, **{axis: d}), axis) == rho(d) * PARAMETERS * share(m)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("d", [2, 8])
def test_data_parallel_bytes_of_fsdp2(d: int, m: int) -> None:
    """m·ρ(d)·(4 + γ)·P, less the head, which backward needs first and which is not gathered again; m·ρ(d)·(2 + γ)·P
    without resharding, in U gathers and U reductions a micro-batch."""
    units, head = L + 2, H + V * H
    program = step(TORCHTITAN, m, dp_shard=d)
    assert sent(program, "dp_shard") == m * rho(d) * (8 * PARAMETERS - 2 * head)
    assert calls(program, "dp_shard", kind="all_gather") == m * (2 * units - 1)
    assert calls(program, "dp_shard", kind="reduce_scatter") == m * units
    program = step(TORCHTITAN, m, dp_shard=d, reshard=False)
    assert sent(program, "dp_shard") == m * rho(d) * 6 * PARAMETERS
    assert calls(program, "dp_shard") == m * 2 * units


def test_hybrid_sharding_all_reduces_the_shards() -> None:
    """Over the replicas 2ρ(n)·γ·P/d for each reduction, in one all-reduce a unit."""
    program = step(TORCHTITAN, 3, dp_replicate=4, dp_shard=8)
    assert sent(program, "dp_replicate") == 3 * 2 * rho(4) * 4 * PARAMETERS / 8
    assert calls(program, "dp_replicate", kind="all_reduce") == 3 * (L + 2)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_gathers_under_a_pipeline(schedule: str, stage: int) -> None:
    """M + 1 of each unit with resharding, 1 without, and 1 of the head, which no forward frees; one reduction of
    each."""
    m, embedding, head = 5, V * H, V * H + H
    layers = TORCHTITAN.layers_of_stage(L, 3, stage)
    for reshard, times in ((True, m + 1), (False, 1)):
        program = step(TORCHTITAN, m, dp_shard=4, pp=3, schedule=schedule, stage=stage, reshard=reshard)
        gathers = {k: t for k, t in rows(program, "dp_shard").items() if k.kind == "all_gather"}
        again = layers + (stage == 0)
        assert sum(int(t.calls) for t in gathers.values()) == times * again + (stage == 2)
        elements = times * (layers * LAYER + (stage == 0) * embedding) + (stage == 2) * head
        assert sum(int(t.payload_bytes) for t in gathers.values()) == 2 * elements
        assert calls(program, "dp_shard", kind="reduce_scatter") == layers + (stage != 1)


# --- tensor parallelism -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize(
    ("engine", "tensor", "recompute", "times", "exchanges"),
    [
        (MEGATRON, "tensor", "none", 8, 4),
        (MEGATRON, "tensor", "full", 12, 6),
        (MEGATRON, "tensor", "selective", 8, 4),
        (MEGATRON, "sequence", "none", 10, 10),
        (MEGATRON, "sequence", "full", 14, 14),
        (MEGATRON, "sequence", "selective", 10, 10),
        (TORCHTITAN, "tensor", "none", 8, 4),
        (TORCHTITAN, "sequence", "none", 8, 8),
    ],
)
def test_tensor_parallel_bytes_of_a_layer(
    engine: Engine, tensor: str, recompute: str, times: int, exchanges: int, t: int
) -> None:
    """4 all-reduces, 8ρ(t)·X (Megatron-LM, 2019, section 3), 6 and 12 with recompute. Sequence parallelism sends as
    much in twice as many halves; Megatron gathers two inputs again in backward, which makes 10, and 14 with
    recompute."""
    more, fewer = (step(engine, 3, model=llama(n), tp=t, tensor=tensor, recompute=recompute) for n in (L + 1, L))
    assert sent(more, "tp", what="activations") - sent(fewer, "tp", what="activations") == 3 * times * rho(t) * X
    assert calls(more, "tp", what="activations") - calls(fewer, "tp", what="activations") == 3 * exchanges


@pytest.mark.parametrize(("tensor", "times"), [("tensor", 2 + 2), ("sequence", 2 + 3)])
def test_tensor_parallel_bytes_of_the_ends(tensor: str, times: int) -> None:
    """The embedding's output and the head's input gradient are all-reduced, 2ρ(t)·X each; under sequence parallelism
    they are a scatter and a gather each, and Megatron gathers the head's input again."""
    t = 4
    found = sent(step(MEGATRON, 1, tp=t, tensor=tensor), "tp", what="activations")
    assert found == rho(t) * X * (times + L * {"tensor": 8, "sequence": 10}[tensor])


@pytest.mark.parametrize(("engine", "reductions"), [(MEGATRON, 2), (TORCHTITAN, 3)])
def test_vocabulary_parallel_loss(engine: Engine, reductions: int) -> None:
    """Three fp32 sums for each token, 24ρ(t)·b·s bytes; Megatron's fused loss sends two of them as one."""
    program = step(engine, 3, tp=4)
    assert sent(program, "tp", what="loss") == 3 * 24 * rho(4) * B * S
    assert calls(program, "tp", what="loss") == 3 * reductions


def test_norm_weights_under_sequence_parallelism() -> None:
    """2ρ(t)·γ of their parameters, once a step in Megatron; DTensor's are summed in each backward, in bf16."""
    norms = (2 * L + 1) * H
    assert sent(step(MEGATRON, 3, tp=4, tensor="sequence"), "tp", what="grads") == 2 * rho(4) * 4 * norms
    assert sent(step(TORCHTITAN, 3, tp=4, tensor="sequence"), "tp", what="grads") == 3 * 2 * rho(4) * 2 * norms
    assert not rows(step(MEGATRON, 3, tp=4), "tp", what="grads")


# --- pipeline parallelism ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("tensor", "t", "part"), [("none", 1, 1), ("tensor", 2, 1), ("sequence", 2, 2)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_pipeline_sends(schedule: str, tensor: str, t: int, part: int) -> None:
    """2m·X of an interior rank and m·X of the two at the ends; a t-th under sequence parallelism."""
    m = 6
    for stage, ways in enumerate((1, 2, 2, 1)):
        program = step(MEGATRON, m, pp=4, tp=t, tensor=tensor, schedule=schedule, stage=stage)
        assert sent(program, "pp") == ways * m * X // part
        assert calls(program, "pp", kind="send") == ways * m


def test_tied_embedding_across_a_pipeline() -> None:
    """Both copies' fp32 gradients are all-reduced once a step between two ranks: 4hV/t (finalize_model_grads.py)."""
    for stage, expected in enumerate((1, 0, 0, 1)):
        program = step(MEGATRON, 6, model=llama(tied=True), pp=4, tp=2, stage=stage)
        assert sent(program, "pp", what="grads") == expected * 4 * H * V // 2
    assert not rows(step(MEGATRON, 6, pp=4, tp=2), "pp", what="grads")


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_micro_batches_in_flight(schedule: str, m: int) -> None:
    """min(p - i, m) stage-sized activations under 1F1B, m under GPipe: what a Program of one micro-batch does not
    hold."""
    p = 4
    for stage in range(p):
        one, many = (step(MEGATRON, n, pp=p, schedule=schedule, stage=stage) for n in (1, m))
        of_a_micro_batch = held_after(one.actions["forward"])["activations"]
        extra = moment(many.program).bytes - moment(one.program).bytes
        expected = m if schedule == "gpipe" else min(p - stage, m)
        tokens = many.ids.bytes * (stage in (0, p - 1))  # the data loader's, of each micro-batch
        assert extra == (expected - 1) * of_a_micro_batch + (m - 1) * tokens


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 16), (8, 64)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_bubble(schedule: str, p: int, m: int) -> None:
    """(p - 1)/m of the work, where stages are equal and sends cost nothing."""
    program = step(MEGATRON, m, pp=2, schedule=schedule)
    durations = {name: 2.0 if name.startswith("backward") else 1.0 for name in program.actions}
    work = 3.0 * m
    found = cut(schedule, m, [StageTime(durations, program.rounds, work, work, 0.0, 0.0, 0.0, 0.0)] * p)
    assert found.bubble[0] / work == pytest.approx((p - 1) / m)
    assert np.isclose(found.step[0], work + found.bubble[0])


# --- activations ------------------------------------------------------------------------------------------------------
def saved(engine: Engine, model: Model, **given: Any) -> int:
    """Bytes that the forward pass of one layer leaves for its backward."""
    parts = emit_parts(model, Job(S, B), layout(engine, **given), engine)
    return int(peak(parts.bodies.layers[0].forward).net)


SCORES = Fraction(5 * A * S, H)
STATISTICS = 2 * (4 + 4) * B * S
"""Of two LayerNorms fp32 means and reciprocal deviations, which the paper leaves out as small against h."""


@pytest.mark.parametrize("t", [2, 4, 8])
@pytest.mark.parametrize(
    ("recompute", "whole", "split"), [("none", 10, 24 + SCORES), ("selective", 10, 24), ("full", 2, 0)]
)
def test_activations_of_korthikanti(recompute: str, whole: int, split: Fraction, t: int) -> None:
    """Korthikanti et al. (2022), table 2: sbh(34 + 5as/h); with tensor parallelism sbh(10 + 24/t + 5as/ht); with
    sequence parallelism a t-th of the first; selective recompute leaves out 5as/h, full leaves 2sbh, the layer's
    input."""
    sbh, statistics = S * B * H, STATISTICS * (recompute != "full")
    given = {"recompute": recompute, "attention": "eager"}
    assert saved(MEGATRON, gpt(), **given) == sbh * (whole + split) + statistics
    assert saved(MEGATRON, gpt(), tp=t, tensor="tensor", **given) == sbh * (whole + split / t) + statistics
    assert saved(MEGATRON, gpt(), tp=t, tensor="sequence", **given) == (sbh * (whole + split) + statistics) / t


@pytest.mark.parametrize("t", [1, 2])
def test_activations_of_a_llama_with_flash_attention(t: int) -> None:
    """A token and layer: block inputs and norm outputs 8h, q, k and v and the attention's output, gate, up and their
    product 6f, fp32 log-sum-exp 4a and two reciprocal deviations; all of it a t-th under sequence parallelism, 8h + 8
    whole without."""
    q, kv = H, 2 * G * H // A
    split, whole = 2 * (q + kv) + 2 * q + 6 * F + 4 * A, 8 * H + 8
    assert saved(MEGATRON, llama(), tp=t, tensor="sequence") == B * S * (whole + split) / t
    assert saved(MEGATRON, llama(), tp=t, tensor="tensor") == B * S * (whole + split / t)
    assert saved(TORCHTITAN, llama(), compile=True) == B * S * (whole + split)
    assert saved(TORCHTITAN, llama()) == B * S * (whole + split + 2 * F)  # an eager SwiGLU saves silu(gate) too


def test_a_published_model_by_its_table() -> None:
    """22 B GPT of Korthikanti et al., table 3 (a 64, h 6144, s 2048, b 4, t 8): 5as/h is 106.7, and sequence
    parallelism with selective recompute leaves 34/(10 + 24/8 + 106.7/8) of what tensor parallelism saves, a sixth."""
    model = load_model("megatron-22b")
    model = replace(model, attention=replace(model.attention, dropout=0.1), hidden_dropout=0.1)
    heads, h, s, b, t = model.attention.num_attention_heads, model.hidden_size, 2048, 4, 8
    assert (heads, h) == (64, 6144)
    found = {}
    for tensor, recompute in (("tensor", "none"), ("sequence", "selective")):
        at = Layout(
            tp=t, micro_batch_size=b, structure=Structure(zero=1, tensor=tensor, recompute=recompute, attention="eager")
        )  # type: ignore[arg-type]
        found[tensor] = peak(emit_parts(model, Job(s, b), at, MEGATRON).bodies.layers[0].forward).net
    assert found["sequence"] / found["tensor"] == pytest.approx(
        34 / t / (10 + 24 / t + 5 * heads * s / h / t), rel=0.001
    )
