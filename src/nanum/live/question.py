"""What a run is asked, as JSON brings it: the nouns, and how long to train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanum.job import Job
from nanum.layout import Layout
from nanum.model import Model
from nanum.model.document import from_document


@dataclass(frozen=True)
class Question:
    """`steps` of training; `bucket_cap_mb` is DDP's, in MiB (None: PyTorch's own)."""

    model: Model
    job: Job
    layout: Layout
    stage_layers: tuple[int, ...]  # how many each pipeline stage has, as the engine lays them out
    name: str = ""
    steps: int = 4
    bucket_cap_mb: float | None = None
    seed: int = 0
    checks: bool = True  # else steps are only timed: nothing is counted, and no reference is run
    bf16_exchange: bool = False  # DDP exchanges gradients in bf16, whatever they are in (a compression hook)

    @property
    def mesh(self) -> dict[str, int]:
        """Axes of more than one rank, outermost first; or all of experts' own, in place of those that they regroup."""
        own = self.layout.structure.own_experts
        sizes = self.layout.expert_sizes if own else self.layout.sizes
        return {axis: size for axis, size in sizes.items() if size > 1 or (own and axis in ("edp", "ep"))}

    @property
    def num_microbatches(self) -> int:
        return int(self.job.num_microbatches(self.layout.micro_batch_size, self.layout.data_ranks))

    def layers(self, stage: int) -> range:
        """The layers of a pipeline stage."""
        start = sum(self.stage_layers[:stage])
        return range(start, start + self.stage_layers[stage])


def read(document: Mapping[str, Any]) -> Question:
    given = ("name", "steps", "bucket_cap_mb", "seed", "checks", "bf16_exchange")
    others = {key: document[key] for key in given if key in document}
    layers = tuple(document["stage_layers"])
    model, layout = from_document(document["model"]), Layout.from_document(document["layout"])
    return Question(model, Job.from_document(document["job"]), layout, layers, **others)
