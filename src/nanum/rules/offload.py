"""What makes it impossible to keep something in the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from nanum.layout import Layout, Offload, Recompute
from nanum.model import Model
from nanum.rules.rule import Rule

KNOWN = get_args(Offload)


def said(layout: Layout) -> str:
    """As the command line says it."""
    return f"--offload {'+'.join(layout.structure.offload) or 'none'}"


WORDS = Rule(
    "offload is not modelled",
    lambda model, job, cluster, layout: not set(layout.structure.offload) <= set(KNOWN),
    lambda model, job, cluster, layout: f"{said(layout)}: what may be offloaded is {', '.join(KNOWN)}",
)
FRACTION = Rule(
    "offload_fraction is not above 0 and up to 1",
    lambda model, job, cluster, layout: not 0 < layout.structure.offload_fraction <= 1,
    lambda model, job, cluster, layout: (
        f"offload_fraction={layout.structure.offload_fraction:g} must be above 0 and at most 1"
    ),
)
FRACTION_OF_WHAT = Rule(
    "offload_fraction is of an optimizer's",
    lambda model, job, cluster, layout: (
        layout.structure.offload_fraction != 1 and "optimizer" not in layout.structure.offload
    ),
    lambda model, job, cluster, layout: "--offload-fraction is of what --offload optimizer keeps on the host: add it",
)
OF_OFFLOAD = (WORDS, FRACTION, FRACTION_OF_WHAT)


def offload_rule(engine: str, lacks: Callable[[Layout], object], why: str) -> Rule:
    """Refuses what an engine does not offload."""
    return Rule(
        f"{engine} does not offload that",
        lambda model, job, cluster, layout: bool(layout.structure.offload) and bool(lacks(layout)),
        lambda model, job, cluster, layout: f"{said(layout)} is not in {engine}: {why}",
    )


def no_muon_rule(engine: str) -> Rule:
    """Refuses Muon on the host."""
    return Rule(
        f"Muon on the host is not modelled ({engine})",
        lambda model, job, cluster, layout: (
            job.optimizer == "muon" and bool({"optimizer", "params"} & set(layout.structure.offload))
        ),
        lambda model, job, cluster, layout: (
            f"--optimizer muon with {said(layout)}: its products on the host are not modelled ({engine})"
        ),
    )


def whole_optimizer_rule(engine: str) -> Rule:
    """Refuses a part of an optimizer on the host."""
    return Rule(
        f"{engine} updates all on the host, or nothing",
        lambda model, job, cluster, layout: layout.structure.offload_fraction != 1,
        lambda model, job, cluster, layout: (
            f"--offload-fraction {layout.structure.offload_fraction:g} is not modelled for {engine}: megatron has it "
            "(--optimizer-offload-fraction)"
        ),
    )


def activations_rule(engine: str, recompute: Recompute, why: str) -> Rule:
    """Refuses activations on the host with another recompute than the engine has beside them, in a pipeline, or of a
    model of two layers, which stay.
    """

    def wrong(model: Model, layout: Layout) -> list[str]:
        structure = layout.structure
        return [
            *([f"{why}: use --recompute {recompute}"] if structure.recompute != recompute else []),
            *(["in a pipeline is refused, or not modelled: use --pp 1"] if structure.pipelined else []),
            *(["has nothing to offload below three layers"] if model.num_hidden_layers < 3 else []),
        ]

    return Rule(
        f"what {engine} offloads activations with",
        lambda model, job, cluster, layout: "activations" in layout.structure.offload and bool(wrong(model, layout)),
        lambda model, job, cluster, layout: f"--offload activations: {'; '.join(wrong(model, layout))} ({engine})",
    )


def with_params(layout: Layout) -> bool:
    """FSDP2's policy takes parameters, and with them gradients and the optimizer's states; nothing else."""
    return "params" in layout.structure.offload and "activations" not in layout.structure.offload


def policy_rules(engine: str, flag: str, activations: str) -> tuple[Rule, ...]:
    """Of an engine that offloads by FSDP2's CPUOffloadPolicy; `flag` turns it on."""
    return (
        offload_rule(
            engine,
            lambda layout: "activations" in layout.structure.offload,
            activations,
        ),
        offload_rule(
            engine,
            lambda layout: not with_params(layout) and "activations" not in layout.structure.offload,
            f"{flag} is FSDP2's CPUOffloadPolicy, which keeps parameters on the host, and gradients and optimizer "
            "states with them: use --offload params",
        ),
        no_muon_rule(engine),
        whole_optimizer_rule(engine),
    )
