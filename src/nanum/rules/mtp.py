"""What makes multi-token prediction impossible."""

from __future__ import annotations

from nanum.job import ALL, Job
from nanum.model import Attention, Model
from nanum.rules.rule import Rule, is_whole

MOST_MODULES = 16


def _counts(model: Model) -> bool:
    return is_whole(model.mtp_layers) and 0 <= model.mtp_layers <= MOST_MODULES


def _lacks(model: Model, job: Job) -> list[str]:
    """What of a model or a job its modules are not modelled beside."""
    encodes = any(isinstance(kind.attention, Attention) and not kind.attention.causal for kind in model.kinds)
    found = {
        "sees what follows a token already": encodes,
        f"has {model.position} positions, where its modules have rotary ones": model.position != "rotary",
        "has a head that is more than a norm and one matrix": bool(
            model.head_bias or model.head_transform or model.embedding_size or model.hidden_dropout
        ),
        "is not trained whole (--train, --lora-rank)": job.trained != ALL,
    }
    return [what for what, there in found.items() if there]


OF_MTP = (
    Rule(
        "mtp_layers is not a small whole number",
        lambda model, job, cluster, layout: not _counts(model),
        lambda model, job, cluster, layout: f"mtp_layers={model.mtp_layers}: must be from 0 to {MOST_MODULES}",
    ),
    Rule(
        "multi-token prediction of such a model is not modelled",
        lambda model, job, cluster, layout: model.mtp_layers != 0 and bool(_lacks(model, job)),
        lambda model, job, cluster, layout: (
            f"--mtp-layers {model.mtp_layers} is not modelled here: {model.name} {' and '.join(_lacks(model, job))}"
        ),
    ),
)


def mtp_rule(engine: str, lacks: str) -> Rule:
    """Refuses multi-token prediction where an engine `lacks` it."""
    return Rule(
        f"{engine} has no multi-token prediction",
        lambda model, job, cluster, layout: model.mtp_layers != 0 and bool(lacks),
        lambda model, job, cluster, layout: f"--mtp-layers {model.mtp_layers} is not for {engine}: {lacks}",
    )


def chunked_mtp_rule(engine: str) -> Rule:
    """Refuses it beside recompute of several layers at once (`recompute_num_layers must be 1 for MTP recompute`)."""
    return Rule(
        f"multi-token prediction with chunks of recomputed layers ({engine})",
        lambda model, job, cluster, layout: model.mtp_layers != 0 and layout.structure.in_chunks,
        lambda model, job, cluster, layout: (
            f"--mtp-layers {model.mtp_layers} with --recompute-chunk {layout.structure.recompute_chunk}: {engine} "
            "recomputes one layer at once beside it"
        ),
    )


def sharded_mtp_rule(engine: str) -> Rule:
    """Refuses it where the modules' weights would be gathered with the head's."""
    return Rule(
        f"multi-token prediction with sharded gradients ({engine})",
        lambda model, job, cluster, layout: model.mtp_layers != 0 and layout.structure.zero >= 2,
        lambda model, job, cluster, layout: (
            f"--mtp-layers {model.mtp_layers} with zero={layout.structure.zero}, Megatron-FSDP, is not modelled: use "
            f"--zero 0 or 1 ({engine})"
        ),
    )
