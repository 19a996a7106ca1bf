"""What a picture's rows make impossible: as many as there are patches and a class token, and all on one rank."""

from __future__ import annotations

from typing import Any

from nanum.cluster import Cluster
from nanum.job import Job
from nanum.layout import Layout
from nanum.model import Model, Patches
from nanum.rules.rule import Rule, is_whole


def _as_long(model: Model, job: Job, cluster: Cluster, layout: Layout) -> Any:
    return model.patches is not None and is_whole(job.seq_len) and job.seq_len != model.patches.seq_len


def _said(p: Patches | None) -> str:
    assert p is not None
    return f"{p.seq_len}: the class token and {p.count} patches of {p.patch_size} x {p.patch_size} pixels"


SEQUENCE = Rule(
    "a picture has another number of patches",
    _as_long,
    lambda model, job, cluster, layout: (
        f"seq_len={job.seq_len}, but a picture of {model.name} has {_said(model.patches)}"
    ),
)
WHOLE = Rule(
    "a picture's rows are not split between ranks",
    lambda model, job, cluster, layout: (
        model.patches is not None and ((layout.cp > 1) | ((layout.tp > 1) & (layout.structure.tensor == "sequence")))
    ),
    lambda model, job, cluster, layout: (
        f"{f'cp={layout.cp}' if layout.cp > 1 else 'sequence parallel'} splits the rows of a sequence, and those of "
        f"{model.name} are {_said(model.patches)}, which is not modelled in parts: "
        + ("leave out --cp" if layout.cp > 1 else "add --no-sp")
    ),
)
LOSS = Rule(
    "a loss in chunks of a row for each picture",
    lambda model, job, cluster, layout: model.patches is not None and layout.structure.loss != "full",
    lambda model, job, cluster, layout: (
        f"--loss {layout.structure.loss} is of a vocabulary's logits: {model.name} has one row of them for each picture"
    ),
)
OF_PICTURES_JOB = (SEQUENCE,)
OF_PICTURES = (WHOLE, LOSS)
