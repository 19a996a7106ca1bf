"""Steps of a tiny model, divided in each way: hardly anything is computed or sent, so most of it is the host's work."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.live.pulse import Pulse
from nanum.live.question import Question
from nanum.live.supervisor import run_ranks
from nanum.model import Attention, Mlp, Model

TINY = Model(
    "tiny", 64, 256, 4, 64, Attention(2, 2, 32), Mlp(128, True, "silu"), "rms_norm", "rotary", tie_word_embeddings=False
)  # fmt: skip
JOB = Job(32, 2, "fp32")
WARM_UP = 4

WAYS = {
    "alone": Layout(micro_batch_size=2, structure=Structure(zero=0)),
    "unit": Layout(dp_shard=2, structure=Structure(zero=3)),
    "bucket": Layout(dp_replicate=2, structure=Structure(zero=0)),
    "redistribution": Layout(tp=2, micro_batch_size=2, structure=Structure(zero=0, tensor="sequence")),
}
"""By the host's work that each shows."""


def framework(quick: bool, patience_seconds: float) -> list[dict[str, Any]]:
    """Median seconds of each way's parts of a step, on the slowest of two ranks, with the nouns that were asked."""
    from nanum.live.worker import run_rank  # imports what of torch trains in parallel: once, before ranks are forked

    found = []
    for work, layout in WAYS.items():
        steps = WARM_UP + (8 if quick else 20)
        asked = Question(TINY, JOB, layout, (TINY.num_hidden_layers,), work, steps, checks=False)

        def entry(rank: int, pulse: Pulse, folder: Path, asked: Question = asked) -> dict[str, Any]:
            (mine,) = run_rank(asked, rank, pulse, folder)
            return mine

        ranks = run_ranks(entry, int(layout.world), patience_seconds=patience_seconds)
        several = [rank["steps"][WARM_UP:] for rank in ranks]
        parts = {
            part: statistics.median(max(step[part] for step in each) for each in zip(*several, strict=True))
            for part in ("backward_seconds", "optimizer_seconds")
        }
        nouns = {"model": asdict(TINY), "job": asdict(JOB), "layout": asdict(layout)}
        found.append({"work": work, **nouns, **parts})
    return found
