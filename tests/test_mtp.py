"""Multi-token prediction: what a module adds to parameters, FLOPs, memory and exchanges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import nanum
from nanum import cluster, engines
from nanum.account.memory import held_after, peak
from nanum.account.traffic import flops, traffic
from nanum.build import build
from nanum.division.parts import emit_parts
from nanum.errors import Refused
from nanum.job import Job, Trained
from nanum.layout import Layout, Structure
from nanum.model import WITHOUT_MTP, Attention, Experts, Mlp, Model, load
from nanum.parallel.pipeline import Step
from nanum.prediction import reference
from nanum.program import Compute

MEGATRON = engines.load("megatron")
B, S, H, V, A, F = 2, 256, 256, 1024, 8, 704
T = B * S
DENSE = Model(
    "dense", H, V, 8, 1024, Attention(A, A, H // A), Mlp(F, True, "silu"), "rms_norm", "rotary", False
)  # fmt: skip
MIXED = replace(DENSE, name="mixed", mlp=Experts(8, 2, Mlp(320, True, "silu")), leading=(DENSE.ordinary,))
MODULE = DENSE.predicting(1)


def layout(**given: Any) -> Layout:
    sizes = {k: given.pop(k) for k in ("dp_shard", "tp", "pp", "ep") if k in given}
    tensor = "sequence" if sizes.get("tp", 1) > 1 else "none"
    pipelined, own = sizes.get("pp", 1) > 1, "ep" in sizes
    structure = Structure(**{"zero": 1, "tensor": tensor, "pipelined": pipelined, "own_experts": own} | given)
    return Layout(**sizes, micro_batch_size=B, structure=structure)


def step(model: Model, stage: int = 0, m: int = 2, **given: Any) -> Step:
    at = layout(**given)
    return build(model, Job(S, B * at.data_ranks * m), at, MEGATRON, stage)


def forward_bytes(found: Step) -> int:
    return int(peak(found.actions["forward.first"]).net)


# --- parameters and FLOPs ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("deepseek-v3", 11_610_068_224),
        ("glm-4.5", 356_785_898_816 - 352_797_829_024),
        ("glm-4.5-air", 109_227_310_848 - 106_852_251_264),
        ("qwen3-next-80b-a3b", 1_650_471_424),
    ],
)
def test_a_module_has_the_published_parameters(name: str, published: int) -> None:
    """Of stored checkpoints, without the copies of table and head that some store; a second has as many again."""
    model = load(name)
    counted = [reference(model.predicting(n), 16).parameters for n in range(3)]
    assert np.diff(counted).tolist() == [published, published]


@pytest.mark.parametrize("model", [DENSE, MIXED, replace(MIXED, tie_word_embeddings=True)], ids=lambda m: m.name)
def test_a_module_computes_one_more_layer_a_projection_and_the_head(model: Model) -> None:
    """The FLOPs of a model with a layer more, and 6 for each entry of the projection and of the head, a token."""
    more = replace(model, num_hidden_layers=model.num_hidden_layers + 1)
    found, deeper = (reference(each, S).model_flops_per_sequence for each in (model.predicting(1), more))
    assert found - deeper == 6 * S * (2 * H * H + V * H)


def test_a_tied_table_is_counted_once() -> None:
    tied = replace(DENSE, tie_word_embeddings=True)
    module = reference(MODULE, S).parameters - reference(DENSE, S).parameters
    assert reference(tied.predicting(1), S).parameters - reference(tied, S).parameters == module


# --- memory -----------------------------------------------------------------------------------------------------------
def _layer_saves() -> int:
    return int(peak(emit_parts(DENSE, Job(S, B), layout(), MEGATRON).bodies.layers[0].forward).net)


def _module_saves() -> int:
    """What norms of the embedding, the state and the result keep, with their statistics, the projection's input, the
    state that the head reads, and an fp32 softmax."""
    return 3 * (2 * T * H + 4 * T) + 2 * T * 2 * H + 2 * T * H + 4 * T * V


def test_what_a_module_keeps_for_backward() -> None:
    assert forward_bytes(step(MODULE)) - forward_bytes(step(DENSE)) == _layer_saves() + _module_saves()


def test_full_recompute_keeps_of_a_module_its_two_inputs_and_what_the_head_reads() -> None:
    kept = forward_bytes(step(MODULE, recompute="full")) - forward_bytes(step(DENSE, recompute="full"))
    assert kept == 3 * 2 * T * H + 4 * T * V
    once, again = (flops(step(MODULE, recompute=mode).program) for mode in ("none", "full"))
    layers = flops(step(DENSE, recompute="full").program) - flops(step(DENSE).program)
    assert again - once == layers * 9 // 8 + 2 * 2 * T * 2 * H * H


def test_block_recompute_leaves_modules_alone() -> None:
    """multi_token_prediction.py: `recompute_method == 'block' is not supported for MTP yet`."""
    some = {"recompute": "full", "recompute_layers": 8}
    more = forward_bytes(step(MODULE, **some)) - forward_bytes(step(DENSE, **some))
    assert more == _layer_saves() + _module_saves()


@pytest.mark.parametrize("modules", [(), ("mlp",)])
def test_selective_recompute_is_of_modules_too(modules: tuple[str, ...]) -> None:
    how = {"recompute": "selective", "recompute_modules": modules, "attention": "eager"}
    one, two = (step(MODULE.predicting(n), **how) for n in (1, 2))
    kept = forward_bytes(step(replace(DENSE, num_hidden_layers=9), **how)) - forward_bytes(step(DENSE, **how))
    assert forward_bytes(one) - forward_bytes(step(DENSE, **how)) == kept + _module_saves()
    assert forward_bytes(two) - forward_bytes(one) == forward_bytes(one) - forward_bytes(step(DENSE, **how))


def test_modules_are_run_again_one_after_the_other() -> None:
    """Each when backward comes to it, so that what they make again is not there at once."""
    at = layout(recompute="full")
    head = emit_parts(DENSE.predicting(2), Job(S, B), at, MEGATRON).bodies.head
    names = [(node.name, node.phase) for node in head.backward if isinstance(node, Compute)]
    again = [i for i, each in enumerate(names) if each == ("mtp_proj", "recompute")]
    (first, second), (last, _) = again, [i for i, (name, _) in enumerate(names) if name == "dw_mtp_proj"]
    assert first < last < second


# --- where it is, and what is exchanged -------------------------------------------------------------------------------
@pytest.mark.parametrize("tied", [False, True])
def test_a_module_is_on_the_last_stage_with_a_table_of_its_own(tied: bool) -> None:
    plain = replace(DENSE, tie_word_embeddings=tied)
    module = plain.predicting(1)
    held = [
        [held_after(step(model, stage, pp=2).at_rest).get("params", 0) for stage in (0, 1)] for model in (plain, module)
    ]
    assert held[0][0] == held[1][0]
    own = reference(module, S).parameters - reference(plain, S).parameters
    assert held[1][1] - held[0][1] == 2 * (own + V * H * (not tied))
    alone = [held_after(step(model).at_rest).get("params", 0) for model in (plain, module)]
    assert alone[1] - alone[0] == 2 * own


@pytest.mark.parametrize("model", [DENSE, MIXED, replace(DENSE, tie_word_embeddings=True)], ids=lambda m: m.name)
@pytest.mark.parametrize("how", [{}, {"pp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "recompute": "full"}])
def test_nothing_is_left_held(model: Model, how: dict[str, Any]) -> None:
    """After a step a rank holds what it held before it, but for its parameters, gradients' buffer and states."""
    for modules in (0, 1, 2):
        for stage in range(how.get("pp", 1)):
            found = step(model.predicting(modules), stage, m=4, **how)
            before, after = held_after(found.at_rest), held_after(found.program)
            assert {k: v for k, v in after.items() if v} == {k: v for k, v in before.items() if v}


def test_the_two_tables_add_their_gradients() -> None:
    """finalize_model_grads.py: `_allreduce_word_embedding_grads`, in fp32."""
    rows = [
        [(k.kind, int(t.payload_bytes)) for k, t in traffic(step(MODULE, s, pp=4).program).items() if k.axes == ("pp",)]
        for s in range(4)
    ]
    summed = [[row for row in of_stage if row[0] == "all_reduce"] for of_stage in rows]
    assert summed == [[("all_reduce", 4 * V * H)], [], [], [("all_reduce", 4 * V * H)]]


def test_what_tensor_parallelism_exchanges_of_a_module() -> None:
    """A layer's 5 gathers and 4 scatters, the head's, and the embedding's; the projection gathers its input (twice as
    wide, and again in backward), its output, and its gradient."""
    plain, module = (
        {
            (k.kind, k.phase): int(t.payload_bytes)
            for k, t in traffic(step(m, m=1, tp=2).program).items()
            if k.axes == ("tp",) and k.what == "activations"
        }
        for m in (DENSE, MODULE)
    )
    whole = 2 * T * H  # [B, S, H] in bf16
    more = {key: (size - plain[key]) / whole for key, size in module.items()}
    assert more == {
        ("all_gather", "forward"): 2 + 1 + 2 + 1,
        ("reduce_scatter", "forward"): 2 + 1,
        ("all_gather", "backward"): 2 + 2 + 1 + 2 + 1 + 1,
        ("reduce_scatter", "backward"): 2 + 1 + 2,
    }


def test_many_layouts_at_once_are_as_each_alone() -> None:
    model, job = MIXED.predicting(1), Job(S, 64)
    many = [(tp, pp) for tp in (2, 4) for pp in (2, 3)]
    columns = {name: np.array(values) for name, values in zip(("tp", "pp"), zip(*many, strict=True), strict=True)}
    model = replace(model, num_hidden_layers=6)
    at = Layout(**columns, dp_shard=np.array([2] * 4), micro_batch_size=np.array([B] * 4),
                structure=layout(tp=2, pp=2).structure)  # fmt: skip
    together = build(model, job, at, MEGATRON, at.pp - 1)
    found = peak(together.program).peak
    for i, (tp, pp) in enumerate(many):
        alone = build(model, job, layout(dp_shard=2, tp=tp, pp=pp), MEGATRON, pp - 1)
        assert peak(alone.program).peak == found[i]


# --- what is said -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("engine", "name", "given", "why"),
    [
        ("torchtitan", "deepseek-v3", {}, "its deepseek_v3 has it, without pipelines"),
        ("deepspeed", "deepseek-v3", {}, "--mtp-layers 1 is not for deepspeed: megatron has it"),
        ("megatron", "gpt2", {}, "gpt2 has learned positions"),
        ("megatron", "glm-4.5-air", {"zero": 3}, "with zero=3, Megatron-FSDP, is not modelled"),
    ],
)
def test_refused(engine: str, name: str, given: dict[str, Any], why: str) -> None:
    at = Layout(dp_shard=8, structure=Structure(**{"zero": 1} | given))
    with pytest.raises(Refused) as refused:
        nanum.predict(load(name).predicting(1), Job(1024, 8), cluster.load("1x8xh100-sxm"), at, engine)
    assert any(why in reason for reason in refused.value.reasons)


def test_refused_of_a_job_and_of_counts() -> None:
    at, chips = Layout(dp_shard=8, structure=Structure(zero=1)), cluster.load("1x8xh100-sxm")
    for model, job, why in (
        (MODULE, Job(256, 8, trained=Trained("none", lora_rank=4)), "is not trained whole"),
        (DENSE.predicting(17), Job(256, 8), "mtp_layers=17: must be from 0 to 16"),
    ):
        with pytest.raises(Refused) as refused:
            nanum.predict(model, job, chips, at, "megatron")
        assert any(why in reason for reason in refused.value.reasons)


def test_left_out_until_it_is_asked_for() -> None:
    model = load("deepseek-v3")
    assert WITHOUT_MTP in model.left_out
    assert WITHOUT_MTP not in model.predicting(1).left_out
    assert model.predicting(0) == model
