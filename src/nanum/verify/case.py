"""What is run: a model, a job and a layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import Layout
from nanum.model import Attention, Mlp, Model

STEPS = 4


def not_run(model: Model) -> list[str]:
    """What of a model the decoder that trains here (`live.decoder`) does not have."""
    a, mlp = model.attention, model.mlp
    plain = Attention(a.num_attention_heads, a.num_key_value_heads, a.head_dim)
    differs = {
        "layers of several kinds": len(model.kinds) > 1,
        "experts": not isinstance(mlp, Mlp),
        "norms elsewhere than before each block": model.placement != "pre" or not model.final_norm,
        f"norm {model.norm}": model.norm not in ("layer_norm", "rms_norm"),
        f"positions by {model.position}": model.position == "alibi",
        "an embedding with a norm or a projection": model.embedding_norm or model.embedding_size is not None,
        "a head with a bias": model.head_bias,
        "rows of positions that are not used": model.unused_positions > 0,
        "a feed-forward block by relu": isinstance(mlp, Mlp) and mlp.activation.startswith("relu"),
        "attention with a window, norms, gates or parts of its own": not isinstance(a, Attention)
        or replace(a, qkv_bias=False, output_bias=False, dropout=0.0) != plain,
    }
    return [f"{model.name} has {what}, which is not run here" for what, so in differs.items() if so]


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
