"""How a question about experts is said again: as flags, and in words."""

from __future__ import annotations

from nanum.report.tables import Document

USUAL_WAY = {"dispatcher": "alltoall", "dispatch_dtype": "bf16"}


def routing_flags(routing: Document) -> list[str]:
    """How tokens come to experts, where that is not as usual."""
    groups = {f"router-{name.replace('_', '-')}": routing.get(name) or None for name in ("groups", "group_topk")}
    said = {"expert-capacity": routing.get("capacity"), **groups}
    return [
        *(f"--{name} {value:g}" for name, value in said.items() if value is not None),
        *(["--pad-experts"] if routing.get("padded") else []),
    ]


def dispatch_flags(layout: Document) -> list[str]:
    """How tokens are sent to experts, where that is not as usual."""
    return [f"--{n.replace('_', '-')} {layout[n]}" for n, word in USUAL_WAY.items() if layout.get(n, word) != word]


def dispatch_words(layout: Document) -> list[str]:
    """The same, in a line about a layout."""
    if layout.get("dispatcher", "alltoall") == "alltoall":
        return []
    return [f"tokens by nodes of {layout['ep_intra']} ranks, in {layout['dispatch_dtype']}"]
