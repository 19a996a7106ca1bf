"""What a step exchanges, row by row, beside real PyTorch steps on gloo ranks.

`data/real_runs.json` holds, for each run, the ranks that recorded the same and their rows (receives left out). Every
run is compared whole, the optimizer's sums among it: no row may be missing, and none may be there that was not
recorded, but for gradient clipping (phase `clip`), whose norms are listed as unmodelled.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanum import engines
from nanum.account.traffic import traffic
from nanum.build import build
from nanum.conventions import Conventions
from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Mlp, Model

RECORDED = json.loads((Path(__file__).parent / "data" / "real_runs.json").read_text(encoding="utf-8"))
CONTEXT = json.loads((Path(__file__).parent / "data" / "real_runs_context.json").read_text(encoding="utf-8"))
RUNS: dict[str, dict[str, Any]] = RECORDED["runs"] | CONTEXT["runs"]
DTYPE = {"bfloat16": "bf16", "float32": "fp32"}
OUTSIDE = ("clip",)

Rows = dict[tuple[str, str, str, int, str], tuple[int, int]]


def engine(run: dict[str, Any]) -> Engine:
    """Plain PyTorch, with the switches of the run."""
    torch = engines.load("torch")

    def conventions(model: Model, job: Job, structure: Structure) -> Conventions:
        stated = torch.conventions(model, job, structure)
        if run.get("adamw") == "fused":
            stated = replace(stated, optimizer_sums=1)
        return replace(
            stated,
            root_reshards=not run.get("root_keeps", False),
            loss_parallel=run.get("loss_parallel", False),
            ring_gathers=run.get("cp_kind") != "ring_alltoall",
        )

    return replace(torch, conventions=conventions, layers_of_stage=lambda layers, pp, stage: layers // pp)


def coordinates(rank: int, layout: Layout) -> dict[str, int]:
    """A rank's index along each axis: the last one varies fastest."""
    sizes = layout.sizes
    return dict(zip(sizes, map(int, np.unravel_index(rank, tuple(sizes.values()))), strict=True))


def counted(run: dict[str, Any], rank: int) -> Rows:
    m, mesh = run["model"], {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1} | run["mesh"]
    attention, mlp = Attention(m["a"], m["g"], m["hd"]), Mlp(m["f"], gated=True, activation="silu")
    model = Model("run", m["h"], m["V"], m["L"], 64, attention, mlp, "rms_norm", "rotary", m["tied"])
    structure = Structure(
        zero=3 if run["fsdp"] else 0,
        reshard=run.get("reshard", True),
        tensor="none" if mesh["tp"] == 1 else "sequence" if run.get("sp") else "tensor",
        recompute=run.get("recompute", "none"),
        schedule=run.get("schedule", "1F1B").lower(),
        pipelined=mesh["pp"] > 1,
        cp_kind=run.get("cp_kind", "none").removesuffix("_alltoall"),
    )
    layout = Layout(**mesh, micro_batch_size=run["micro_batch_size"], structure=structure)
    sequences = run["micro_batch_size"] * run["num_microbatches"] * layout.data_ranks
    at = coordinates(rank, layout)
    rows: Rows = defaultdict(lambda: (0, 0))
    step = build(model, Job(run["seq_len"], sequences), layout, engine(run), at["pp"], at=at)
    for key, total in traffic(step.program).items():
        axis = "+".join(a for a in layout.rank_order if a in key.axes and mesh.get(a, 1) > 1)
        phase = "pipeline" if key.kind == "send" else key.phase  # a schedule sends between its actions
        kind = "all_to_all" if key.kind == "permute" else key.kind  # which PyTorch carries a permute by
        _add(rows, (axis, kind, key.dtype, int(total.group_size), phase), int(total.calls), int(total.payload_bytes))
    return dict(rows)


def recorded(ledger: dict[str, Any]) -> Rows:
    rows: Rows = defaultdict(lambda: (0, 0))
    for axis, kind, dtype, group_size, phase, calls, payload_bytes in ledger["rows"]:
        if phase not in OUTSIDE:
            _add(rows, (axis, kind, DTYPE[dtype], group_size, phase), calls, payload_bytes)
    return dict(rows)


def _add(rows: Rows, key: tuple[str, str, str, int, str], calls: int, payload_bytes: int) -> None:
    had = rows[key]
    rows[key] = had[0] + calls, had[1] + payload_bytes


def ledgers() -> list[Any]:
    found = []
    for name, run in RUNS.items():
        for ledger in run["ledgers"]:
            found += [pytest.param(run, rank, ledger, id=f"{name}-rank{rank}") for rank in ledger["ranks"]]
    return found


@pytest.mark.parametrize(("run", "rank", "ledger"), ledgers())
def test_a_real_run(run: dict[str, Any], rank: int, ledger: dict[str, Any]) -> None:
    assert counted(run, rank) == recorded(ledger)


def test_only_clipping_is_outside() -> None:
    phases = {(row[4], "clip" in name) for name, run in RUNS.items() for each in run["ledgers"] for row in each["rows"]}
    assert {phase for phase, clipped in phases if not clipped} == {
        "forward",
        "recompute",
        "backward",
        "optimizer",
        "pipeline",
    }
    assert {phase for phase, clipped in phases if clipped} >= {"clip"}


def test_every_way_of_this_release_is_among_the_runs() -> None:
    axes = {a for run in RUNS.values() for a in run["mesh"]}
    assert axes == {"dp_replicate", "dp_shard", "cp", "tp", "pp"}
    assert {run.get("schedule") for run in RUNS.values()} == {None, "GPipe", "1F1B"}
    assert {run.get("recompute") for run in RUNS.values()} == {None, "selective", "full"}
    assert {run.get("cp_kind") for run in RUNS.values()} == {None, "ulysses", "allgather", "ring", "ring_alltoall"}
    assert len(RUNS) == 65
