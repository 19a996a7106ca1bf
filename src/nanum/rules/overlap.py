"""What makes tensor parallelism's exchanges beside products impossible."""

from __future__ import annotations

from nanum.layout import Layout
from nanum.rules.rule import Rule


def tp_overlap_rules(engine: str, *, has: bool, compiled: bool) -> tuple[Rule, ...]:
    """Refuses what an engine does not have, or what its own flag refuses; `compiled`: is it a pass of torch.compile?"""
    if not has:
        return (
            Rule(
                f"{engine} has no exchanges of tensor parallelism beside products",
                lambda model, job, cluster, layout: layout.structure.tp_overlap,
                lambda model, job, cluster, layout: f"--tp-overlap is not in {engine}: megatron and torchtitan have it",
            ),
        )
    return (
        Rule(
            "tensor parallelism's exchanges beside products, without sequence parallel",
            lambda model, job, cluster, layout: _asked(layout) and layout.structure.tensor != "sequence",
            lambda model, job, cluster, layout: (
                "--tp-overlap is of sequence parallel's gathers and scatters: it needs --tp over 1, and --sp "
                f"({engine})"
            ),
        ),
        Rule(
            f"{engine} compiles where exchanges run beside products",
            lambda model, job, cluster, layout: compiled and _asked(layout) and not layout.structure.compile,
            lambda model, job, cluster, layout: (
                f"--tp-overlap is a pass of torch.compile in {engine}: it needs --compile"
            ),
        ),
    )


def _asked(layout: Layout) -> bool:
    return layout.structure.tp_overlap
