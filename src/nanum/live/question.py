"""What a run is asked, as JSON brings it: the nouns, and how long to train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import Attention, Layer, Mlp, Model


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
        """Axes of more than one rank, outermost first."""
        return {axis: size for axis, size in self.layout.sizes.items() if size > 1}

    @property
    def num_microbatches(self) -> int:
        return int(self.job.num_microbatches(self.layout.micro_batch_size, self.layout.data_ranks))

    def layers(self, stage: int) -> range:
        """The layers of a pipeline stage."""
        start = sum(self.stage_layers[:stage])
        return range(start, start + self.stage_layers[stage])


def read(document: Mapping[str, Any]) -> Question:
    model = dict(document["model"])
    model["attention"], model["mlp"] = Attention(**model["attention"]), Mlp(**model["mlp"])
    for name in ("leading", "alternates"):
        model[name] = tuple(Layer(Attention(**kind["attention"]), Mlp(**kind["mlp"])) for kind in model.get(name, ()))
    layout = dict(document["layout"])
    layout["structure"] = Structure(**layout["structure"])
    layout["rank_order"] = tuple(layout["rank_order"])
    given = ("name", "steps", "bucket_cap_mb", "seed", "checks", "bf16_exchange")
    others = {key: document[key] for key in given if key in document}
    layers = tuple(document["stage_layers"])
    return Question(Model(**model), Job(**document["job"]), Layout(**layout), layers, **others)
