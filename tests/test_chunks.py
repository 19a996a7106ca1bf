"""A rank of several pipeline stages: one program, and a backward in halves."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from test_real_runs_schedules import LOST, asked

from nanum import cluster, engines
from nanum.account.memory import held_after, moment
from nanum.account.traffic import flops, traffic
from nanum.build import build, build_rank
from nanum.engines.megatron_kin import ZERO_BUBBLE
from nanum.engines.pipelining import RULES
from nanum.job import Job
from nanum.layout import ONE_CHUNK, V_SHAPED, Layout, Schedule, Structure
from nanum.model import Attention, Mlp, Model
from nanum.parallel.chunks import RankStep
from nanum.parallel.pipeline import Step
from nanum.rules import broken
from nanum.schedule import order, stage_of

TORCH = replace(engines.load("torch"), layers_of_stage=lambda layers, stages, stage: layers // stages)
MODEL = Model("small", 64, 128, 16, 64, Attention(8, 4, 8), Mlp(96, True, "silu"), "rms_norm", "rotary", False)
GPT = Model("old", 64, 128, 16, 64, Attention(8, 8, 8), Mlp(256, False, "gelu"), "layer_norm", "learned", False)
SCHEDULES: tuple[Schedule, ...] = ("interleaved", "looped-bfs", "zb-h1", "zbv", "dualpipev")
WAYS = {
    "plain": (Structure(zero=0, pipelined=True), {}),
    "sequence": (Structure(zero=0, pipelined=True, tensor="sequence"), {"tp": 2}),
    "kept": (Structure(zero=3, pipelined=True, reshard=False), {"dp_shard": 2}),
    "resharded": (Structure(zero=3, pipelined=True), {"dp_shard": 2}),
}


def laid(way: str, schedule: Schedule, pp: int, chunks: int = 1, **also: Any) -> Layout:
    structure, sizes = WAYS[way]
    return Layout(**sizes, pp=pp, structure=replace(structure, schedule=schedule, virtual_stages=chunks, **also))


def job(layout: Layout, m: int) -> Job:
    return Job(32, m * layout.data_ranks)


def read(program: Any) -> Any:
    rows = {k: (t.group_size, t.calls, t.payload_bytes, t.wire_bytes) for k, t in traffic(program).items()}
    return rows, moment(program), held_after(program), flops(program)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", ONE_CHUNK)
def test_one_stage_a_rank_is_the_same_walked_or_in_runs(way: str, schedule: Schedule) -> None:
    for pp, m in ((2, 5), (4, 4), (3, 7)):
        layout = laid(way, schedule, pp)
        for rank in range(pp):
            step = build_rank(MODEL, job(layout, m), layout, TORCH, rank)
            assert isinstance(step, Step)
            table = order(schedule, pp, m)[rank]
            walked = RankStep((step,), table, layout.structure, "each")
            assert read(walked.program) == read(step.program)


def there(held: dict[str, int]) -> dict[str, int]:
    return {category: size for category, size in held.items() if size}


def ranks(way: str, schedule: Schedule, model: Model = MODEL) -> list[RankStep]:
    found = []
    for pp, chunks, m in ((2, 2, 4), (4, 2, 8), (2, 4, 6)):
        if schedule in V_SHAPED and chunks != 2:
            continue
        layout = laid(way, schedule, pp, chunks)
        for rank in range(pp):
            step = build_rank(model, job(layout, m), layout, TORCH, rank)
            assert isinstance(step, RankStep)
            found.append(step)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_leaves_what_it_found(way: str, schedule: Schedule) -> None:
    for step in ranks(way, schedule):
        empty = replace(step, order=())
        assert there(held_after(step.program)) == there(held_after(empty.before_update))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", WAYS)
def test_all_of_a_model_is_on_its_ranks(way: str, schedule: Schedule) -> None:
    """Each layer is computed for each micro-batch, whichever schedule orders it."""
    pp, m = 2, 4
    layout = laid(way, schedule, pp, 2)
    found = sum(flops(build_rank(MODEL, job(layout, m), layout, TORCH, rank).program) for rank in range(pp))
    one = laid(way, "1f1b", 4)
    alone = sum(flops(build(MODEL, job(one, m), one, TORCH, stage).program) for stage in range(4))
    assert found == pytest.approx(alone, rel=1e-12)


def test_a_turn_sends_nothing_and_the_others_send_as_often() -> None:
    pp, m = 4, 8
    for schedule in SCHEDULES:
        layout = laid("plain", schedule, pp, 2)
        for rank in range(pp):
            rows = traffic(build_rank(MODEL, job(layout, m), layout, TORCH, rank).program)
            sent = {k.phase: t.calls for k, t in rows.items() if k.kind == "send"}
            stages = [stage_of(schedule, pp, rank, chunk) for chunk in range(2)]
            turns = abs(stages[0] - stages[1]) == 1
            assert sent.get("forward", 0) == m * sum(s < 2 * pp - 1 for s in stages) - m * turns
            assert sent.get("backward", 0) == m * sum(s > 0 for s in stages) - m * turns


# --- a backward in halves ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", ["plain", "sequence", "kept"])
@pytest.mark.parametrize("model", [MODEL, GPT], ids=lambda model: model.name)
def test_the_halves_are_the_whole(model: Model, way: str) -> None:
    layout = laid(way, "zb-h1", 2, 2)
    for stage in (1, 2, 3):
        actions = build(model, job(layout, 4), layout, TORCH, stage).actions
        for first, last in product((False, True), repeat=2):
            how = {"gathers": False, "first": first, "last": last}
            whole = actions.backward(**how)
            halves = (*actions.backward(**how, half="input"), *actions.backward(**how, half="weight"))
            assert flops(halves) == pytest.approx(flops(whole), rel=1e-12)
            assert read(halves)[0] == read(whole)[0]
            assert there(held_after(halves)) == there(held_after(whole))


@pytest.mark.parametrize("model", [MODEL, GPT], ids=lambda model: model.name)
def test_the_first_half_frees_nothing_below_the_loss(model: Model) -> None:
    """PyTorch retains the graph: what is saved stays, and the gradients that the second half needs come on top."""
    layout = laid("plain", "zb-h1", 2, 2)
    how = {"gathers": False, "first": False, "last": False}
    for stage in (1, 2):
        actions = build(model, job(layout, 4), layout, TORCH, stage).actions
        forward = held_after(actions.forward(gathers=False, first=False))["activations"]
        between = held_after(actions.backward(**how, half="input"))
        assert between.get("grads", 0) == 0
        output = 32 * 64 * 2  # of a stage, in bf16: the graph's end goes with the first half
        assert between["activations"] > -output
        whole = held_after(actions.backward(**how))["activations"]
        assert whole + forward == 2 * output  # what was sent either way, until the end of the step


def test_no_gradient_of_a_weight_is_made_in_the_first_half() -> None:
    layout = laid("plain", "zbv", 2, 2)
    actions = build(MODEL, job(layout, 4), layout, TORCH, 2).actions
    how = {"gathers": False, "first": True, "last": False}
    assert held_after(actions.backward(**how, half="input")).get("grads", 0) == 0
    assert (
        held_after(actions.backward(**how, half="weight"))["grads"] == held_after(actions.backward(**how))["grads"] > 0
    )


def test_the_papers_own_code_keeps_32_sbh_for_the_second_half() -> None:
    """Qi et al. (2023), table 1: of a layer's activations 32 sbh wait for the weights' gradients, the operands of four
    products; all else goes with the first half, and the gradients of norms and biases are made there.
    """
    layout = laid("plain", "zb-h1", 2)
    how = {"gathers": False, "first": False, "last": False}
    kept, made = [], []
    for layers in (32, 48):
        model = replace(GPT, num_hidden_layers=layers)
        actions = build(model, job(layout, 4), layout, ZERO_BUBBLE, 1).actions
        forward = held_after(actions.forward(gathers=False, first=False))["activations"]
        kept.append(forward + held_after(actions.backward(**how, half="input"))["activations"])
        parts = [actions.backward(**how, half=half) for half in ("input", "weight")]
        made.append(sum(map(flops, parts)) / flops(actions.backward(**how)))
        assert there(held_after((*parts[0], *parts[1]))) == there(held_after(actions.backward(**how)))
    assert (kept[1] - kept[0]) / 8 == 32 * 32 * GPT.hidden_size
    assert made == [pytest.approx(1, rel=1e-12)] * 2


def test_recompute_in_halves_is_refused() -> None:
    layout = laid("plain", "zbv", 2, 2, recompute="full")
    with pytest.raises(ValueError, match="recomputes a layer many times"):
        build_rank(MODEL, job(layout, 4), layout, TORCH, 0).program  # noqa: B018


# --- what PyTorch refuses, or loses -----------------------------------------------------------------------------------
def refused(layout: Layout, m: int) -> list[str]:
    given = cluster.load("1x8xh100-sxm")
    return broken(RULES, MODEL, job(layout, m), given, layout)


@pytest.mark.parametrize("name", LOST)
def test_pytorch_loses_gradients_of_resharded_weights(name: str) -> None:
    run = LOST[name]
    model, of, layout = asked(run)
    reasons = broken(RULES, model, of, cluster.load("1x8xh100-sxm"), layout)
    assert any("makes no gradients of weights that were resharded" in reason for reason in reasons)
    kept = replace(layout, structure=replace(layout.structure, reshard=False))
    assert broken(RULES, model, of, cluster.load("1x8xh100-sxm"), kept) == []


def test_fewer_gradients_were_reduced_than_there_are() -> None:
    """Three units a rank of zb-h1, and four or two of a V, as the same runs reduce without resharding."""

    def reductions(run: dict[str, Any]) -> list[int]:
        return [sum(r[5] for r in each["rows"] if r[1] == "reduce_scatter") for each in run["ledgers"]]

    assert reductions(LOST["InterleavedZeroBubble_pp2_v2_fsdp2"]) == [3, 1]
    assert reductions(LOST["ZBVZeroBubble_pp2_v2_fsdp2"]) == [2, 2]


@pytest.mark.parametrize(
    ("layout", "m", "said"),
    [
        (
            laid("plain", "1f1b", 4),
            3,
            "schedule=1f1b with pp=4 needs at least 4 micro-batches, and there are 3: glob",
        ),
        (laid("plain", "dualpipev", 2, 2), 3, "schedule=dualpipev with pp=2 needs at least 4 micro-batches"),
        (laid("plain", "interleaved", 4, 2), 9, "schedule=interleaved takes micro-batches in rounds of pp=4 or a few"),
        (laid("plain", "zb-h1", 4, 2), 9, "2 rounds do not divide them, and there are 9"),
        (laid("plain", "zbv", 4, 2, recompute="full"), 9, "schedule=zbv splits backward, and PyTorch 2.13 then recomp"),
        (replace(laid("plain", "interleaved", 2, 2), dp_replicate=2), 4, "DDP fails in its reducer"),
    ],
)
def test_each_refusal_speaks(layout: Layout, m: int, said: str) -> None:
    (reason,) = refused(layout, m)
    assert said in reason


def test_what_pytorch_runs_is_not_refused() -> None:
    for schedule, m in product((*SCHEDULES, *ONE_CHUNK), (4, 8)):
        chunks = 1 if schedule in ONE_CHUNK else 2
        assert refused(laid("kept", schedule, 2, chunks), m) == []
