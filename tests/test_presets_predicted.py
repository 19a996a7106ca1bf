"""Every preset on 8 to 16,384 GPUs, laid out at random: an answer that adds up, or every reason why not."""

from __future__ import annotations

import random
from typing import Any

import pytest

import nanum
from nanum import cluster, engines
from nanum.errors import Refused
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Experts, Model
from nanum.model.presets import Preset, presets

GPUS = {8: "1x8xh100-sxm", 64: "8x8xh100-sxm", 1024: "128x8xh100-sxm", 16384: "2048x8xh100-sxm"}
ENGINES = ("torchtitan", "megatron", "torch", "deepspeed", "accelerate", "nanotron")
TRIES = 400


def layout(rng: random.Random, model: Model, engine: Any, gpus: int) -> Layout:
    """One at random; not all of them are possible."""
    ways = {"tp": (1, 2, 4, 8), "pp": (1, 1, 2, 4, 8), "cp": (1, 1, 1, 2), "dp_replicate": (1, 1, 2)}
    sizes: dict[str, int] = {}
    left = gpus
    for axis, among in ways.items():
        sizes[axis] = rng.choice([size for size in among if left % size == 0])
        left //= sizes[axis]
    zero = rng.choice((engine.default_zero, engine.default_zero, 0, 1, 3))
    if zero == 0:
        sizes["dp_replicate"], left = sizes["dp_replicate"] * left, 1
    schedule = rng.choice(sorted(engine.schedules)) if sizes["pp"] > 1 else "1f1b"
    chunks = 1 if schedule in ("1f1b", "gpipe") else 2
    has_experts = any(isinstance(kind.mlp, Experts) for kind in model.kinds)
    structure = Structure(
        zero=zero, reshard=rng.random() < 0.8, tensor="sequence", recompute=rng.choice(("none", "selective", "full")),
        schedule=schedule, virtual_stages=chunks, cp_kind=rng.choice(("ring", "allgather", "ulysses")),
    )  # fmt: skip
    ep = rng.choice((1, 2, 4, 8)) if has_experts else 1
    return Layout(
        **sizes, dp_shard=left, ep=ep, etp=engine.default_etp(sizes["tp"]), micro_batch_size=rng.choice((1, 2)),
        structure=structure,
    )  # fmt: skip


def answered(rng: random.Random, preset: Preset, gpus: int) -> dict[str, Any]:
    """The document of the first layout that is possible, of many at random."""
    model, machine = preset.model(), cluster.load(GPUS[gpus])
    reasons: list[str] = []
    for _ in range(TRIES):
        name = rng.choice(ENGINES)
        at = layout(rng, model, engines.load(name), gpus)
        batch = at.data_ranks * at.micro_batch_size * rng.choice((1, 4, 8))
        job = Job(min(model.max_position_embeddings, rng.choice((1024, 4096))), batch, rng.choice(("bf16", "fp32")))
        try:
            return nanum.predict(model, job, machine, at, engine=name).to_dict()
        except Refused as refused:
            reasons += refused.reasons or ["nothing is said"]
        assert "nothing is said" not in reasons
    pytest.fail(f"{preset.name} on {gpus} GPUs: nothing of {TRIES} layouts is possible: {reasons[-3:]}")


def adds_up(document: dict[str, Any]) -> None:
    for stage in document["memory"]["stages"]:
        assert sum(stage["by_category"].values()) == stage["allocated_peak_bytes"]
        assert min(stage["by_category"].values()) >= 0
    worst = document["memory"]["worst"]
    assert 0 < worst["allocated_bytes"] <= worst["reserved_bytes"] <= worst["device_bytes"]
    time = document["time"]
    parts = ("compute_seconds", "exposed_communication_seconds", "bubble_seconds", "optimizer_seconds")
    assert sum(time[part] for part in parts) == pytest.approx(time["step_seconds"], rel=1e-9)
    assert 0 < document["throughput"]["mfu"] < 1
    for row in document["communication"]:
        assert row["calls"] > 0
        assert row["axis"]
        assert 0 <= row["wire_bytes"] <= 2 * row["payload_bytes"] or row["kind"] == "permute"


@pytest.mark.parametrize("gpus", GPUS)
def test_some_presets_are_predicted(gpus: int) -> None:
    """One of each family, each on two of the four clusters."""
    families = {preset.family: preset for preset in presets()}
    for preset in list(families.values())[list(GPUS).index(gpus) % 2 :: 2]:
        adds_up(answered(random.Random(f"{preset.name} {gpus}"), preset, gpus))


@pytest.mark.slow
@pytest.mark.parametrize("gpus", GPUS)
def test_all_presets_are_predicted(gpus: int) -> None:
    for preset in presets():
        for seed in range(3):
            adds_up(answered(random.Random(f"{preset.name} {gpus} {seed}"), preset, gpus))
