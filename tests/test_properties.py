"""What must hold of every model and layout, and of one emitter that serves one layout and many."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanum import engines
from nanum.account.cost import Cost
from nanum.account.memory import held_after, moment, peak
from nanum.account.step_time import stage_bound
from nanum.account.traffic import flops, traffic
from nanum.build import build
from nanum.cluster import load as load_cluster
from nanum.division.parts import BODY_FIELDS, body_space
from nanum.dtypes import ITEMSIZE
from nanum.engines.engine import Engine
from nanum.job import ALL, Job, Precision, Trained
from nanum.layout import Layout, Structure
from nanum.model import Attention, Mlp, Model
from nanum.once import Once
from nanum.parallel.pipeline import Step
from nanum.prediction import parameters
from nanum.program import FROM_HOST, TO_HOST

SIZES = (*BODY_FIELDS, "pp")
MEGATRON, TORCHTITAN, TORCH = (engines.load(name) for name in ("megatron", "torchtitan", "torch"))
DEEPSPEED, ACCELERATE, NANOTRON = (engines.load(name) for name in ("deepspeed", "accelerate", "nanotron"))
ENGINES = MEGATRON, TORCHTITAN, TORCH, DEEPSPEED, ACCELERATE, NANOTRON
ZERO_STAGES = {
    "megatron": (0, 1, 2, 3), "torchtitan": (3,), "torch": (0, 1, 3), "deepspeed": (0, 1, 2, 3), "accelerate": (3,),
    "nanotron": (0, 1),
}  # fmt: skip
SOME_TRAINED = (
    ALL, Trained("layers"), Trained("none", lora_rank=3), Trained("ends", lora_rank=2, lora_targets="qv"),
    Trained("none", lora_rank=2, lora_targets="attention", quantize="nf4"),
)  # fmt: skip
quick = settings(max_examples=40)


@st.composite
def models(draw: Any, *, layers: int = 7, tied: bool = False, even: bool = False) -> Model:
    """A small Llama or GPT. Unless `even`, hardly any size divides."""
    key_values, group = draw(st.sampled_from((4, 8))), draw(st.sampled_from((1, 3)))
    head_dim = draw(st.sampled_from((4, 8)))
    bias, gated = draw(st.booleans()), draw(st.booleans())
    rate = draw(st.sampled_from((0.0, 0.1)))
    return Model(
        "random",
        hidden_size=draw(st.sampled_from((32, 64))) if even else draw(st.integers(8, 70)),
        vocab_size=512 * draw(st.integers(1, 3)) if even else draw(st.integers(5, 600)),
        num_hidden_layers=draw(st.integers(1, layers)),
        max_position_embeddings=64,
        attention=Attention(key_values * group, key_values, head_dim, bias, bias, rate),
        mlp=Mlp(8 * draw(st.integers(2, 12)), gated, "silu" if gated else "gelu", bias),
        norm=draw(st.sampled_from(("rms_norm", "layer_norm"))),
        position=draw(st.sampled_from(("rotary", "learned"))),
        tie_word_embeddings=tied,
        hidden_dropout=rate,
    )


@dataclass(frozen=True)
class Case:
    """Layouts of one structure, with a stage and a number of micro-batches each."""

    model: Model
    engine: Engine
    structure: Structure
    layouts: tuple[Layout, ...]
    stages: tuple[int, ...]
    sequences: int  # of a step
    seq_len: int = 16
    trained: Trained = ALL

    @property
    def job(self) -> Job:
        precision: Precision = "fp8" if self.structure.fp8_gather else "bf16"
        return Job(self.seq_len, self.sequences, precision, trained=self.trained)

    def steps(self) -> list[Step]:
        pairs = zip(self.layouts, self.stages, strict=True)
        return [build(self.model, self.job, layout, self.engine, stage) for layout, stage in pairs]


def may_chunk(engine: Engine) -> bool:
    """Are gradients of weights made where they are needed, whatever the loss? (Others have none but the full loss.)"""
    return engine in (TORCHTITAN, TORCH)


SOME_LAYERS: tuple[dict[str, int], ...] = (
    {},
    *({"recompute_layers": n} for n in (1, 2, 3)),
    *({"recompute_every": n} for n in (2, 3)),
    *({"recompute_chunk": n} for n in (2, 3)),
)


def offloaded(draw: Any, engine: Engine, zero: int, recompute: str, *, alone: bool) -> dict[str, Any]:
    """What an engine may keep in the host's memory, where a stage is `alone` activations too."""
    ways: list[tuple[str, ...]] = [()]
    if zero == 3 and engine in (TORCHTITAN, TORCH, ACCELERATE):
        ways.append(("params",))
    if engine is DEEPSPEED and zero:
        ways += [("optimizer",), *([("params",), ("optimizer", "params")] if zero == 3 else [])]
    if engine is MEGATRON and zero == 1:
        ways.append(("optimizer",))
    if alone and (engine, recompute) in ((MEGATRON, "none"), (DEEPSPEED, "full")):
        ways += [(*way, "activations") for way in ways]
    way = draw(st.sampled_from(ways))
    part = draw(st.sampled_from((1.0, 0.3))) if engine is MEGATRON and "optimizer" in way else 1.0
    return {"offload": way, "offload_fraction": part}


def engine_and_structure(draw: Any, *, tp: bool, pp: bool, alone: bool = False) -> tuple[Engine, Structure]:
    engine = draw(st.sampled_from(ENGINES))
    recompute = draw(st.sampled_from(("none", "selective", "full")))
    zero = draw(st.sampled_from(ZERO_STAGES[engine.name]))
    structure = Structure(
        **offloaded(draw, engine, zero, recompute, alone=alone),
        zero=zero,
        reshard=draw(st.booleans()),
        tensor=draw(st.sampled_from(("tensor", "sequence"))) if tp else "none",
        recompute=recompute,
        **draw(st.sampled_from(SOME_LAYERS) if recompute == "full" else st.just({})),
        loss=draw(st.sampled_from(("full", "chunked", "full" if tp else "fused"))) if may_chunk(engine) else "full",
        loss_chunks=draw(st.sampled_from((2, 4))),
        schedule=draw(st.sampled_from(("1f1b", "gpipe"))) if pp else "1f1b",
        pipelined=pp,
        attention=draw(st.sampled_from(("flash", "eager"))),
        compile=draw(st.booleans()),
        grad_sync=draw(st.sampled_from(("each", "last"))) if engine is TORCH else "each",
    )
    return engine, structure


@st.composite
def cases(
    draw: Any, *, least: int = 1, most: int = 1, even: bool = False, tied: bool = False, frozen: bool = False
) -> Case:
    tp, pp = draw(st.booleans()), draw(st.booleans())
    model = draw(models(even=even, tied=tied))
    layers = model.num_hidden_layers
    pp = pp and layers > 1
    engine, structure = engine_and_structure(draw, tp=tp, pp=pp, alone=not pp and layers > 2)
    refused = {"megatron": (2, 3), "deepspeed": (3,), "nanotron": (0, 1)}.get(engine.name, ())
    some = SOME_TRAINED if frozen and not tp and structure.zero not in refused else (ALL,)
    divisors = [p for p in range(2, layers + 1) if engine is not MEGATRON or layers % p == 0]
    layouts, stages = [], []
    for _ in range(draw(st.integers(least, most))):
        sizes = {
            "dp_replicate": draw(st.sampled_from((1, 2))),
            "dp_shard": draw(st.sampled_from((1, 2, 3, 4))) if structure.zero else 1,
            "tp": draw(st.sampled_from((2, 4))) if tp else 1,
            "pp": draw(st.sampled_from(divisors)) if pp else 1,
            "micro_batch_size": draw(st.sampled_from((1, 2))),
        }
        layouts.append(Layout(**sizes, structure=structure))
        stages.append(draw(st.integers(0, sizes["pp"] - 1)))
    if any(engine.layers(model, at.pp, stage, structure) == 0 for at in layouts for stage in range(at.pp)):
        some = (ALL,)  # a frozen end alone on a stage is refused
    sequences, trained = 96 * draw(st.sampled_from((1, 2))), draw(st.sampled_from(some))
    gathers = (engine, structure.zero) in ((TORCH, 3), (MEGATRON, 1)) and trained.layers and draw(st.booleans())
    structure = replace(structure, fp8_gather=gathers)
    here = tuple(replace(layout, structure=structure) for layout in layouts)
    return Case(model, engine, structure, here, tuple(stages), sequences, trained=trained)


def together(case: Case) -> tuple[Step, Layout]:
    """All layouts of a case as one, in arrays, and its step."""
    columns: dict[str, Any] = {f: np.array([getattr(layout, f) for layout in case.layouts]) for f in SIZES}
    layout = Layout(**columns, structure=case.structure)
    return build(case.model, case.job, layout, case.engine, np.array(case.stages)), layout


def at(quantity: Any, i: int) -> Any:
    return quantity[i] if isinstance(quantity, np.ndarray) and quantity.ndim else quantity


def assert_rows_equal(many: Any, i: int, one: Any) -> None:
    """Row by row; a row that this layout does not have is empty among the many."""
    for key, total in many.items():
        found = (int(at(total.calls, i)), int(at(total.payload_bytes, i)), int(at(total.wire_bytes, i)))
        if key not in one:
            assert found == (0, 0, 0), key
        else:
            own = one[key]
            assert found == (own.calls, own.payload_bytes, own.wire_bytes), key
            assert at(total.group_size, i) == own.group_size, key
    assert one.keys() <= many.keys()


# --- one emitter ------------------------------------------------------------------------------------------------------
CLUSTER = load_cluster("8x8xh100-sxm")


@quick
@given(cases(least=2, most=5, frozen=True))
def test_many_layouts_are_each_of_them(case: Case) -> None:
    """Peak memory, exchanges, floating-point operations and the bound of a stage's time."""
    step, layout = together(case)
    peaks, rows, operations = peak(step.program).peak, traffic(step.program), flops(step.program)
    of_host = peak(step.program, host=True).peak
    _, distinct = body_space(layout)
    bounds = stage_bound(step, Cost(CLUSTER, step.layout), Cost(CLUSTER, distinct), Once())
    for i, one in enumerate(case.steps()):
        assert at(peaks, i) == peak(one.program).peak == moment(one.program).bytes
        assert at(of_host, i) == peak(one.program, host=True).peak
        assert_rows_equal(rows, i, traffic(one.program))
        assert at(operations, i) == flops(one.program)
        cost = Cost(CLUSTER, case.layouts[i])
        own = stage_bound(one, cost, cost, Once())
        for name, times in own.rounds.items():
            assert at(bounds.rounds[name], i) == times
            if times:
                assert at(bounds.durations[name], i) == pytest.approx(own.durations[name], rel=1e-12)
        assert at(bounds.after_seconds, i) == pytest.approx(own.after_seconds, rel=1e-12)
        assert at(bounds.send_seconds, i) == pytest.approx(own.send_seconds, rel=1e-12)


@pytest.mark.parametrize("engine", [MEGATRON, TORCHTITAN], ids=lambda e: e.name)
def test_a_hundred_thousand_stages(engine: Engine) -> None:
    """Emitted at once, they are those emitted one by one: 200 of them are looked at."""
    rng, n = np.random.default_rng(0), 100_000
    attention, mlp = Attention(64, 8, 16), Mlp(3072, gated=True, activation="silu")
    model = Model("large", 1024, 32000, 48, 4096, attention, mlp, "rms_norm", "rotary", False)
    structure = Structure(zero=1 if engine is MEGATRON else 3, tensor="sequence", recompute="selective", pipelined=True)
    columns: dict[str, Any] = {
        "dp_replicate": 2 ** rng.integers(0, 4, n),
        "dp_shard": 2 ** rng.integers(0, 8, n),
        "cp": np.ones(n, np.int64),
        "tp": 2 ** rng.integers(1, 4, n),
        "micro_batch_size": 2 ** rng.integers(0, 4, n),
        "pp": rng.choice([2, 3, 4, 6, 8, 12, 16], n),
    }
    stage = rng.integers(0, columns["pp"])
    job = Job(2048, 2**17)
    step = build(model, job, Layout(**columns, structure=structure), engine, stage)
    peaks, rows = peak(step.program).peak, traffic(step.program)
    assert peaks.shape == (n,)
    for i in rng.choice(n, 200, replace=False):
        layout = Layout(**{f: int(q[i]) for f, q in columns.items()}, structure=structure)
        one = build(model, job, layout, engine, int(stage[i]))
        assert peaks[i] == peak(one.program).peak
        assert_rows_equal(rows, i, traffic(one.program))


# --- memory -----------------------------------------------------------------------------------------------------------
@quick
@given(cases(most=3, frozen=True))
def test_a_step_leaves_what_it_found(case: Case) -> None:
    for step in case.steps():
        resident, after = held_after(step.at_rest), held_after(step.program)
        for category in {**after, **resident}:
            assert after.get(category, 0) == resident.get(category, 0), category


@pytest.mark.parametrize("engine", [MEGATRON, TORCHTITAN, TORCH], ids=lambda e: e.name)
def test_without_a_pipeline_no_schedule_matters(engine: Engine) -> None:
    """Each micro-batch goes forward and back before the next."""
    attention, mlp = Attention(4, 4, 8), Mlp(64, gated=True, activation="silu")
    model = Model("one stage", 32, 512, 2, 64, attention, mlp, "rms_norm", "rotary", False)
    layouts = (Layout(dp_shard=2, structure=Structure(schedule=schedule)) for schedule in ("1f1b", "gpipe"))
    one, other = (build(model, Job(16, 12), layout, engine, 0) for layout in layouts)
    assert moment(one.program) == moment(other.program)
    assert one.rounds == other.rounds


@quick
@given(cases(most=3, frozen=True))
def test_no_category_is_ever_negative_at_the_peak(case: Case) -> None:
    for step in case.steps():
        found = moment(step.program)
        assert min(found.by_category.values()) >= 0
        assert sum(found.by_category.values()) == found.bytes


@quick
@given(cases(), st.sampled_from(("dp_shard", "tp")), st.integers(2, 6))
def test_sharding_further_never_adds_to_a_resident_state(case: Case, axis: str, times: int) -> None:
    (layout,), (stage,) = case.layouts, case.stages
    tensor = case.structure.tensor
    if axis == "tp":
        times = 2
        tensor = "tensor" if tensor == "none" else tensor
    structure = replace(case.structure, tensor=tensor)
    if case.engine is DEEPSPEED and structure.zero == 3:  # small tensors lie whole beside the shares of several ranks
        layout = replace(layout, dp_shard=2 * layout.dp_shard)
    finer = replace(layout, **{axis: getattr(layout, axis) * times}, structure=structure)
    job = Job(case.seq_len, case.sequences * times)
    before, after = (held_after(build(case.model, job, at, case.engine, stage).resident) for at in (layout, finer))
    for state in ("params", "grads", "optimizer_states"):
        assert after.get(state, 0) <= before.get(state, 0)


def replicated(model: Model, *, first: bool, last: bool, layers: int) -> int:
    """Parameters that tensor parallelism does not divide: norms, learned positions, and biases added after a sum."""
    h = model.hidden_size
    norm = h * (2 if model.norm == "layer_norm" else 1)
    of_layer = 2 * norm + h * model.attention.output_bias + h * model.mlp.bias
    positions = model.max_position_embeddings * h if model.position == "learned" else 0
    return layers * of_layer + first * positions + last * norm


@quick
@given(cases(even=True), st.booleans())
def test_stages_sum_to_the_whole(case: Case, tied: bool) -> None:
    """Over the stages and the ranks of tp, each weight is there once; a tied table twice, where the first stage is not
    the last."""
    (layout,) = case.layouts
    pp, tp = layout.pp, layout.tp
    model = replace(case.model, tie_word_embeddings=tied)
    total = 0
    for stage in range(pp):
        # one data rank: nothing is stored split
        alone = replace(layout, dp_replicate=1, dp_shard=1, structure=replace(layout.structure, offload=()))
        held = held_after(build(model, case.job, alone, case.engine, stage).resident)["params"]
        conventions = case.engine.conventions(model, case.job, layout.structure)
        elements = held // ITEMSIZE[conventions.numerics.param_dtype]
        layers = case.engine.layers_of_stage(model.num_hidden_layers, pp, stage)
        total += tp * elements - (tp - 1) * replicated(model, first=stage == 0, last=stage == pp - 1, layers=layers)
    copies = model.vocab_size * model.hidden_size * (tied and pp > 1)
    assert total == parameters(model) + copies


@pytest.mark.parametrize("engine", [MEGATRON, TORCHTITAN, TORCH], ids=lambda e: e.name)
def test_a_tied_table_is_there_once(engine: Engine) -> None:
    attention, mlp = Attention(4, 4, 8), Mlp(64, gated=True, activation="silu")
    model = Model("tied", 32, 512, 2, 64, attention, mlp, "rms_norm", "rotary", True)
    structure = Structure(zero=1 if engine is MEGATRON else 3)
    held = held_after(build(model, Job(16, 1), Layout(structure=structure), engine, 0).resident)["params"]
    assert held == parameters(model) * (2 if engine is MEGATRON else 4)


# --- exchanges --------------------------------------------------------------------------------------------------------
@quick
@given(cases(most=3, frozen=True))
def test_exchanges_are_positive_and_need_a_second_rank(case: Case) -> None:
    for layout, step in zip(case.layouts, case.steps(), strict=True):
        for key, total in traffic(step.program).items():
            if key.kind in (TO_HOST, FROM_HOST):
                assert (key.axes, total.group_size) == ((), 1)
                assert total.calls > 0
                assert total.wire_bytes == total.payload_bytes > 0
                continue
            ranks = int(np.prod([getattr(layout, a) for a in key.axes]))
            assert ranks > 1, key
            assert total.group_size == (2 if (key.axes, key.what) == (("pp",), "grads") else ranks)
            assert total.calls > 0
            assert 0 < total.wire_bytes <= 2 * total.payload_bytes


@settings(quick, max_examples=10)
@given(models())
def test_one_device_exchanges_nothing(model: Model) -> None:
    for engine, zero in ((MEGATRON, 0), (MEGATRON, 1), (MEGATRON, 3), (TORCHTITAN, 3), (TORCH, 0)):
        program = build(model, Job(16, 4), Layout(structure=Structure(zero=zero)), engine, 0).program
        assert traffic(program) == {}
