"""What engines did that published runs had, and what is one kernel in them: by counting in the Program."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum import cluster, engines
from nanum.account.coefficients import coefficients
from nanum.account.memory import peak
from nanum.account.traffic import traffic
from nanum.build import build
from nanum.division.parts import emit_parts
from nanum.engines import megatron_kin as kin
from nanum.engines.engine import Engine
from nanum.engines.torchtitan_kin import LLM_FOUNDRY, TORCHTITAN_2024
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Experts, Mlp, Model
from nanum.model import load as load_model
from nanum.prediction import Prediction, consistent
from nanum.program import Collective, Compute, Repeat

GPT = Model("gpt", 1024, 32768, 8, 2048, Attention(16, 16, 64), Mlp(4096, False, "gelu"), "layer_norm", "learned", True)
LLAMA = Model("llama", 1024, 32768, 8, 8192, Attention(16, 4, 64), Mlp(2816, True, "silu"), "rms_norm", "rotary", False)
DROPOUT = replace(GPT, hidden_dropout=0.1, attention=replace(GPT.attention, dropout=0.1))
S = 1024
JOB = Job(S, 64, "bf16")
MACHINE = cluster.load("4x8xa100-sxm-80gb")


def with_conventions(engine: Engine, **changed: Any) -> Engine:
    return replace(engine, conventions=lambda *asked: replace(engine.conventions(*asked), **changed))


def layer(engine: Engine, model: Model, layout: Layout | None = None) -> Any:
    return emit_parts(model, JOB, consistent(layout or Layout(micro_batch_size=2)), engine).bodies.layers[0]


def kernels(body: Any) -> list[Compute]:
    return [node for node in (*body.forward, *body.backward) if isinstance(node, Compute)]


def exchanged(body: Any) -> dict[Any, tuple[Any, Any]]:
    return {key: (total.calls, total.payload_bytes) for key, total in traffic(body.forward + body.backward).items()}


def named(body: Any, name: str) -> Compute:
    return next(node for node in kernels(body) if node.name == name)


# --- one kernel


@pytest.mark.parametrize("model", [GPT, LLAMA])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_weights_that_are_one_matrix_are_one_product_and_nothing_else_changes(model: Model, recompute: Any) -> None:
    layout = Layout(tp=2, micro_batch_size=2, structure=Structure(tensor="tensor", recompute=recompute))
    engine = engines.load("megatron")
    one, several = layer(engine, model, layout), layer(with_conventions(engine, stored_as_one=()), model, layout)
    assert sum(node.flops for node in kernels(one)) == pytest.approx(sum(node.flops for node in kernels(several)))
    assert sum(node.bytes_moved for node in kernels(one)) < sum(node.bytes_moved for node in kernels(several))
    assert exchanged(one) == exchanged(several)
    for nodes, others in ((one.forward, several.forward), (one.backward, several.backward)):
        assert (peak(nodes).peak, peak(nodes).net) == (peak(others).peak, peak(others).net)
    wide = sum(named(several, name).shape[1] for name in ("wq", "wk", "wv"))
    assert named(one, "wq").shape[1] == wide == named(one, "dx_wv").shape[2]
    assert not [node for node in kernels(one) if node.name in ("wk", "wv", "dx_wk", "dw_wk")]
    gated = model is LLAMA
    adds = Counter(node.name for node in kernels(several))["add"] - Counter(node.name for node in kernels(one))["add"]
    assert adds == 2 + gated  # of three gradients of one input, and of two


def products(body: Any) -> list[tuple[str, Any]]:
    return sorted((node.name, node.shape) for node in kernels(body) if node.shape)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_products_of_several_layers_are_not_one(precision: Any) -> None:
    """Of a chunk that is run again as one, and of modules of multi-token prediction, each layer has its own."""
    engine, job = engines.load("megatron"), replace(JOB, precision=precision)
    chunks, (whole,) = (
        emit_parts(LLAMA, job, consistent(Layout(micro_batch_size=2, structure=structure)), engine).bodies.layers
        for structure in (Structure(recompute="full", recompute_chunk=4), Structure(recompute="full"))
    )
    several = sorted(len(products(chunk)) for chunk in chunks)
    assert several == [layers * len(products(whole)) for layers in (1, 2, 3, 4)]
    assert all(set(products(chunk)) == set(products(whole)) for chunk in chunks)
    one, two = (
        emit_parts(LLAMA.predicting(modules), job, consistent(Layout(micro_batch_size=2)), engine).bodies.head
        for modules in (1, 2)
    )
    found = {shape for name, shape in products(two) if name in ("wq", "gate", "dx_wv", "dw_up")}
    assert found == {shape for name, shape in products(one) if name in ("wq", "gate", "dx_wv", "dw_up")} != set()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_is_run_again_of_llm_foundrys_is_as_much_as_of_products_apart(recompute: Any) -> None:
    layout = Layout(micro_batch_size=2, structure=Structure(zero=3, recompute=recompute))
    one, several = (
        layer(engine, LLAMA, layout) for engine in (LLM_FOUNDRY, with_conventions(LLM_FOUNDRY, stored_as_one=()))
    )
    assert sum(node.flops for node in kernels(one)) == pytest.approx(sum(node.flops for node in kernels(several)))


def test_dropout_and_the_residual_after_it_read_and_write_each_tensor_once() -> None:
    one = layer(kin.OF_2021, DROPOUT)
    several = layer(with_conventions(kin.OF_2021, fused=frozenset({"norm", "activation", "optimizer"})), DROPOUT)
    size = 2 * S * DROPOUT.hidden_size * 2  # micro-batch, tokens, width, bytes
    fused = [node.bytes_moved for node in one.forward if isinstance(node, Compute) and node.name == "residual"]
    assert fused == [3 * size + size // 2] * 2  # two are read, a sum is written, and a mask of a byte
    assert [n.name for n in several.forward if isinstance(n, Compute)].count("dropout") == 2
    assert [n.name for n in one.forward if isinstance(n, Compute)].count("dropout") == 0
    assert peak(one.forward).peak == peak(several.forward).peak


def test_a_fused_softmax_reads_half_of_the_scores() -> None:
    eager = Layout(micro_batch_size=2, structure=Structure(attention="eager"))
    scores = 2 * GPT.attention.num_attention_heads * S**2 * 2
    assert named(layer(kin.OF_2021, GPT, eager), "core_softmax").bytes_moved == scores * 3 / 2
    assert named(layer(kin.OF_2021, GPT, eager), "d_core_softmax").bytes_moved == scores * 2
    assert named(layer(engines.load("torch"), GPT, eager), "core_softmax").bytes_moved == scores * 2


def test_kernels_that_go_over_the_same_once_more() -> None:
    """Megatron-DeepSpeed's transformer.py: a bias after the product of queries, keys and values, `contiguous()` of
    attention's answers, and what autograd joins of a split; layer_norm_cuda_kernel.cu: `cuComputePartGradGammaBeta`.
    """
    biased = replace(GPT, attention=replace(GPT.attention, qkv_bias=True))
    eager = Layout(micro_batch_size=2, tp=2, structure=Structure(attention="eager", tensor="tensor"))
    more = layer(kin.OF_2021, biased, eager)
    width, rank = (2 * S * columns * 2 for columns in (GPT.hidden_size, GPT.hidden_size // 2))
    assert named(more, "qkv_bias").bytes_moved == 2 * 3 * rank
    assert named(more, "order_rows").bytes_moved == 2 * rank
    assert named(more, "d_heads").bytes_moved == 2 * 3 * rank
    assert named(more, "d_weights_of_norm1").bytes_moved == named(more, "d_weights_of_norm2").bytes_moved == 2 * width
    once = layer(with_conventions(kin.OF_2021, more_passes=frozenset()), biased, eager)
    assert (
        sum(n.bytes_moved for n in kernels(more)) - sum(n.bytes_moved for n in kernels(once)) == 14 * rank + 4 * width
    )
    for nodes, others in ((more.forward, once.forward), (more.backward, once.backward)):
        assert (peak(nodes).peak, peak(nodes).net) == (peak(others).peak, peak(others).net)


def test_alibis_scores_begin_as_a_copy_where_no_kernel_has_them() -> None:
    """`torch.baddbmm` with a bias that is broadcast, and a beta of 1."""
    bloom, scores = replace(GPT, position="alibi"), 2 * GPT.attention.num_attention_heads * S**2 * 2
    eager = Layout(micro_batch_size=2, structure=Structure(attention="eager"))
    assert named(layer(kin.OF_2021, bloom, eager), "alibi").bytes_moved == 2 * scores
    for model, layout in ((GPT, eager), (bloom, replace(eager, structure=Structure(attention="flash")))):
        assert not [n for n in kernels(layer(kin.OF_2021, model, layout)) if n.name == "alibi"]


# --- stages and buffers


def pipelined(engine: Engine, layout: Layout, model: Model = GPT, job: Job = JOB) -> Prediction:
    return Prediction(model, job, MACHINE, consistent(layout), engine)


@given(st.sampled_from([2, 4, 8]), st.sampled_from([2, 4]))
def test_a_tensor_parallel_rank_sends_its_part_and_the_next_stage_gathers(tp: int, pp: int) -> None:
    structure = Structure(zero=0, tensor="tensor", pipelined=True)
    layout = Layout(dp_replicate=32 // tp // pp, tp=tp, pp=pp, micro_batch_size=1, structure=structure)
    parts, whole = (
        pipelined(engine, layout).communication
        for engine in (kin.OF_2021, with_conventions(kin.OF_2021, sends_parts=False))
    )
    sent, sent_whole = (sum(r.payload_bytes for r in rows if r.kind == "send") for rows in (parts, whole))
    assert sent * tp == sent_whole > 0
    gathered = [r for r in parts if r.kind == "all_gather" and r.axis == "tp" and r.what == "activations"]
    assert sum(r.payload_bytes for r in gathered) == sent_whole  # what is sent, the receiver has whole
    assert not [r for r in whole if r.kind == "all_gather" and r.axis == "tp"]


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_a_pipeline_pays_once_for_the_gather_of_what_was_updated(pp: int) -> None:
    """Each stage's own goes on at the same time as the others'. As each stage begins, it would be paid `pp` times."""
    slow = cluster.load(f"{2 * pp}x1xa100-sxm-80gb")
    layout = Layout(dp_shard=2, pp=pp, micro_batch_size=1, structure=Structure(zero=1, pipelined=True))
    zero_1 = Prediction(GPT, JOB, slow, consistent(layout), kin.MEGATRON_DEEPSPEED)
    gathers = [row for row in zero_1.communication if row.kind == "all_gather" and row.what == "params"]
    assert {row.phase for row in gathers} == {"optimizer"}
    assert len(gathers) == pp
    without = Prediction(
        GPT, JOB, slow, consistent(layout),
        with_conventions(kin.MEGATRON_DEEPSPEED, reduces_beside=True, sends_after_reductions=False),
    )  # fmt: skip
    longest = max(row.seconds for row in gathers)
    assert zero_1.time.step_seconds < without.time.step_seconds + 2.5 * longest  # its reductions are not hidden either


@pytest.mark.parametrize(("precision", "each"), [("fp16", 6), ("bf16", 18)])
def test_a_gradient_is_added_by_a_kernel_of_its_own(precision: Any, each: int) -> None:
    """fp16 to fp16 reads both and writes one; bf16 is made fp32 before it is added."""
    layout = Layout(dp_replicate=32, structure=Structure(zero=0))
    asked = Prediction(GPT, replace(JOB, precision=precision), MACHINE, consistent(layout), kin.MEGATRON_DEEPSPEED)
    added = [node for node in flat(asked.steps[0].program) if isinstance(node, Compute) and node.name == "add_grads"]
    h, f = GPT.hidden_size, 4096
    of_layer = 4 * h * h + 2 * h * f + 4 * h  # six matrices, and two norms with biases
    assert of_layer * each in {int(node.bytes_moved) for node in added}


def flat(nodes: Any) -> Any:
    for node in nodes:
        if isinstance(node, Repeat):
            yield from flat(node.body)
        else:
            yield node


# --- beside


@pytest.mark.parametrize(("engine", "zero"), [(TORCHTITAN_2024, 3), (engines.load("megatron"), 1)])
def test_tensor_parallelism_beside_products_is_faster_and_exchanges_the_same(engine: Engine, zero: int) -> None:
    structure = Structure(zero=zero, tensor="sequence", compile=zero == 3)
    layout = Layout(dp_shard=4, tp=8, micro_batch_size=4, structure=structure)
    waits, beside = (
        Prediction(
            load_model("llama-3.1-70b"), Job(8192, 16, "bf16"), MACHINE,
            consistent(replace(layout, structure=replace(structure, tp_overlap=overlap))), engine,
        )
        for overlap in (False, True)
    )  # fmt: skip
    assert beside.time.step_seconds < waits.time.step_seconds
    both = ([(r.axis, r.kind, r.calls, r.payload_bytes) for r in p.communication] for p in (waits, beside))
    assert next(both) == next(both)


@pytest.mark.parametrize(("tensor", "sums"), [("sequence", "reduce_scatter"), ("tensor", "all_reduce")])
def test_megatron_has_half_of_a_backward_s_exchanges_beside_the_other_product(tensor: Any, sums: str) -> None:
    """What a column-parallel layer gathers again, and the sum of its input's gradient; not what a row-parallel one
    gathers, which both of its products wait for. Not the code of 2021.
    """

    def beside(engine: Engine) -> Counter[tuple[str, str, bool]]:
        layout = Layout(tp=2, micro_batch_size=1, structure=Structure(zero=0, tensor=tensor))
        found: Counter[tuple[str, str, bool]] = Counter()
        for node in flat(build(LLAMA, JOB, layout, engine, 0).program):
            if (
                isinstance(node, Collective)
                and node.axes == ("tp",)
                and node.what == "activations"
                and node.payload_bytes
            ):
                found[node.kind, node.phase, bool(node.behind)] += 1
        return found

    today, before = beside(engines.load("megatron")), beside(kin.OF_2021)
    assert not [key for key in today if key[1] == "forward" and key[2]]
    assert today[sums, "backward", True] > 0
    assert today[sums, "backward", False] == 0
    if tensor == "sequence":
        assert today["all_gather", "backward", True] == today[sums, "backward", True]
        assert today["all_gather", "backward", False] == today["reduce_scatter", "forward", False]
    assert not [key for key in before if key[2]]


def test_experts_exchanges_are_hidden_by_what_compute_there_is_and_no_more() -> None:
    """Over a slow network they are longer than all compute: the step is no shorter than they are, where launches take
    no time.
    """
    experts = Experts(32, 4, Mlp(512, True, "silu"))
    model = replace(LLAMA, mlp=experts)
    layout = Layout(dp_shard=16, ep=16, micro_batch_size=1, structure=Structure(zero=1, own_experts=True))
    machine = cluster.load("16x1xa100-sxm-80gb")
    waits, beside = (
        Prediction(model, Job(1024, 64, "bf16"), machine, consistent(layout), engine, coefficients().alone)
        for engine in (
            kin.bridge(overlaps="none", graphs="none", grads=""),
            kin.bridge(overlaps="overlap_moe_expert_parallel_comm", graphs="none", grads=""),
        )
    )
    exchanged = sum(row.seconds for row in beside.communication if row.axis == "ep")
    assert waits.time.step_seconds > beside.time.step_seconds >= exchanged > 0


def test_a_cuda_graph_of_all_is_launched_at_once() -> None:
    layout = consistent(Layout(dp_shard=32, micro_batch_size=1, structure=Structure(zero=1)))
    none, partial, full = (
        Prediction(LLAMA, Job(128, 64, "bf16"), MACHINE, layout, kin.bridge(overlaps="none", graphs=graphs, grads=""))
        for graphs in ("none", "partial", "full")
    )
    assert none.time.step_seconds > partial.time.step_seconds > full.time.step_seconds


def test_what_is_gathered_to_a_list_is_copied_piece_by_piece() -> None:
    layout = consistent(Layout(dp_shard=32, micro_batch_size=1, structure=Structure(zero=3)))
    listed, at_once = (
        Prediction(GPT, JOB, MACHINE, layout, engine)
        for engine in (kin.ZERO_3_OF_2021, with_conventions(kin.ZERO_3_OF_2021, gathers_to_lists=False))
    )
    counts = [node.count for node in repeats(listed.steps[0].program) if copies(node)]
    assert set(counts) == {0, 2 * 32, 6 * 32}  # two tables; six matrices of a layer, of a piece from each rank
    assert listed.time.step_seconds > at_once.time.step_seconds
    assert listed.communication[0].payload_bytes == at_once.communication[0].payload_bytes


def copies(node: Repeat) -> bool:
    return any(isinstance(each, Compute) and each.name == "copy_piece" for each in node.body)


def repeats(nodes: Any) -> Any:
    for node in nodes:
        if isinstance(node, Repeat):
            yield node
            yield from repeats(node.body)
