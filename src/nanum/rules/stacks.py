"""What an encoder with a decoder makes impossible."""

from __future__ import annotations

from nanum.job import ALL
from nanum.rules.rule import Rule

FROZEN = Rule(
    "an encoder with a decoder is trained whole",
    lambda model, job, cluster, layout: model.encoder_layers > 0 and job.trained != ALL,
    lambda model, job, cluster, layout: (
        f"{model.name} is an encoder with a decoder, of which frozen weights and adapters are not modelled: leave out "
        "--train and --lora-rank"
    ),
)
CONTEXT = Rule(
    "context parallelism of scores with a bias",
    lambda model, job, cluster, layout: (model.encoder_layers > 0) & (layout.cp > 1),
    lambda model, job, cluster, layout: (
        f"cp={layout.cp} is not modelled for {model.name}, whose scores have a bias of the distance between all rows: "
        "leave out --cp"
    ),
)
SOME_LAYERS = Rule(
    "recompute of some layers of an encoder with a decoder",
    lambda model, job, cluster, layout: (
        model.encoder_layers > 0 and (layout.structure.partly or layout.structure.in_chunks)
    ),
    lambda model, job, cluster, layout: (
        f"recompute of some layers, or of several at once, is not modelled for {model.name}, where it would be of "
        "which of two stacks: leave out what counts them"
    ),
)
PARKED = Rule(
    "activations of an encoder with a decoder in the host's memory",
    lambda model, job, cluster, layout: model.encoder_layers > 0 and "activations" in layout.structure.offload,
    lambda model, job, cluster, layout: (
        f"--offload activations is not modelled for {model.name}, whose decoder's layers all save what the encoder made"
    ),
)
OF_STACKS_JOB = (FROZEN,)
OF_STACKS = (CONTEXT, SOME_LAYERS, PARKED)


def pipeline_rule(engine: str) -> Rule:
    """Refuses a pipeline whose stages would hand on two tensors."""
    return Rule(
        f"{engine} has no pipeline of an encoder with a decoder",
        lambda model, job, cluster, layout: (model.encoder_layers > 0) & (layout.pp > 1),
        lambda model, job, cluster, layout: (
            f"pp={layout.pp} is not for {model.name} in {engine}: a stage of a decoder would need what the encoder "
            "made, beside what the stage before did, and stages hand on one tensor"
        ),
    )


def regathering_rule(engine: str, why: str) -> Rule:
    """Refuses ZeRO-3 where an engine would gather the table that both stacks look up again in ways not modelled."""
    return Rule(
        f"{engine} gathers a table that two stacks read",
        lambda model, job, cluster, layout: model.encoder_layers > 0 and layout.structure.zero == 3,
        lambda model, job, cluster, layout: f"zero=3 is not modelled for {model.name} in {engine}: {why}",
    )
