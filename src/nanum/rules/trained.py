"""What makes it impossible to train a part of a model, or adapters beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from nanum.job import ALL, Job, LoraTargets, Quantized, TrainedWeights
from nanum.layout import SPLITS_BACKWARD, Layout
from nanum.model import Experts, LatentAttention, LinearAttention, Model
from nanum.rules.rule import Rule, is_whole


def _rule(why: str, broken: Callable[[Model, Job, Layout], bool], say: Callable[[Model, Job, Layout], str]) -> Rule:
    return Rule(
        why,
        lambda model, job, cluster, layout: broken(model, job, layout),
        lambda model, job, cluster, layout: say(model, job, layout),
    )


def _choice(name: str, known: tuple[str, ...]) -> Rule:
    return _rule(
        f"{name} is not modelled",
        lambda model, job, layout: getattr(job.trained, name) not in known,
        lambda model, job, layout: f"{name}={getattr(job.trained, name)} is not modelled (known: {', '.join(known)})",
    )


def _adapts(job: Job) -> bool:
    return is_whole(job.trained.lora_rank) and job.trained.lora_rank > 0


def _without_adapters(model: Model) -> str:
    """What of a model has no adapters here."""
    if any(isinstance(kind.mlp, Experts) for kind in model.kinds):
        return "experts"
    special = {LatentAttention: "latent attention", LinearAttention: "linear attention"}
    return next((special[type(a)] for a in (kind.attention for kind in model.kinds) if type(a) in special), "")


RANK = _rule(
    "lora_rank is not a whole number of at least 1",
    lambda model, job, layout: not is_whole(job.trained.lora_rank) or job.trained.lora_rank < 0,
    lambda model, job, layout: f"lora_rank={job.trained.lora_rank} is not a whole number of at least 1",
)
FULL_RANK = _rule(
    "lora_rank is over what the layers' own weights have",
    lambda model, job, layout: _adapts(job) and job.trained.lora_rank > model.hidden_size,
    lambda model, job, layout: (
        f"lora_rank={job.trained.lora_rank} exceeds hidden_size={model.hidden_size}, the most that a weight's own rank "
        "can be"
    ),
)
NOTHING = _rule(
    "without adapters, layers are trained",
    lambda model, job, layout: not _adapts(job) and job.trained.weights in ("none", "ends"),
    lambda model, job, layout: (
        f"--train {job.trained.weights} leaves no layer to train: add --lora-rank"
        if job.trained.weights == "none"
        else "--train ends is modelled beside adapters alone: add --lora-rank"
    ),
)
BOTH = _rule(
    "adapters stand in for weights that are not trained",
    lambda model, job, layout: _adapts(job) and job.trained.layers,
    lambda model, job, layout: (
        f"--lora-rank {job.trained.lora_rank} with --train {job.trained.weights}: adapters stand in for the layers' "
        "own weights, which are then frozen: use --train none, or ends"
    ),
)
BLOCKS = _rule(
    "adapters in experts and in latent attention are not modelled",
    lambda model, job, layout: _adapts(job) and bool(_without_adapters(model)),
    lambda model, job, layout: (
        f"{model.name} has {_without_adapters(model)}, whose adapters are not modelled yet: leave out --lora-rank"
    ),
)
QUANTIZED = _rule(
    "what is quantized is frozen",
    lambda model, job, layout: job.trained.quantize != "none" and job.trained.layers and not _adapts(job),
    lambda model, job, layout: (
        f"--quantize {job.trained.quantize} is of frozen weights, beside which adapters are trained: add --lora-rank"
    ),
)
TENSOR = Rule(
    "adapters under tensor parallel are not modelled",
    lambda model, job, cluster, layout: _adapts(job) & (layout.tp > 1),
    lambda model, job, cluster, layout: (
        f"tp={layout.tp} with --lora-rank {job.trained.lora_rank}: how adapters are split is not modelled yet: use "
        "--tp 1"
    ),
)
HALVES = Rule(
    "a backward in halves with frozen weights is not modelled",
    lambda model, job, cluster, layout: (
        (layout.pp > 1) & (layout.structure.schedule in SPLITS_BACKWARD) & (job.trained != ALL)
    ),
    lambda model, job, cluster, layout: (
        f"schedule={layout.structure.schedule} makes weights' gradients apart, which is not modelled where some are "
        "frozen: use 1f1b or interleaved"
    ),
)

OF_TRAINED_JOB = (
    RANK,
    FULL_RANK,
    _choice("weights", get_args(TrainedWeights)),
    _choice("lora_targets", get_args(LoraTargets)),
    _choice("quantize", get_args(Quantized)),
    NOTHING,
    BOTH,
    BLOCKS,
    QUANTIZED,
)
OF_TRAINED = (TENSOR, HALVES)


def frozen_rule(engine: str, where: Callable[[Layout], bool], why: str) -> Rule:
    """Refuses frozen weights where an engine's way with them is not known."""
    return Rule(
        f"frozen weights are not modelled ({engine})",
        lambda model, job, cluster, layout: (job.trained != ALL) & where(layout),
        lambda model, job, cluster, layout: f"{_said(job)} is not for {engine}: {why}",
    )


def quantized_rule(engine: str, why: str) -> Rule:
    """Refuses quantized weights where an engine has none."""
    return Rule(
        f"{engine} has no quantized weights",
        lambda model, job, cluster, layout: job.trained.quantize != "none",
        lambda model, job, cluster, layout: f"--quantize {job.trained.quantize} is not for {engine}: {why}",
    )


def _said(job: Job) -> str:
    return f"--lora-rank {job.trained.lora_rank}" if _adapts(job) else f"--train {job.trained.weights}"
