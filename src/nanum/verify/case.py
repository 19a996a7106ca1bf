"""What is run: a model, a job and a layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import Layout
from nanum.model import Model

STEPS = 4


@dataclass(frozen=True)
class Case:
    """What is run. `bucket_cap_mb` is DDP's, in MiB (None: PyTorch's own)."""

    name: str
    model: Model
    job: Job
    layout: Layout
    steps: int = STEPS
    bucket_cap_mb: float | None = None

    @property
    def ranks(self) -> int:
        return int(self.layout.world)

    @property
    def stages(self) -> int:
        return int(self.layout.pp * self.layout.structure.virtual_stages)

    def question(self, engine: Engine) -> dict[str, Any]:
        """As `nanum.live.question` reads it."""
        layers = self.model.num_hidden_layers
        return {
            "model": asdict(self.model),
            "job": asdict(self.job),
            "layout": asdict(self.layout),
            "stage_layers": [int(engine.layers_of_stage(layers, self.stages, i)) for i in range(self.stages)],
            "name": self.name,
            "steps": self.steps,
            "bucket_cap_mb": self.bucket_cap_mb,
        }
