"""What makes a way of sending tokens to experts impossible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from nanum.cluster import Cluster
from nanum.job import Job
from nanum.layout import Dispatcher, Layout
from nanum.model import Experts, Model
from nanum.rules.rule import Rule


def sharing_a_node(layout: Layout, gpus_per_node: int) -> Any:
    """Of each group of ep, the ranks that share a node: as many on each of its nodes."""
    sizes = list(layout.expert_sizes.items())
    last = max(i for i, (axis, _) in enumerate(sizes) if axis == "etp")
    inside: Any = layout.etp
    for _, size in sizes[last + 1 :]:
        inside = inside * size
    inside = np.maximum(inside, 1)
    fits = np.maximum(gpus_per_node // inside, 1)
    return np.gcd(np.maximum(layout.ep, 1), np.where(gpus_per_node % inside == 0, fits, 1))


def on_nodes(layout: Layout, gpus_per_node: int) -> Layout:
    """One layout with what it says of nodes, which are a cluster's."""
    if layout.structure.dispatcher != "flex":
        return layout
    return replace(layout, ep_intra=int(sharing_a_node(layout, gpus_per_node)))


def _flex(layout: Layout) -> bool:
    return layout.structure.dispatcher == "flex"


def _fp8(layout: Layout) -> bool:
    return layout.structure.dispatch_dtype == "fp8"


def _wrong_groups(model: Model, job: Job, layout: Layout) -> str | None:
    """What is wrong with the groups of experts that a token is sent to, in words."""
    for e in (layer.mlp for layer in model.kinds if isinstance(layer.mlp, Experts)):
        stated = job.routing.groups > 0
        if not stated and not _flex(layout):  # a model's own groups change nothing else
            continue
        groups, topk = (job.routing.groups, job.routing.group_topk) if stated else (e.groups, e.group_topk)
        if e.num_experts % groups:
            return f"router_groups={groups} does not divide num_experts={e.num_experts}"
        if not 1 <= topk <= min(groups, e.num_experts_per_tok):
            return (
                f"router_group_topk={topk}: a token is sent to 1 to {min(groups, e.num_experts_per_tok)} of {groups} "
                f"groups, with num_experts_per_tok={e.num_experts_per_tok}"
            )
        if topk * (e.num_experts // groups) < e.num_experts_per_tok:
            return (
                f"router_group_topk={topk} of router_groups={groups} have {topk * (e.num_experts // groups)} experts, "
                f"fewer than num_experts_per_tok={e.num_experts_per_tok}"
            )
    return None


NO_GROUPS = Rule(
    "groups of a router without experts",
    lambda model, job, cluster, layout: (
        job.routing.groups > 0 and not any(isinstance(layer.mlp, Experts) for layer in model.kinds)
    ),
    lambda model, job, cluster, layout: f"router_groups={job.routing.groups}, but {model.name} has no experts",
)
GROUPS = Rule(
    "groups that a router cannot choose from",
    lambda model, job, cluster, layout: _wrong_groups(model, job, layout) is not None,
    lambda model, job, cluster, layout: str(_wrong_groups(model, job, layout)),
)
UNSPREAD = Rule(
    "tokens through nodes to experts that are not spread",
    lambda model, job, cluster, layout: _flex(layout) and layout.ep == 1,
    lambda model, job, cluster, layout: "--dispatcher flex sends tokens to other ranks' experts: it needs --ep over 1",
)
NODES = Rule(
    "other ranks of ep share a node than a layout says",
    lambda model, job, cluster, layout: (
        _flex(layout) and layout.ep_intra != sharing_a_node(layout, cluster.gpus_per_node)
    ),
    lambda model, job, cluster, layout: (
        f"ep_intra={layout.ep_intra}, but {sharing_a_node(layout, cluster.gpus_per_node)} of the ranks of "
        f"ep={layout.ep} share a node of {cluster.name}, where --dispatcher flex sends a token but once"
    ),
)
PARTS = Rule(
    "tokens through nodes to parts of experts",
    lambda model, job, cluster, layout: _flex(layout) and layout.etp > 1,
    lambda model, job, cluster, layout: (
        f"etp={layout.etp} with --dispatcher flex is not modelled: use --etp 1, or --dispatcher alltoall"
    ),
)
DROPPED = Rule(
    "tokens through nodes to experts of a capacity",
    lambda model, job, cluster, layout: job.routing.capacity is not None and _flex(layout),
    lambda model, job, cluster, layout: (
        "--expert-capacity with --dispatcher flex is not modelled: use --dispatcher alltoall"
    ),
)
BY_SLOTS_IN_FP8 = Rule(
    "slots in fp8",
    lambda model, job, cluster, layout: _fp8(layout) and not _flex(layout),
    lambda model, job, cluster, layout: "--dispatch-dtype fp8 is of --dispatcher flex",
)

OF_DISPATCH = (NO_GROUPS, GROUPS, UNSPREAD, NODES, PARTS, DROPPED, BY_SLOTS_IN_FP8)


def dispatcher_rule(engine: str, dispatchers: tuple[Dispatcher, ...]) -> Rule:
    """Refuses the dispatchers that an engine does not have, or that are not modelled of it."""
    return Rule(
        f"{engine} has no such dispatcher",
        lambda model, job, cluster, layout: layout.structure.dispatcher not in dispatchers,
        lambda model, job, cluster, layout: (
            f"--dispatcher {layout.structure.dispatcher} is not modelled for {engine}: megatron has it"
        ),
    )


def fp8_dispatch_rule(engine: str, broken: Callable[[Job], bool], why: str) -> Rule:
    """Refuses tokens that are sent in fp8."""

    def refused(model: Model, job: Job, cluster: Cluster, layout: Layout) -> bool:
        return _fp8(layout) and _flex(layout) and broken(job)

    return Rule(
        f"tokens in fp8 ({engine})",
        refused,
        lambda model, job, cluster, layout: f"--dispatch-dtype fp8: {why} ({engine})",
    )
