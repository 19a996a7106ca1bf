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

OUT_OF_SCOPE = {
    "ddp2_find_unused": "a flag that fills DDP's buckets in another order, and adds an exchange",
    "zero1_4_bucket_view": "a flag that broadcasts once a rank, not once a parameter",
    "fsdp4_reshard_to_2": "weights resharded to fewer ranks than hold them",
    "fsdp4_no_reshard_accumulate_keep": "weights kept gathered from one micro-batch to the next",
    "hsdp2x2_accumulate_all_reduce_last": "gradients scattered in each micro-batch, and added over copies in the last",
}
"""Switches of PyTorch that a layout has no word for."""


def recordings(name: str) -> dict[str, dict[str, Any]]:
    text = (Path(__file__).parent / "data" / f"{name}.json").read_text(encoding="utf-8")
    return {run: found for run, found in json.loads(text)["runs"].items() if run not in OUT_OF_SCOPE}


RUNS = recordings("real_runs") | recordings("real_runs_context")
DATA_PARALLEL = recordings("real_runs_data_parallel")
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
        if run.get("bucket_cap_mb"):
            stated = replace(stated, bucket_bytes=(int(run["bucket_cap_mb"] * 2**20),) * 2)
        return replace(
            stated,
            root_reshards=not run.get("root_keeps", False),
            loss_parallel=run.get("loss_parallel", False),
            ring_gathers=run.get("cp_kind") != "ring_alltoall",
            rope_in_forward=True,  # the runs' modules have no tables of positions that DDP would broadcast
        )

    return replace(torch, conventions=conventions, layers_of_stage=lambda layers, pp, stage: layers // pp)


def coordinates(rank: int, layout: Layout) -> dict[str, int]:
    """A rank's index along each axis: the last one varies fastest."""
    sizes = layout.sizes
    return dict(zip(sizes, map(int, np.unravel_index(rank, tuple(sizes.values()))), strict=True))


def zero(run: dict[str, Any]) -> int:
    """`replicate` is FSDP2 over shards of one rank: it gathers nothing, and reduces as a unit."""
    return 1 if "zero1" in run else 3 if run["fsdp"] or run.get("dp") == "replicate" else 0


def counted(run: dict[str, Any], rank: int) -> Rows:
    m, mesh = run["model"], {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1} | run["mesh"]
    attention, mlp = Attention(m["a"], m["g"], m["hd"]), Mlp(m["f"], gated=True, activation="silu")
    model = Model("run", m["h"], m["V"], m["L"], 64, attention, mlp, "rms_norm", "rotary", m["tied"])
    structure = Structure(
        zero=zero(run),
        reshard=run.get("reshard", True),
        tensor="none" if mesh["tp"] == 1 else "sequence" if run.get("sp") else "tensor",
        recompute=run.get("recompute", "none"),
        schedule=run.get("schedule", "1F1B").lower(),
        pipelined=mesh["pp"] > 1,
        cp_kind=run.get("cp_kind", "none").removesuffix("_alltoall"),
        grad_sync=run.get("sync", "each"),
    )
    if structure.zero == 1:  # whose axis is a layout's dp_shard; the runs' mesh has one name for data parallel
        mesh |= {"dp_shard": mesh["dp_replicate"], "dp_replicate": 1}
    layout = Layout(**mesh, micro_batch_size=run["micro_batch_size"], structure=structure)
    sequences = run["micro_batch_size"] * run["num_microbatches"] * layout.data_ranks
    at = coordinates(rank, layout)
    rows: Rows = defaultdict(lambda: (0, 0))
    step = build(model, Job(run["seq_len"], sequences), layout, engine(run), at["pp"], at=at)
    for key, total in traffic(step.program).items():
        axis = "+".join(a for a in layout.rank_order if a in key.axes and mesh.get(a, 1) > 1)
        if structure.zero == 1:
            axis = axis.replace("dp_shard", "dp_replicate")
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


def ledgers(runs: dict[str, dict[str, Any]]) -> list[Any]:
    found = []
    for name, run in runs.items():
        for ledger in run["ledgers"]:
            found += [pytest.param(run, rank, ledger, id=f"{name}-rank{rank}") for rank in ledger["ranks"]]
    return found


@pytest.mark.parametrize(("run", "rank", "ledger"), ledgers(RUNS | DATA_PARALLEL))
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
