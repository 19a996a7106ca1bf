"""What makes a recompute impossible: of some layers, or of modules that are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanum.cluster import Cluster
from nanum.job import Job
from nanum.layout import Layout
from nanum.model import Experts, LatentAttention, Layer, Model
from nanum.rules.rule import Rule, is_whole

LAYERS = Rule(
    "recompute_layers is not a number of layers that full recompute could take",
    lambda model, job, cluster, layout: not _layers_fit(layout),
    lambda model, job, cluster, layout: (
        f"recompute_layers={layout.structure.recompute_layers} with recompute={layout.structure.recompute}: it is how "
        "many layers of a stage full recompute takes, a whole number of at least 1"
    ),
)
MODULES = Rule(
    "recompute of modules is selective",
    lambda model, job, cluster, layout: (
        bool(layout.structure.recompute_modules) and layout.structure.recompute != "selective"
    ),
    lambda model, job, cluster, layout: (
        f"recompute={layout.structure.recompute} with recompute_modules="
        f"{','.join(layout.structure.recompute_modules)}: modules are named to a selective recompute"
    ),
)
OF_RECOMPUTE = (LAYERS, MODULES)


def _layers_fit(layout: Layout) -> bool:
    count = layout.structure.recompute_layers
    return is_whole(count) and (count == 0 or (count > 0 and layout.structure.recompute == "full"))


def recompute_rules(engine: str, modules: tuple[str, ...], some_layers: bool) -> tuple[Rule, ...]:
    """Refuses what an engine cannot recompute apart."""

    def unknown(layout: Layout) -> list[str]:
        return [name for name in layout.structure.recompute_modules if name not in modules]

    names = f"it has {', '.join(modules)}" if modules else "it recomputes by none, selective or full"
    return (
        Rule(
            f"{engine} recomputes no such module",
            lambda model, job, cluster, layout: bool(unknown(layout)),
            lambda model, job, cluster, layout: f"--recompute {','.join(unknown(layout))} is not in {engine}: {names}",
        ),
        Rule(
            f"{engine} recomputes all layers or none",
            lambda model, job, cluster, layout: layout.structure.partly and not some_layers,
            lambda model, job, cluster, layout: (
                f"--recompute-layers {layout.structure.recompute_layers} is not in {engine}, which recomputes all "
                "layers or none; megatron and torch have it"
            ),
        ),
    )


def module_rule(name: str, has: Callable[[Layer], bool], why: str) -> Rule:
    """Refuses a module that no layer of the model has."""

    def lacks(model: Model, job: Job, cluster: Cluster, layout: Layout) -> Any:
        return name in layout.structure.recompute_modules and not any(map(has, model.kinds))

    return Rule(
        f"no {name} to recompute",
        lacks,
        lambda model, job, cluster, layout: f"--recompute {name}: {model.name} {why}",
    )


def has_experts(layer: Layer) -> bool:
    return isinstance(layer.mlp, Experts)


def has_shared_experts(layer: Layer) -> bool:
    return isinstance(layer.mlp, Experts) and layer.mlp.shared is not None


def has_latent_attention(layer: Layer) -> bool:
    return isinstance(layer.attention, LatentAttention)
