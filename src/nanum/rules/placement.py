"""What makes a cut of the layers into stages impossible."""

from __future__ import annotations

from typing import Any

from nanum.layout import TWO_WAY, V_SHAPED, Layout
from nanum.model import Model
from nanum.rules.rule import Rule, is_whole

MOST = 2**20


def _said(layout: Layout) -> list[str]:
    s = layout.structure
    of_layers = {"first-stage-layers": s.first_stage_layers, "last-stage-layers": s.last_stage_layers}
    of_ends = {"embedding-weight": s.embedding_weight, "head-weight": s.head_weight}
    return [f"--{name} {n}" for name, n in of_layers.items() if n] + [
        f"--{name} {n}" for name, n in of_ends.items() if n is not None
    ]


def _small(layout: Layout) -> bool:
    s = layout.structure
    sizes = (s.first_stage_layers, s.last_stage_layers, s.embedding_weight or 0, s.head_weight or 0)
    return all(is_whole(n) and 0 <= n <= MOST for n in sizes)


def _words(layout: Layout) -> str:
    return " and ".join(_said(layout))


OF_PLACEMENT = (
    Rule(
        "what ends of a pipeline have or weigh is not a whole number",
        lambda model, job, cluster, layout: not _small(layout),
        lambda model, job, cluster, layout: f"{_words(layout)}: must be a whole number of layers",
    ),
    Rule(
        "layers of an end, and what ends weigh",
        lambda model, job, cluster, layout: layout.structure.sets_stages and layout.structure.weighs_ends,
        lambda model, job, cluster, layout: (
            f"{_words(layout)}: either the layers of a stage are said, or what the ends weigh"
        ),
    ),
    Rule(
        "ends of a pipeline that is none",
        lambda model, job, cluster, layout: (layout.pp == 1) & bool(_said(layout)),
        lambda model, job, cluster, layout: f"{_words(layout)} needs pp > 1",
    ),
    Rule(
        "layers of a rank whose stages go back up",
        lambda model, job, cluster, layout: (
            layout.structure.sets_stages and layout.structure.schedule in (*V_SHAPED, *TWO_WAY)
        ),
        lambda model, job, cluster, layout: (
            f"{_words(layout)} with schedule={layout.structure.schedule}: its ranks have stages from both ends"
        ),
    ),
    Rule(
        "the ends of a pipeline leave other stages too few layers",
        lambda model, job, cluster, layout: (
            _small(layout) and layout.structure.sets_stages and _left_over(model, layout)
        ),
        lambda model, job, cluster, layout: (
            f"{_words(layout)} of num_hidden_layers={model.num_hidden_layers} leave "
            f"{model.num_hidden_layers - _ends(layout)} for {_others(layout)} other ranks"
        ),
    ),
)  # fmt: skip


def _ends(layout: Layout) -> int:
    return layout.structure.first_stage_layers + layout.structure.last_stage_layers


def _others(layout: Layout) -> Any:
    s = layout.structure
    return layout.pp - (s.first_stage_layers > 0) - (s.last_stage_layers > 0)


def _left_over(model: Model, layout: Layout) -> Any:
    """Is nothing, or less than nothing, left for the others; or something for none?"""
    left, others = model.num_hidden_layers - _ends(layout), _others(layout)
    return (layout.pp > 1) & ((left < others) | ((others == 0) & (left != 0)))


def placement_rules(engine: str, *, sets_stages: bool, weighs_ends: str) -> tuple[Rule, ...]:
    """Refuses to set the layers of an end, or what ends weigh, where an engine has no flag for it: `weighs_ends` is
    why.
    """
    return (
        Rule(
            f"{engine} sets no stage's layers",
            lambda model, job, cluster, layout: layout.structure.sets_stages and not sets_stages,
            lambda model, job, cluster, layout: f"{_words(layout)} is not in {engine}: megatron and torch have it",
        ),
        Rule(
            f"{engine} weighs no ends",
            lambda model, job, cluster, layout: layout.structure.weighs_ends and bool(weighs_ends),
            lambda model, job, cluster, layout: f"{_words(layout)} is not in {engine}: {weighs_ends}",
        ),
    )
