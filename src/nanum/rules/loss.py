"""What makes a loss impossible that has not all logits at once."""

from __future__ import annotations

from typing import Any

from nanum.cluster import Cluster
from nanum.job import Job
from nanum.layout import Layout, Loss
from nanum.model import Model
from nanum.rules.rule import Rule, is_whole


def _rows(job: Job, layout: Layout) -> Any:
    """Of a sequence, on one rank."""
    return job.seq_len // (layout.cp + (layout.cp < 1))


def _whole(layout: Layout) -> bool:
    return is_whole(layout.structure.loss_chunks) and layout.structure.loss_chunks >= 1


def _cut_short(model: Model, job: Job, cluster: Cluster, layout: Layout) -> Any:
    return (
        layout.structure.loss == "chunked" and _whole(layout) and _rows(job, layout) % layout.structure.loss_chunks != 0
    )


CHUNKS = Rule(
    "loss_chunks is not a whole number of at least 1",
    lambda model, job, cluster, layout: not _whole(layout),
    lambda model, job, cluster, layout: (
        f"loss_chunks={layout.structure.loss_chunks} is not a whole number of at least 1"
    ),
)
EVEN_CHUNKS = Rule(
    "the chunks of a loss do not divide a rank's part of a sequence",
    _cut_short,
    lambda model, job, cluster, layout: (
        f"loss_chunks={layout.structure.loss_chunks} does not divide the {_rows(job, layout)} tokens of a sequence "
        "that a rank has, and chunks are alike"
    ),
)
WHOLE_HEAD = Rule(
    "a fused linear cross-entropy beside tensor parallelism",
    lambda model, job, cluster, layout: (layout.structure.loss == "fused") & (layout.tp > 1),
    lambda model, job, cluster, layout: (
        f"--loss fused with tp={layout.tp}: Liger's kernel takes the head's whole matrix, and has no "
        "vocabulary-parallel loss"
    ),
)
NO_BIAS = Rule(
    "a fused linear cross-entropy of a head with a bias",
    lambda model, job, cluster, layout: layout.structure.loss == "fused" and model.head_bias,
    lambda model, job, cluster, layout: f"--loss fused is not modelled for a head with a bias, as {model.name} has it",
)
OF_LOSS = (CHUNKS, EVEN_CHUNKS, WHOLE_HEAD, NO_BIAS)

HAS = {
    "chunked": "torchtitan (ChunkedLossWrapper) has it, and plain torch",
    "fused": "accelerate and plain torch take Liger's kernel",
}


def loss_rule(engine: str, losses: tuple[Loss, ...]) -> Rule:
    """Refuses the losses that an engine does not have."""
    return Rule(
        f"{engine} has no such loss",
        lambda model, job, cluster, layout: layout.structure.loss not in losses,
        lambda model, job, cluster, layout: (
            f"--loss {layout.structure.loss} is not in {engine}: {HAS.get(layout.structure.loss, 'no engine has it')}"
        ),
    )
