"""What is run: a model, a job and a layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import Layout
from nanum.model import Attention, Experts, LatentAttention, LinearAttention, Model

STEPS = 4


def not_run(model: Model, job: Job, layout: Layout) -> list[str]:
    """What of a model the decoder that trains here (`live.decoder`) does not have, or not in such a layout."""
    attentions = [kind.attention for kind in model.kinds]
    plain = [a for a in attentions if isinstance(a, Attention)]
    latent = [a for a in attentions if isinstance(a, LatentAttention)]
    mixtures = [kind.mlp for kind in model.kinds if isinstance(kind.mlp, Experts)]
    never = {
        f"positions by {model.position}": model.position == "alibi",
        "dropout": any(a.dropout for a in attentions) or model.hidden_dropout > 0,
        f"a window shorter than seq_len={job.seq_len}": any(a.window and a.window < job.seq_len for a in plain),
        "linear attention": any(isinstance(a, LinearAttention) for a in attentions),
        "sinks": any(a.sinks for a in plain),
        "parts of heads that turn in some layers alone": len({a.rotary_dim for a in attentions} - {0}) > 1,
        "latent attention whose values are not as wide as its keys": any(a.v_head_dim != a.head_dim for a in latent),
        "experts with biases, or a shared one with a gate": not all(map(_simple, mixtures)),
    }
    split = {"experts": bool(mixtures), "latent attention": bool(latent)}
    whole = {
        "norms of all heads at once": any(a.qk_norm == "width" for a in plain),
        "a narrow table": model.embedding_size is not None,
        "a layer of the head's own": model.head_transform,
    }
    axes = [f"{axis}={size}" for axis in ("tp", "cp", "etp") if (size := _size(layout, axis)) > 1]
    found = [f"{model.name} has {what}, which is not run here" for what, so in never.items() if so]
    for within, has in ((axes, split), (axes[:1] if _size(layout, "tp") > 1 else [], whole)):
        if within:
            found += [
                f"{model.name} has {what}, which is not run with {', '.join(within)}" for what, so in has.items() if so
            ]
    return found


def _size(layout: Layout, axis: str) -> int:
    return int(getattr(layout, axis)) if axis != "etp" or layout.structure.own_experts else 1


def _simple(e: Experts) -> bool:
    return not (e.expert.bias or e.router_bias or e.shared_gate) and e.expert.activation != "relu2"


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
        stages = self.stages
        return {
            "model": asdict(self.model),
            "job": asdict(self.job),
            "layout": asdict(self.layout),
            "stage_layers": [int(engine.layers(self.model, stages, i, self.layout.structure)) for i in range(stages)],
            "name": self.name,
            "steps": self.steps,
            "bucket_cap_mb": self.bucket_cap_mb,
        }
