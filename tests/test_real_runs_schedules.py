"""What a rank of several pipeline stages exchanges, row by row, beside real PyTorch steps: as `test_real_runs`.

`data/real_runs_schedules.json` has under `lost` what PyTorch does when a backward in halves meets weights that forward
resharded: weights' gradients are never made, and fewer are reduced than there are. Those are refused.
"""

from __future__ import annotations

import json
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

import pytest
from test_real_runs import engine, recorded

from nanum.account.traffic import traffic
from nanum.build import build_rank
from nanum.job import Job
from nanum.layout import Layout, Schedule, Structure
from nanum.model import Attention, Mlp, Model
from nanum.parallel.chunks import RankStep

RECORDED = json.loads((Path(__file__).parent / "data" / "real_runs_schedules.json").read_text(encoding="utf-8"))
RUNS: dict[str, dict[str, Any]] = RECORDED["runs"]
LOST: dict[str, dict[str, Any]] = RECORDED["lost"]
WORDS: dict[str, Schedule] = {
    "LoopedBFS": "looped-bfs",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "zb-h1",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}
Rows = dict[tuple[str, str, str, int, str], tuple[int, int]]


def asked(run: dict[str, Any]) -> tuple[Model, Job, Layout]:
    m, mesh = run["model"], {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 1} | run["mesh"]
    attention, mlp = Attention(m["a"], m["g"], m["hd"]), Mlp(m["f"], gated=True, activation="silu")
    model = Model("run", m["h"], m["V"], m["L"], 64, attention, mlp, "rms_norm", "rotary", m["tied"])
    structure = Structure(
        zero=3 if run["fsdp"] else 0,
        reshard=run.get("reshard", True),
        tensor="none" if mesh["tp"] == 1 else "sequence" if run.get("sp") else "tensor",
        recompute=run.get("recompute", "none"),
        schedule=WORDS[run["schedule"]],
        pipelined=True,
        virtual_stages=run["stages"],
    )
    layout = Layout(**mesh, micro_batch_size=run["micro_batch_size"], structure=structure)
    return model, Job(run["seq_len"], run["micro_batch_size"] * run["num_microbatches"] * layout.data_ranks), layout


def counted(run: dict[str, Any], rank: int) -> Rows:
    model, job, layout = asked(run)
    at = rank * layout.pp // prod(run["mesh"].values())  # pp is the outermost axis
    step = build_rank(model, job, layout, engine(run), at)
    assert isinstance(step, RankStep)
    parts = [
        # Between the passes the recorder was in the phase of the schedule, which it called backward.
        *((nodes, "backward" if action is None else None) for action, nodes in step.passes),
        (step.program[-sum(len(chunk.optimizer) for chunk in step.chunks) :], None),
    ]
    rows: Rows = defaultdict(lambda: (0, 0))
    for nodes, phase in parts:
        for key, total in traffic(nodes).items():
            axis = "+".join(a for a in layout.rank_order if a in key.axes and run["mesh"].get(a, 1) > 1)
            where = "pipeline" if key.kind == "send" else phase or key.phase
            place = (axis, key.kind, key.dtype, int(total.group_size), where)
            had = rows[place]
            rows[place] = had[0] + int(total.calls), had[1] + int(total.payload_bytes)
    assert sum(calls for calls, _ in rows.values()) == sum(int(t.calls) for t in traffic(step.program).values())
    return dict(rows)


@pytest.mark.parametrize(("name", "rank"), [(n, r) for n in RUNS for each in RUNS[n]["ledgers"] for r in each["ranks"]])
def test_a_real_run(name: str, rank: int) -> None:
    (ledger,) = (each for each in RUNS[name]["ledgers"] if rank in each["ranks"])
    assert counted(RUNS[name], rank) == recorded(ledger)


def test_every_schedule_of_several_chunks_is_among_the_runs() -> None:
    assert {run["schedule"] for run in RUNS.values()} == set(WORDS)
    assert {run["stages"] for run in RUNS.values()} == {2, 4}
    assert len(RUNS) == 21
