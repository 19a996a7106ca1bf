"""What is run: a model, a job and a layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from nanum.engines.engine import Engine
from nanum.job import Job
from nanum.layout import Layout
from nanum.model import Attention, Experts, LatentAttention, Mlp, Model

STEPS = 4


def not_run(model: Model, layout: Layout) -> list[str]:
    """What of a model the decoder that trains here (`live.decoder`) does not have, or not in such a layout."""
    differs = {
        "norms elsewhere than before each block": model.placement != "pre" or not model.final_norm,
        f"norm {model.norm}": model.norm not in ("layer_norm", "rms_norm"),
        f"positions by {model.position}": model.position == "alibi",
        "an embedding with a norm or a projection": model.embedding_norm or model.embedding_size is not None,
        "a head with a bias": model.head_bias,
        "rows of positions that are not used": model.unused_positions > 0,
        "a feed-forward block by relu": any(m.activation.startswith("relu") for m in _blocks(model)),
        "attention with a window, norms, gates or parts of its own": not all(map(_plain, _attentions(model))),
        "latent attention whose values are not as wide as its keys": not all(map(_even, _attentions(model))),
        "experts with biases, or a shared one with a gate": not all(map(_simple, _mixtures(model))),
    }
    found = [f"{model.name} has {what}, which is not run here" for what, so in differs.items() if so]
    kinds = {
        "experts": bool(_mixtures(model)),
        "latent attention": any(isinstance(a, LatentAttention) for a in _attentions(model)),
    }
    axes = [f"{axis}={size}" for axis in ("tp", "cp", "etp") if (size := _size(layout, axis)) > 1]
    return [
        *found,
        *(
            f"{model.name} has {what}, which is not run with {', '.join(axes)}"
            for what, so in kinds.items()
            if so and axes
        ),
    ]


def _size(layout: Layout, axis: str) -> int:
    return int(getattr(layout, axis)) if axis != "etp" or layout.structure.own_experts else 1


def _attentions(model: Model) -> list[Attention | LatentAttention]:
    return [kind.attention for kind in model.kinds]


def _mixtures(model: Model) -> list[Experts]:
    return [kind.mlp for kind in model.kinds if isinstance(kind.mlp, Experts)]


def _blocks(model: Model) -> list[Mlp]:
    """Every feed-forward block, an expert's among them."""
    dense = [kind.mlp for kind in model.kinds if isinstance(kind.mlp, Mlp)]
    of_experts = [block for e in _mixtures(model) for block in (e.expert, e.shared) if block is not None]
    return [*dense, *of_experts]


def _plain(a: Attention | LatentAttention) -> bool:
    if isinstance(a, LatentAttention):
        return a.dropout == 0.0
    plain = Attention(a.num_attention_heads, a.num_key_value_heads, a.head_dim)
    return replace(a, qkv_bias=False, output_bias=False, dropout=0.0) == plain


def _even(a: Attention | LatentAttention) -> bool:
    """PyTorch's flash kernel of CPUs has one size for all of a head."""
    return not isinstance(a, LatentAttention) or a.v_head_dim == a.head_dim


def _simple(e: Experts) -> bool:
    return not (e.expert.bias or e.router_bias or e.shared_gate)


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
            "stage_layers": [int(engine.layers(self.model, stages, i)) for i in range(stages)],
            "name": self.name,
            "steps": self.steps,
            "bucket_cap_mb": self.bucket_cap_mb,
        }
