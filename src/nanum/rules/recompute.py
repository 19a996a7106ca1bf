"""What makes a recompute impossible: of some layers, or of modules that are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

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
CHUNKS = Rule(
    "recompute_every or recompute_chunk is not a number of layers that full recompute could take",
    lambda model, job, cluster, layout: not all(_counts(layout, n) for n in _strides(layout).values()),
    lambda model, job, cluster, layout: (
        f"{_said(layout)} with recompute={layout.structure.recompute}: layers of a full recompute, whole numbers of at "
        "least 1"
    ),
)
ONE_WAY = Rule(
    "several ways to recompute some layers",
    lambda model, job, cluster, layout: (layout.structure.recompute_layers != 0) + len(_uncommon(layout)) > 1,
    lambda model, job, cluster, layout: (
        f"recompute_layers={layout.structure.recompute_layers} with {_said(layout)}: choose one of them"
    ),
)
ONE_SIZE = Rule(
    "a chunk of layers of several sizes",
    lambda model, job, cluster, layout: layout.structure.in_chunks and len({_size(kind) for kind in model.kinds}) > 1,
    lambda model, job, cluster, layout: (
        f"recompute_chunk={layout.structure.recompute_chunk}: {model.name} has layers of several sizes, and chunks of "
        "such are not modelled"
    ),
)
OF_RECOMPUTE = (LAYERS, MODULES, CHUNKS, ONE_WAY, ONE_SIZE)


def _layers_fit(layout: Layout) -> bool:
    count = layout.structure.recompute_layers
    return is_whole(count) and (count == 0 or (count > 0 and layout.structure.recompute == "full"))


def _strides(layout: Layout) -> dict[str, Any]:
    return {"every": layout.structure.recompute_every, "chunk": layout.structure.recompute_chunk}


def _uncommon(layout: Layout) -> dict[str, Any]:
    return {name: n for name, n in _strides(layout).items() if n != 1}


def _said(layout: Layout) -> str:
    return " and ".join(f"recompute_{name}={n}" for name, n in _uncommon(layout).items())


def _counts(layout: Layout, count: Any) -> bool:
    return is_whole(count) and (count == 1 or (count > 1 and layout.structure.recompute == "full"))


def _size(kind: Layer) -> tuple[Any, ...]:
    """What tensors of a layer are as large as."""
    a = kind.attention
    return type(a), a.num_attention_heads, a.num_key_value_heads, a.head_dim, type(kind.mlp), kind.widths


SomeLayers = Literal["first", "every", "chunk"]
"""Full recompute of the first layers of a stage, of every n-th, or of several at once."""
HAS: dict[SomeLayers, str] = {
    "first": "megatron (--recompute-method block) and torch have it",
    "every": "torch has it, and torchtitan had it until 0.2.2 (selective_ac_option)",
    "chunk": "megatron (--recompute-method uniform) and torch have it",
}
FLAGS: dict[SomeLayers, str] = {"first": "layers", "every": "every", "chunk": "chunk"}


def _number(layout: Layout, way: SomeLayers) -> Any:
    s = layout.structure
    return {"first": s.recompute_layers, "every": s.recompute_every, "chunk": s.recompute_chunk}[way]


def _some_layers_rule(engine: str, way: SomeLayers) -> Rule:
    return Rule(
        f"{engine} recomputes no such layers alone ({way})",
        lambda model, job, cluster, layout: _number(layout, way) != (0 if way == "first" else 1),
        lambda model, job, cluster, layout: (
            f"--recompute-{FLAGS[way]} {_number(layout, way)} is not in {engine}, which recomputes all layers or none; "
            f"{HAS[way]}"
        ),
    )


def _gathering_rule(engine: str) -> Rule:
    """Refuses chunks whose weights are gathered: each layer's once more as a chunk is run again."""
    return Rule(
        f"chunks of layers whose weights are gathered ({engine})",
        lambda model, job, cluster, layout: layout.structure.in_chunks and layout.structure.zero >= 2,
        lambda model, job, cluster, layout: (
            f"--recompute-chunk {layout.structure.recompute_chunk} with zero={layout.structure.zero}: what is gathered "
            f"again as a chunk is run again is not modelled: use --zero 0 or 1 ({engine})"
        ),
    )


def recompute_rules(engine: str, modules: tuple[str, ...], some: tuple[SomeLayers, ...]) -> tuple[Rule, ...]:
    """Refuses what an engine cannot recompute apart."""

    def unknown(layout: Layout) -> list[str]:
        return [name for name in layout.structure.recompute_modules if name not in modules]

    names = f"it has {', '.join(modules)}" if modules else "it recomputes by none, selective or full"
    ways: tuple[SomeLayers, ...] = get_args(SomeLayers)
    return (
        Rule(
            f"{engine} recomputes no such module",
            lambda model, job, cluster, layout: bool(unknown(layout)),
            lambda model, job, cluster, layout: f"--recompute {','.join(unknown(layout))} is not in {engine}: {names}",
        ),
        *(_some_layers_rule(engine, way) for way in ways if way not in some),
        *((_gathering_rule(engine),) if "chunk" in some else ()),
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
