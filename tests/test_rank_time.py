"""The time of a step whose ranks hold several stages, and its whole answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from test_chunks import MODEL, SCHEDULES, WAYS, laid

from nanum import cluster, engines, predict
from nanum.account.cost import Cost
from nanum.account.rank_time import rank_times
from nanum.account.step_time import cut, stage_time
from nanum.build import build, build_ranks
from nanum.cluster import Cluster
from nanum.errors import Refused
from nanum.job import Job
from nanum.layout import ONE_CHUNK, TWO_WAY, Layout, Schedule
from nanum.model import load
from nanum.parallel.chunks import RankStep
from nanum.program import Collective, Compute, Node, Repeat, Wait
from nanum.schedule import order, overlapped, stage_of, stages_of, turns
from nanum.search import nearest

EIGHT, SPREAD = cluster.load("1x8xh100-sxm"), cluster.load("8x1xh100-sxm")
TORCH, TITAN = engines.load("torch"), engines.load("torchtitan")


def job(layout: Layout, m: int) -> Job:
    return Job(32, m * layout.data_ranks)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", ONE_CHUNK)
def test_one_stage_a_rank_is_timed_alike_walked_or_in_runs(way: str, schedule: Schedule) -> None:
    for pp, m in ((2, 5), (4, 4), (3, 7)):
        layout = laid(way, schedule, pp)
        steps = [build(MODEL, job(layout, m), layout, TITAN, rank) for rank in range(pp)]
        cost = Cost(EIGHT, layout)
        in_runs = cut(schedule, m, [stage_time(step, cost) for step in steps])
        orders = order(schedule, pp, m)
        ranks = [RankStep((s,), orders[i], layout.structure, "each") for i, s in enumerate(steps)]
        walked = rank_times(schedule, m, 1, ranks, cost).cut
        for part in ("step", "compute", "exposed_communication", "bubble", "optimizer", "sends"):
            assert getattr(walked, part) == pytest.approx(getattr(in_runs, part), rel=1e-9, abs=1e-12), part


# --- node by node -----------------------------------------------------------------------------------------------------
def unrolled(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        if isinstance(node, Repeat):
            for _ in range(int(node.count)):
                yield from unrolled(node.body)
        else:
            yield node


class Clocks:
    """One rank's: its compute's, its streams', and when what was started with a ticket is over."""

    def __init__(self) -> None:
        self.compute = 0.0
        self.sent = 0.0  # when the last turn had done what its results are
        self.streams: dict[str | None, float] = {}
        self.tickets: dict[str, float] = {}

    def run(self, nodes: Sequence[Node], cost: Cost) -> None:
        there, begun, host = False, self.compute, 0.0
        for node in unrolled(nodes):
            if isinstance(node, Compute):
                self.compute += float(cost.compute_seconds(node))
                host += float(cost.host_seconds(node))
            elif isinstance(node, Collective) and node.stream == "data":
                if not cost.streamed_seconds(node):
                    continue  # what exchanges nothing here
                end = max(self.compute, self.streams.get(node.stream, 0.0)) + float(cost.streamed_seconds(node))
                self.streams[node.stream] = self.tickets[node.ticket] = end
                self.compute += float(cost.stolen_seconds(node))
            elif isinstance(node, Collective) and node.stream is None:
                self.compute += float(cost.blocking_seconds(node))
            elif isinstance(node, Collective) and node.stream == "pipeline":
                self.compute = max(self.compute, begun + host)
                self.sent, there = self.compute, True
            elif isinstance(node, Wait):
                self.compute = max(self.compute, self.tickets.get(node.ticket, 0.0))
        if not there:
            self.sent = self.compute = max(self.compute, begun + host)

    @property
    def latest(self) -> float:
        return max(self.compute, *self.streams.values(), 0.0)


def played(schedule: str, m: int, ranks: Sequence[RankStep], cost: Cost, send: float) -> float:
    """The end of a step, each rank's nodes run one after another as far as what they need has come."""
    pp, chunks = len(ranks), len(ranks[0].chunks)
    stages = stages_of(schedule, pp, chunks)
    each = [list(turns(r.order, r.weights, r.rank)) for r in ranks]
    clocks = [Clocks() for _ in ranks]
    position = [0] * pp
    given: dict[tuple[bool, int, int], tuple[float, int]] = {}
    while any(position[r] < len(each[r]) for r in range(pp)):
        moved = False
        for r, step in enumerate(ranks):
            if position[r] == len(each[r]):
                continue
            turn = each[r][position[r]]
            action = turn.action
            if action is not None and action.kind != "W":
                stage, forward = stage_of(schedule, pp, r, turn.chunk), action.kind == "F"
                source = stage - 1 if forward else stage + 1
                if 0 <= source < stages:
                    if (forward, source, action.micro_batch) not in given:
                        continue
                    at, by = given[forward, source, action.micro_batch]
                    clocks[r].compute = max(clocks[r].compute, at + send * (by != r))
            clocks[r].run(step.turns[position[r]], cost)
            position[r] += 1
            moved = True
            if action is not None and action.kind != "W":
                given[forward, stage, action.micro_batch] = clocks[r].sent, r
            pairs = overlapped(schedule, pp, r, step.order)
            done = sum(t.action is not None for t in each[r][: position[r]])
            if done - 2 in pairs:  # a forward whose results are there with those of the backward after it
                before = step.order[done - 2]
                given[True, stage_of(schedule, pp, r, before.chunk), before.micro_batch] = clocks[r].sent, r
            if done - 1 in pairs:
                del given[True, stage, action.micro_batch]  # type: ignore[union-attr]
        assert moved, "deadlock"
    return max(c.latest for c in clocks)


@pytest.mark.parametrize("where", [EIGHT, SPREAD], ids=lambda c: c.name)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_takes_as_long_as_its_nodes_one_by_one(schedule: Schedule, way: str, where: Cluster) -> None:
    """Weights that are gathered ahead arrive beside passes, and a chunk is reduced at its last one."""
    for pp, chunks, m in ((2, 2, 4), (4, 2, 8), (2, 5, 6)):
        if chunks != 2 and schedule in ("zbv", "dualpipev"):
            continue
        layout = laid(way, schedule, pp, chunks)
        ranks = [s for s in build_ranks(MODEL, job(layout, m), layout, TITAN) if isinstance(s, RankStep)]
        cost = Cost(where, layout)
        send = float(cost.collective_seconds(ranks[0].send))
        found = rank_times(schedule, m, chunks, ranks, cost).cut
        assert found.step[0] == pytest.approx(played(schedule, m, ranks, cost, send), rel=1e-9)
        assert found.step[0] - found.sends[0] == pytest.approx(played(schedule, m, ranks, cost, 0.0), rel=1e-9)


# --- the whole answer -------------------------------------------------------------------------------------------------
WHOLE = [
    (engine, way, schedule)
    for schedule in SCHEDULES
    for engine, way in (("torch", "plain"), ("torch", "kept"), ("torchtitan", "kept"), ("torchtitan", "sequence"))
]


@pytest.mark.parametrize(("engine", "way", "schedule"), WHOLE)
def test_every_schedule_is_answered_whole(engine: str, way: str, schedule: Schedule) -> None:
    layout = laid(way, schedule, 4, 2)
    given = cluster.load(f"1x{layout.world}xh100-sxm")
    answer = predict(MODEL, job(layout, 8), given, layout, engine=engine).to_dict()
    time, memory = answer["time"], answer["memory"]
    parts = ("compute_seconds", "exposed_communication_seconds", "bubble_seconds", "optimizer_seconds")
    assert sum(time[part] for part in parts) == pytest.approx(time["step_seconds"], rel=1e-9)
    assert all(time[part] >= 0 for part in parts)
    assert time["bubble_seconds"] > 0
    assert [stage["stage"] for stage in memory["stages"]] == list(range(4))
    for stage in memory["stages"]:
        assert sum(stage["by_category"].values()) == stage["allocated_peak_bytes"]
    assert {row["stage"] for row in answer["communication"]} == set(range(4))
    assert all(0 <= row["exposed_seconds"] <= row["seconds"] * (1 + 1e-9) for row in answer["communication"])
    assert answer["layout"]["virtual_stages"] == 2
    assert answer["layout"]["schedule"] == schedule
    assert answer["throughput"]["mfu"] == pytest.approx(answer["throughput"]["hfu"], rel=0.35)


def timed(schedule: Schedule, chunks: int) -> Any:
    layout = Layout(dp_shard=1, pp=8, structure=laid("kept", schedule, 8, chunks).structure)
    return predict(load("llama-3.1-8b"), Job(4096, 16), EIGHT, layout).time


def test_more_stages_a_rank_leave_a_smaller_bubble() -> None:
    """Some v-th part of 1F1B's, for the ends of the model weigh."""
    bubbles = [timed("1f1b", 1).bubble_seconds, *(timed("interleaved", v).bubble_seconds for v in (2, 4))]
    assert bubbles[1] < 0.75 * bubbles[0]
    assert bubbles[2] < 0.75 * bubbles[1]
    assert timed("zbv", 2).step_seconds < timed("1f1b", 1).step_seconds


def test_the_serial_fraction_is_against_the_whole_model() -> None:
    several, one = timed("interleaved", 2), timed("1f1b", 1)
    alone = {t.step_seconds / (1 / 8 + (1 - 1 / 8) * t.serial_fraction) for t in (several, one)}  # Karp-Flatt, solved
    assert max(alone) == pytest.approx(min(alone), rel=1e-9)


def test_a_ledger_counts_each_boundary() -> None:
    """m sends of the activations' bytes over each of pv - 1 boundaries and back; none at the turn of a V."""
    m = 8
    for schedule in SCHEDULES:
        layout = laid("plain", schedule, 4, 2)
        answer = predict(MODEL, job(layout, m), cluster.load("1x4xh100-sxm"), layout, engine="torch")
        sends = [row for row in answer.communication if row.kind == "send"]
        boundaries = 7 - (schedule in ("zbv", "dualpipev"))
        assert sum(row.calls for row in sends) == 2 * m * boundaries
        assert sum(row.payload_bytes for row in sends) == 2 * m * boundaries * 32 * MODEL.hidden_size * 2


@pytest.mark.parametrize(
    ("engine", "schedule", "chunks", "said"),
    [
        (
            "torchtitan",
            "zb-h2",
            1,
            "schedule=zb-h2 is not in torchtitan: of the zero-bubble fork of Megatron-LM",
        ),
        ("torch", "dualpipe", 2, "schedule=dualpipe is not in torch: DeepSeek's own DualPipe library has it"),
        ("megatron", "zbv", 2, "schedule=zbv is not in megatron: torchtitan and torch have it"),
        ("megatron", "looped-bfs", 2, "schedule=looped-bfs is not in megatron"),
        ("torchtitan", "zb-h1", 2, "makes no gradients of weights that were resharded after forward"),
        ("torchtitan", "interleaved", 2, "2 rounds do not divide them"),
        ("torchtitan", "zb-h1", 1, "schedule=zb-h1 needs --virtual-stages 2 or more (torchtitan)"),
    ],
)
def test_what_an_engine_lacks_is_refused_in_its_name(engine: str, schedule: Schedule, chunks: int, said: str) -> None:
    layout = laid("resharded" if "resharded" in said else "kept", schedule, 4, chunks)
    with pytest.raises(Refused) as refused:
        predict(MODEL, job(layout, 9 if "rounds" in said else 8), EIGHT, layout, engine=engine)
    assert any(said in reason for reason in refused.value.reasons)


def test_two_way_pipelines_hold_the_model_twice() -> None:
    """DualPipe's two directions: parameters twice (arXiv 2412.19437, table 2)."""
    (schedule,) = TWO_WAY
    layout = laid("plain", schedule, 4, 2)
    once = laid("plain", "1f1b", 4)

    both = build_ranks(MODEL, job(layout, 8), layout, TORCH)
    params = [sum(int(n.bytes) for c in r.chunks for n in c.resident if n.category == "params") for r in both]
    alone = [
        sum(int(n.bytes) for n in s.resident if n.category == "params")
        for s in build_ranks(MODEL, job(once, 8), once, TORCH)
    ]
    assert params == [alone[i] + alone[3 - i] for i in range(4)]
    assert sum(params) == 2 * sum(alone)


def test_a_layout_that_does_not_fit_has_a_nearest_one() -> None:
    """Of the schedules that a plan tries: one stage a rank."""
    layout = laid("kept", "interleaved", 4, 2)
    predicted = predict(load("llama-3.1-8b"), Job(8192, 512), EIGHT, layout)
    assert not predicted.fits
    near = nearest(predicted)
    assert near is not None
    assert near.layout.pp == 4
    assert near.layout.structure.virtual_stages == 1
