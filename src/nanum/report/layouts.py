"""Layouts in words, and a plan's ranking of them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from nanum.report.flags import AXES, PLACED, says
from nanum.report.numbers import duration, gib, percent, whole
from nanum.report.of_experts import dispatch_words
from nanum.report.tables import Document, print_table, say

RANKING = ("", "layout", "step", "tokens/s\na GPU", "MFU", "GiB", "bubble")
TIES_TOLD = 3
"""Of a layout's near ties, those that its row names."""


def print_ranking(shortlist: Sequence[Document], console: Console, several: bool = False) -> None:
    """The layouts of a plan's shortlist by their places, with what their near ties have otherwise; and of which engine
    each is, where `several` were asked.
    """
    rows = []
    for one in shortlist:
        time, throughput = one["time"], one["throughput"]
        rows.append(
            (
                str(one["place"]),
                (one["engine"]["name"] + ": " if several else "") + layout_words(one["layout"]) + _ties_words(one),
                duration(time["step_seconds"]),
                whole(throughput["tokens_per_second_per_gpu"]),
                percent(throughput["mfu"]),
                gib(one["memory"]["worst"]["device_bytes"]) + (TIGHT if _tight(one["memory"]) else ""),
                percent(time["bubble_fraction"]),
            )
        )
    print_table(console, RANKING, rows, words=2)
    if any(_tight(one["memory"]) for one in shortlist):
        say(
            console,
            f"{TIGHT} is tight: by the most that is assumed beyond tensors it is more than the device has.",
            "dim",
        )
    if folded := sum(len(one["near_ties"]) for one in shortlist):
        say(
            console,
            f"{folded} near tie{'s are' if folded > 1 else ' is'} folded into the rows that name them: at most 1 % "
            "slower, with no less memory, and other only in how data-parallel ranks are split or the like. --ties "
            "lists each.",
            "dim",
        )


TIGHT = "*"


def _tight(memory: Document) -> bool:
    """Could it be too large, by the range of what is assumed?"""
    return bool(memory["worst"]["device_bytes_high"] > memory["capacity_bytes"])


def _ties_words(one: Document) -> str:
    """In what the near ties of a layout differ from it, the nearest first."""
    ties = one["near_ties"]
    if not ties:
        return ""
    told = "; ".join(_difference(one["layout"], tie["layout"]) for tie in ties[:TIES_TOLD])
    more = f"; and {len(ties) - TIES_TOLD} more" if len(ties) > TIES_TOLD else ""
    return f" (near ties: {told}{more})"


def _difference(layout: Document, other: Document) -> str:
    """What another layout's words say that a layout's do not; what they leave out, where that is all."""
    mine, its = layout_words(layout).split(" · "), layout_words(other).split(" · ")
    added = [part for part in its if part not in mine]
    return " · ".join(added or [f"no {part}" for part in mine if part not in its])


def _placed_words(layout: Document) -> str:
    """How layers are cut into stages, where it was said."""
    said = ((name, layout.get(name)) for name in PLACED)
    return ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in said if n is not None and says(name, n))


def _zero_words(zero: int, layout: Document) -> str:
    """What is sharded among data-parallel ranks; among one it is nothing, whatever the stage."""
    if not zero:
        return "no ZeRO"
    ranks = layout.get("dp_shard", 1) * layout.get("cp", 1)
    with_copies = ranks * (layout.get("dp_replicate", 1) if layout.get("hpz") else 1)
    experts = ranks * layout.get("tp", 1) // (layout["ep"] * layout.get("etp", 1)) if layout.get("ep", 1) > 1 else 1
    if max(with_copies, experts) == 1:
        return f"nothing sharded (ZeRO-{zero} of 1 rank)"
    kept = ", weights kept gathered" if zero == 3 and layout.get("reshard") is False else ""
    return f"ZeRO-{zero}{kept}{', weights sharded twice (hpZ)' if layout.get('hpz') else ''}"


def layout_words(layout: Document) -> str:
    """A layout in one line: the axes that divide, then what is done about memory."""
    flat = {**layout, **layout.get("structure", {})}
    sizes = [f"{axis} {flat[axis]}" for axis in AXES if flat.get(axis, 1) != 1] or ["one GPU"]
    tp = flat.get("tp", 1)
    if (etp := flat.get("etp", tp)) != tp:
        sizes.append(f"etp {etp}")
    others = []
    if (zero := flat.get("zero")) is not None:
        others.append(_zero_words(zero, flat))
    if flat.get("tensor") == "sequence" or flat.get("sp") is True:
        others.append(f"sequence parallel{' beside products' if flat.get('tp_overlap') else ''}")
    if flat.get("cp", 1) != 1 and "cp_kind" in flat:
        others.append(f"{flat['cp_kind']} context parallel")
    others += dispatch_words(flat)
    if flat.get("pp", 1) != 1 and "schedule" in flat:
        chunks = flat.get("virtual_stages", 1)
        others.append(f"{flat['schedule']}{f', {chunks} stages a rank' if chunks > 1 else ''}")
        others += [words] if (words := _placed_words(flat)) else []
    if "recompute" in flat:
        some = f" of {layers} layers a stage" if (layers := flat.get("recompute_layers")) else ""
        some += f" of each {n}th layer" if (n := flat.get("recompute_every", 1)) > 1 else ""
        some += f" of {n} layers at once" if (n := flat.get("recompute_chunk", 1)) > 1 else ""
        others.append(f"recompute {flat.get('recompute_modules') or flat['recompute']}{some}")
    if "micro_batch_size" in flat:
        others.append(f"micro-batch {flat['micro_batch_size']}")
    if (loss := flat.get("loss", "full")) != "full":
        others.append(f"loss in {flat['loss_chunks']} chunks" if loss == "chunked" else f"{loss} loss")
    if flat.get("fp8_gather"):
        others.append("weights gathered in fp8")
    if (offload := flat.get("offload", "none")) != "none":
        part = f"{percent(flat['offload_fraction'])} of the " if flat["offload_fraction"] != 1 else ""
        others.append(f"{part}{offload.replace('+', ' and ')} offloaded")
    if flat.get("compile"):
        others.append("compiled")
    return " · ".join(sizes + others)
