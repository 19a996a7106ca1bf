"""What makes a division of experts impossible, and of attention that is not by heads of causal keys."""

from __future__ import annotations

from typing import Any

from nanum.cluster import Cluster
from nanum.job import Job
from nanum.layout import AXES, REGROUPED, Layout
from nanum.model import Attention, Experts, LatentAttention, LinearAttention, Model
from nanum.rules.rule import Rule, any_fails, distinct, fails_to_divide


def _experts(model: Model) -> list[Experts]:
    return [layer.mlp for layer in model.kinds if isinstance(layer.mlp, Experts)]


def _counts(model: Model) -> list[int]:
    return distinct(e.num_experts for e in _experts(model))


def _widths(model: Model) -> list[int]:
    return distinct(e.expert.intermediate_size for e in _experts(model))


def _regrouped(layout: Layout) -> Any:
    return layout.dp_shard * layout.cp * layout.tp


def _parts(layout: Layout) -> Any:
    """Ranks that divide one expert."""
    return layout.etp if layout.structure.own_experts else layout.tp


def _neighbours(layout: Layout) -> bool:
    order = [axis for axis in layout.rank_order if axis in AXES]
    places = [order.index(axis) for axis in REGROUPED if axis in order]
    return places == list(range(min(places, default=0), min(places, default=0) + len(REGROUPED)))


NO_EXPERTS = Rule(
    "a division of experts without experts",
    lambda model, job, cluster, layout: ((layout.ep > 1) | layout.structure.own_experts) & (not _experts(model)),
    lambda model, job, cluster, layout: (
        f"{f'ep={layout.ep}' if layout.ep > 1 else f'etp={layout.etp}'}, but {model.name} has no experts"
    ),
)
EXPERTS = Rule(
    "ep does not divide num_experts",
    lambda model, job, cluster, layout: any_fails(layout.ep, _counts(model)),
    lambda model, job, cluster, layout: (
        f"ep={layout.ep} does not divide num_experts="
        f"{next(count for count in _counts(model) if fails_to_divide(layout.ep, count))}"
    ),
)
RANKS = Rule(
    "ep times etp does not divide dp_shard times cp times tp",
    lambda model, job, cluster, layout: (
        fails_to_divide(layout.ep * layout.etp, _regrouped(layout)) & layout.structure.own_experts
    ),
    lambda model, job, cluster, layout: (
        f"ep·etp={layout.ep}·{layout.etp}={layout.ep * layout.etp} does not divide "
        f"dp_shard·cp·tp={_regrouped(layout)}: experts are spread over those ranks"
    ),
)
WIDTHS = Rule(
    "tensor parallel does not divide an expert's intermediate_size",
    lambda model, job, cluster, layout: any_fails(_parts(layout), _widths(model)),
    lambda model, job, cluster, layout: (
        f"{'etp' if layout.structure.own_experts else 'tp'}={_parts(layout)} does not divide an expert's "
        f"intermediate_size={next(width for width in _widths(model) if fails_to_divide(_parts(layout), width))}"
    ),
)
TOKENS = Rule(
    "expert parallel beside tensor parallel without sequence parallel",
    lambda model, job, cluster, layout: layout.structure.own_experts and layout.structure.tensor == "tensor",
    lambda model, job, cluster, layout: (
        f"ep={layout.ep} and tp={layout.tp} without sequence parallel: each rank of tp would send the same tokens; "
        "leave out --no-sp"
    ),
)
ORDER = Rule(
    "a rank order that keeps apart what experts regroup",
    lambda model, job, cluster, layout: layout.structure.own_experts and not _neighbours(layout),
    lambda model, job, cluster, layout: (
        f"rank_order={','.join(layout.rank_order)}: with experts of their own mesh, dp_shard, cp and tp must follow "
        "one another"
    ),
)


def _sees_all(a: Attention | LatentAttention | LinearAttention) -> bool:
    return isinstance(a, Attention) and not a.causal


def _too_uneven(model: Model, job: Job, cluster: Cluster, layout: Layout) -> Any:
    return (layout.ep > 1) & (job.expert_imbalance > layout.ep)


IMBALANCE = Rule(
    "more slots than there are on the fullest rank of ep",
    _too_uneven,
    lambda model, job, cluster, layout: (
        f"expert_imbalance={job.expert_imbalance:g} with ep={layout.ep}: a rank that has all slots has {layout.ep} "
        "times its share"
    ),
)


def _bad_capacity(model: Model, job: Job) -> str | None:
    """What is wrong with the experts' capacity, in words."""
    capacity = job.routing.capacity
    if capacity is None:
        return "padded experts have no capacity to be padded to" if job.routing.padded else None
    if not 0 < capacity < float("inf"):
        return f"expert_capacity={capacity:g}: slots of an expert over its even share, over 0"
    if not _experts(model):
        return f"expert_capacity={capacity:g}, but {model.name} has no experts"
    every = min(e.num_experts / e.num_experts_per_tok for e in _experts(model))
    if capacity > every:
        return f"expert_capacity={capacity:g}: an expert that has every token has {every:g} times its even share"
    return None


CAPACITY = Rule(
    "a capacity that experts cannot have",
    lambda model, job, cluster, layout: _bad_capacity(model, job) is not None,
    lambda model, job, cluster, layout: str(_bad_capacity(model, job)),
)


def capacity_rule(engine: str) -> Rule:
    """Refuses a capacity of experts where an engine drops no token."""
    return Rule(
        f"{engine} drops no token",
        lambda model, job, cluster, layout: job.routing.capacity is not None,
        lambda model, job, cluster, layout: (
            f"--expert-capacity {job.routing.capacity:g} is not for {engine}, whose experts take all that is sent to "
            "them: megatron has it"
        ),
    )


def _latent(model: Model) -> bool:
    return any(isinstance(layer.attention, LatentAttention) for layer in model.kinds)


def _rings(model: Model, job: Job, cluster: Cluster, layout: Layout) -> Any:
    return (layout.cp > 1) & (layout.structure.cp_kind == "ring") & _latent(model)


LATENT_RING = Rule(
    "latent attention by a ring",
    _rings,
    lambda model, job, cluster, layout: (
        f"cp={layout.cp} by a ring is not modelled for latent attention, whose keys and values differ in size: "
        "choose --cp-kind allgather or ulysses"
    ),
)

LINEAR_CONTEXT = Rule(
    "linear attention over context-parallel ranks",
    lambda model, job, cluster, layout: (
        (layout.cp > 1) & any(isinstance(layer.attention, LinearAttention) for layer in model.kinds)
    ),
    lambda model, job, cluster, layout: (
        f"cp={layout.cp} would pass the state of {model.name}'s linear attention from rank to rank: not modelled"
    ),
)

ENCODER_CONTEXT = Rule(
    "attention in both directions over context-parallel ranks",
    lambda model, job, cluster, layout: (layout.cp > 1) & any(_sees_all(layer.attention) for layer in model.kinds),
    lambda model, job, cluster, layout: (
        f"cp={layout.cp} is modelled for causal attention, and {model.name} sees the tokens that follow"
    ),
)

OF_EXPERTS = (
    NO_EXPERTS,
    EXPERTS,
    RANKS,
    WIDTHS,
    TOKENS,
    ORDER,
    IMBALANCE,
    LATENT_RING,
    LINEAR_CONTEXT,
    ENCODER_CONTEXT,
)
