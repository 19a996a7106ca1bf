"""What makes a layout impossible, whatever the engine; an engine adds rules of its own in the same form.

A rule reads one layout or, where its sizes are arrays, many at once: `broken` uses plain operators only. A size that is
not a whole number of at least 1 is a reason of its own, and the rules that divide by it hold their tongue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, get_args

from nanum.cluster import Cluster
from nanum.job import Job, Optimizer, Precision
from nanum.layout import (
    AXES,
    ONE_STAGE,
    TWO_WAY,
    V_SHAPED,
    ContextParallel,
    Layout,
    Recompute,
    Schedule,
    TensorParallel,
)
from nanum.model import Experts, Layer, Mlp, Model
from nanum.rules.dispatch import OF_DISPATCH
from nanum.rules.experts import CAPACITY, OF_EXPERTS
from nanum.rules.loss import OF_LOSS
from nanum.rules.mtp import OF_MTP
from nanum.rules.offload import OF_OFFLOAD
from nanum.rules.pictures import OF_PICTURES, OF_PICTURES_JOB
from nanum.rules.placement import OF_PLACEMENT
from nanum.rules.recompute import OF_RECOMPUTE
from nanum.rules.rule import Rule, any_fails, distinct, fails_to_divide, is_whole
from nanum.rules.stacks import OF_STACKS, OF_STACKS_JOB
from nanum.rules.trained import OF_TRAINED, OF_TRAINED_JOB

__all__ = ["GENERAL", "OF_JOB", "OF_LAYOUT", "Rule", "broken"]

MOST_BYTES = 2**62  # byte counts are 64-bit integers; a factor of two is left for sums


def broken(rules: Iterable[Rule], model: Model, job: Job, cluster: Cluster, layout: Layout) -> list[str]:
    """Every reason why one layout is impossible; empty when it is possible."""
    if not all(is_whole(read(job, layout)) for read in SIZES.values()):
        rules = [rule for rule in rules if rule in SIZE_RULES.values()]  # nothing can be computed with such a size
    return [rule.say(model, job, cluster, layout) for rule in rules if rule.broken(model, job, cluster, layout)]


def _size_of_layout(name: str) -> Callable[[Job, Layout], Any]:
    return lambda job, layout: getattr(layout, name)


LAYOUT_SIZES = (*AXES, "ep", "etp", "micro_batch_size")
SIZES: dict[str, Callable[[Job, Layout], Any]] = {
    **{name: _size_of_layout(name) for name in LAYOUT_SIZES},
    "seq_len": lambda job, layout: job.seq_len,
    "global_batch_size": lambda job, layout: job.global_batch_size,
}
CHOICES: dict[str, tuple[Callable[[Job, Layout], Any], tuple[Any, ...]]] = {
    "precision": (lambda job, layout: job.precision, get_args(Precision)),
    "optimizer": (lambda job, layout: job.optimizer, get_args(Optimizer)),
    "zero": (lambda job, layout: layout.structure.zero, (0, 1, 2, 3)),
    "schedule": (lambda job, layout: layout.structure.schedule, get_args(Schedule)),
    "recompute": (lambda job, layout: layout.structure.recompute, get_args(Recompute)),
    "tensor": (lambda job, layout: layout.structure.tensor, get_args(TensorParallel)),
    "cp_kind": (lambda job, layout: layout.structure.cp_kind, get_args(ContextParallel)),
    "attention": (lambda job, layout: layout.structure.attention, ("flash", "eager")),
}


def _size_rule(name: str) -> Rule:
    read = SIZES[name]

    def is_broken(model: Model, job: Job, cluster: Cluster, layout: Layout) -> Any:
        size = read(job, layout)
        return size < 1 if is_whole(size) else True

    def say(model: Model, job: Job, cluster: Cluster, layout: Layout) -> str:
        size = read(job, layout)
        if not is_whole(size):
            return f"{name}={size} is not a whole number"
        return f"{name}={size} is {'zero' if size == 0 else 'negative'}, and must be at least 1"

    return Rule(f"{name} is not a whole number of at least 1", is_broken, say)


def _choice_rule(name: str) -> Rule:
    read, known = CHOICES[name]
    return Rule(
        f"{name} is not modelled",
        lambda model, job, cluster, layout: read(job, layout) not in known,
        lambda model, job, cluster, layout: (
            f"{name}={read(job, layout)} is not modelled (known: {', '.join(str(choice) for choice in known)})"
        ),
    )


def _rates(cluster: Cluster, precision: str) -> bool:
    return precision in cluster.chip.peak_flops_per_second or precision in cluster.chip.best_flops_per_second


def _rough_bytes(model: Model, job: Job, layout: Layout) -> int:
    """More than any byte count of a step: 64 bytes for each activation of the job, eager attention's scores too."""
    heads = max(layer.attention.num_attention_heads for layer in model.kinds)
    widest = max(model.hidden_size, *(_widest(layer) for layer in model.kinds))
    eager = layout.structure.attention == "eager" or model.position == "relative"
    a_layer = 12 * widest + (3 * heads * job.seq_len if eager else 0)
    return 64 * int(job.tokens_per_step) * (model.num_hidden_layers * a_layer + 3 * model.vocab_size)


def _widest(layer: Layer) -> int:
    """The most entries that a tensor of a layer has for each token."""
    width = sum(layer.widths)
    if isinstance(layer.mlp, Experts):
        width = max(width * layer.mlp.num_experts_per_tok, layer.mlp.num_experts)
    return max(layer.attention.num_attention_heads * layer.attention.head_dim, width)


def _product(layout: Layout, *axes: str) -> str:
    """Axes and their sizes, those of 1 left out where others are not: `cp·tp=2·8=16`."""
    used = [axis for axis in axes if getattr(layout, axis) != 1] or list(axes[-1:])
    sizes = [getattr(layout, axis) for axis in used]
    total = f"={prod(sizes)}" if len(used) > 1 else ""
    return f"{'·'.join(used)}={'·'.join(map(str, sizes))}{total}"


def _virtual_stages(layout: Layout) -> str | None:
    """Why a schedule does not have that many stages a rank."""
    schedule, count = layout.structure.schedule, layout.structure.virtual_stages
    if not is_whole(count) or count < 1:
        return f"virtual_stages={count} is not a whole number of at least 1"
    if schedule in ONE_STAGE and count > 1:
        others = ", ".join(name for name in SEVERAL_CHUNKS if name not in TWO_WAY)  # which no engine runs
        return f"schedule={schedule} has one stage a rank, not virtual_stages={count}: use {others}"
    if schedule in (*V_SHAPED, *TWO_WAY) and count != 2 and layout.structure.pipelined:
        return f"schedule={schedule} has two stages a rank, not virtual_stages={count}"
    return None


def _world(layout: Layout) -> Any:
    """Read by the axes' own names: a rank order may name others, and is then a reason of its own."""
    return prod(getattr(layout, axis) for axis in AXES)


SIZE_RULES = {name: _size_rule(name) for name in SIZES}

WORLD = Rule(
    "the axes do not multiply to the GPUs of the cluster",
    lambda model, job, cluster, layout: _world(layout) != cluster.gpus,
    lambda model, job, cluster, layout: (
        f"dp_replicate·dp_shard·cp·tp·pp = {_world(layout)}, but the cluster has {cluster.gpus} GPUs"
    ),
)
RANK_ORDER = Rule(
    "the rank order does not name every axis once",
    lambda model, job, cluster, layout: sorted(layout.rank_order) != sorted(AXES),
    lambda model, job, cluster, layout: (
        f"rank_order={','.join(layout.rank_order)} does not name each of {', '.join(AXES)} once"
    ),
)


def _attention_heads(model: Model) -> list[int]:
    return distinct(layer.attention.num_attention_heads for layer in model.kinds)


def _grouped_heads(model: Model) -> list[int]:
    """Heads of keys, where a layer has fewer of them than of queries: else they are said of the latter."""
    pairs = ((a.num_key_value_heads, a.num_attention_heads) for a in (layer.attention for layer in model.kinds))
    return distinct(keys for keys, queries in pairs if keys != queries)


def _widths(model: Model) -> list[int]:
    return distinct(width for layer in model.kinds for width in _dense_widths(layer))


def _dense_widths(layer: Layer) -> list[int]:
    """Of what tp divides, whatever becomes of experts."""
    shared = layer.mlp if isinstance(layer.mlp, Mlp) else layer.mlp.shared
    return [shared.intermediate_size] if shared else []


def _divides_rule(name: str, sizes: Callable[[Model], list[int]], remark: Callable[[Model], str] | None = None) -> Rule:
    """tp must divide a size of every kind of layer."""

    def is_broken(model: Model, job: Job, cluster: Cluster, layout: Layout) -> Any:
        return any_fails(layout.tp, sizes(model))

    def say(model: Model, job: Job, cluster: Cluster, layout: Layout) -> str:
        size = next(size for size in sizes(model) if fails_to_divide(layout.tp, size))
        return f"tp={layout.tp} does not divide {name}={size}" + (remark(model) if remark else "")

    return Rule(f"tp does not divide {name}", is_broken, say)


HEADS = _divides_rule("num_attention_heads", _attention_heads)
KEY_VALUE_HEADS = _divides_rule(
    "num_key_value_heads", _grouped_heads, lambda model: f" (of num_attention_heads={_attention_heads(model)[0]})"
)
INTERMEDIATE = _divides_rule("intermediate_size", _widths)
SEQUENCE = Rule(
    "tp does not divide seq_len under sequence parallel",
    lambda model, job, cluster, layout: (
        (
            fails_to_divide(layout.tp, job.seq_len)
            | (
                fails_to_divide(layout.cp * layout.tp, job.seq_len)
                & (fails_to_divide(layout.cp, job.seq_len) == 0)  # else said of cp
            )
        )
        & (layout.structure.tensor == "sequence")
    ),
    lambda model, job, cluster, layout: (
        f"{_product(layout, *(() if fails_to_divide(layout.tp, job.seq_len) else ('cp',)), 'tp')} "
        f"does not divide seq_len={job.seq_len}, under sequence parallel"
    ),
)
CONTEXT_SEQUENCE = Rule(
    "cp does not divide seq_len",
    lambda model, job, cluster, layout: fails_to_divide(layout.cp, job.seq_len),
    lambda model, job, cluster, layout: f"cp={layout.cp} does not divide seq_len={job.seq_len}",
)


def _heads_rule(name: str) -> Rule:
    """Ulysses gives each of cp·tp ranks whole heads. Where tp alone does not divide them, that is said instead."""

    def heads(model: Model) -> list[int]:
        return distinct(getattr(layer.attention, name) for layer in model.kinds)

    def fails(layout: Layout, count: int) -> Any:
        return fails_to_divide(layout.cp * layout.tp, count) & (fails_to_divide(layout.tp, count) == 0)

    def is_broken(model: Model, job: Job, cluster: Cluster, layout: Layout) -> Any:
        found: Any = False
        for count in heads(model):
            found = found | fails(layout, count)
        return found & (layout.structure.cp_kind == "ulysses")

    def say(model: Model, job: Job, cluster: Cluster, layout: Layout) -> str:
        count = next(count for count in heads(model) if fails(layout, count))
        return f"{_product(layout, 'cp', 'tp')} does not divide {name}={count}, under --cp-kind ulysses"

    return Rule(f"cp·tp does not divide {name} under ulysses", is_broken, say)


RING_KERNEL = Rule(
    "ring attention has no eager kernels",
    lambda model, job, cluster, layout: (
        (layout.cp > 1) & (layout.structure.cp_kind == "ring") & (layout.structure.attention == "eager")
    ),
    lambda model, job, cluster, layout: (
        f"cp={layout.cp} by a ring puts a flash kernel's results together, and --attention eager has none: "
        "choose --cp-kind allgather or ulysses"
    ),
)
BATCH = Rule(
    "micro_batch_size times the data-parallel ranks does not divide global_batch_size",
    lambda model, job, cluster, layout: fails_to_divide(
        layout.micro_batch_size * layout.data_ranks, job.global_batch_size
    ),
    lambda model, job, cluster, layout: (
        f"micro_batch_size·dp_replicate·dp_shard = {layout.micro_batch_size}·{layout.dp_replicate}·{layout.dp_shard} "
        f"= {layout.micro_batch_size * layout.data_ranks} does not divide global_batch_size={job.global_batch_size}"
    ),
)
SEVERAL_CHUNKS = tuple(name for name in get_args(Schedule) if name not in ONE_STAGE)
VIRTUAL_STAGES = Rule(
    "the schedule has another number of virtual stages",
    lambda model, job, cluster, layout: _virtual_stages(layout) is not None,
    lambda model, job, cluster, layout: str(_virtual_stages(layout)),
)
NO_PIPELINE = Rule(
    "a schedule of several virtual stages needs a pipeline",
    lambda model, job, cluster, layout: (
        (layout.pp == 1) & (layout.structure.virtual_stages != 1 or layout.structure.schedule in SEVERAL_CHUNKS)
    ),
    lambda model, job, cluster, layout: (
        f"schedule={layout.structure.schedule} with virtual_stages={layout.structure.virtual_stages} needs pp > 1"
    ),
)
POSITIONS = Rule(
    "seq_len exceeds the rows of the learned positions",
    lambda model, job, cluster, layout: (
        model.position == "learned"
        and model.patches is None
        and is_whole(job.seq_len)
        and job.seq_len > model.max_position_embeddings
    ),
    lambda model, job, cluster, layout: (
        f"seq_len={job.seq_len} exceeds max_position_embeddings={model.max_position_embeddings}, "
        "and learned positions end there"
    ),
)
TOO_LARGE_TO_COUNT = Rule(
    "byte counts would not fit 64 bits",
    lambda model, job, cluster, layout: (
        is_whole(job.seq_len) and is_whole(job.global_batch_size) and _rough_bytes(model, job, layout) > MOST_BYTES
    ),
    lambda model, job, cluster, layout: (
        f"seq_len={job.seq_len} and global_batch_size={job.global_batch_size}: too large to count the bytes of a step"
    ),
)

PRECISION = Rule(
    "the chip states no rate for the precision",
    lambda model, job, cluster, layout: job.precision in get_args(Precision) and not _rates(cluster, job.precision),
    lambda model, job, cluster, layout: (
        f"{cluster.chip.name} states no peak for precision {job.precision}; "
        f"it has {', '.join(cluster.chip.peak_flops_per_second)}"
    ),
)

IMBALANCE = Rule(
    "expert_imbalance is not a number of at least 1, of a model with experts",
    lambda model, job, cluster, layout: (
        not (1 <= job.expert_imbalance < float("inf"))
        or (job.expert_imbalance > 1 and not any(isinstance(layer.mlp, Experts) for layer in model.kinds))
    ),
    lambda model, job, cluster, layout: (
        f"expert_imbalance={job.expert_imbalance:g}, but {model.name} has no experts"
        if job.expert_imbalance > 1
        else f"expert_imbalance={job.expert_imbalance:g}: the fullest rank's slots over its even share, at least 1"
    ),
)

FP8_GATHER = Rule(
    "weights are gathered in fp8 where they are trained, and computed with so",
    lambda model, job, cluster, layout: (
        layout.structure.fp8_gather and (job.precision != "fp8" or not job.trained.layers)
    ),
    lambda model, job, cluster, layout: (
        f"--fp8-gather is of linear layers in fp8, and --precision is {job.precision}"
        if job.precision != "fp8"
        else f"--fp8-gather of layers that are frozen (--train {job.trained.weights}) is not modelled"
    ),
)

OF_JOB = (
    *(rule for name, rule in SIZE_RULES.items() if name not in LAYOUT_SIZES),
    *(_choice_rule(name) for name in ("precision", "optimizer")),
    PRECISION,
    POSITIONS,
    *OF_PICTURES_JOB,
    *OF_STACKS_JOB,
    *OF_TRAINED_JOB,
    *OF_MTP,
    TOO_LARGE_TO_COUNT,
    IMBALANCE,
    CAPACITY,
)
"""Rules that hold for every layout: they look at the model, the job and the cluster."""

OF_LAYOUT = (
    *(rule for name, rule in SIZE_RULES.items() if name in LAYOUT_SIZES),
    *(_choice_rule(name) for name in ("zero", "schedule", "recompute", "tensor", "cp_kind", "attention")),
    RANK_ORDER,
    WORLD,
    HEADS,
    KEY_VALUE_HEADS,
    INTERMEDIATE,
    SEQUENCE,
    BATCH,
    CONTEXT_SEQUENCE,
    *(_heads_rule(name) for name in ("num_attention_heads", "num_key_value_heads")),
    RING_KERNEL,
    *OF_EXPERTS,
    *OF_DISPATCH,
    *OF_TRAINED,
    *OF_RECOMPUTE,
    *OF_LOSS,
    *OF_PLACEMENT,
    *OF_OFFLOAD,
    FP8_GATHER,
    *OF_PICTURES,
    *OF_STACKS,
    VIRTUAL_STAGES,
    NO_PIPELINE,
)

GENERAL = (*OF_JOB, *OF_LAYOUT)
"""The rules of every engine. Sequence parallel with tp = 1 breaks none: it is inactive."""
