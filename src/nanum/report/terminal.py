"""Answers on a terminal. Each function prints one command's document; numbers are never cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanum.report.flags import flags_of
from nanum.report.layouts import layout_words, print_ranking
from nanum.report.numbers import LESS_THAN_A_SHARE, duration, fraction, gib, gigabytes, percent, ranges, whole
from nanum.report.of_experts import routing_flags
from nanum.report.tables import Document, Row, print_list, print_table, say, title
from nanum.units import (
    format_bytes,
    format_flops_per_second,
    format_rate,
    format_seconds,
)

MEMORY = ("stage", "params", "grads", "optimizer\nstates", "activations", "buffers", "peak\nallocated")
COMMUNICATION = ("what", "calls", "payload\nGB", "wire\nGB", "time", "exposed")
CATEGORIES = ("params", "grads", "optimizer_states", "activations", "buffers")
FORMATS: dict[str, Callable[[float], str]] = {
    "flops_per_second": format_flops_per_second,
    "bytes_per_second": format_rate,
    "bytes": format_bytes,
    "seconds": format_seconds,
}
KINDS_OF_STAGE_SHOWN = 3  # of a pipeline: its first, its last, and those between are usually alike
BAR_CELLS = 24
BESIDE_BARS = 42  # cells of a line


def print_prediction(document: Document, console: Console, defaults: Sequence[str] = ()) -> None:
    """Print `predict`'s document. `defaults` are the choices the user left to us, in words."""
    print_head(document, console, defaults)
    _verdict(document, console)
    _body(document, console)


def print_plan(
    document: Document, console: Console, defaults: Sequence[str] = (), asked: str = "MODEL CLUSTER"
) -> None:
    """Print `plan`'s document: the ranking, why the first is first, what was left out, and the first in short.

    `asked` are the model and the cluster in the user's words."""
    count, best = document["count"], document["best"]
    several = any(one["engine"]["name"] != document["question"]["engine"]["name"] for one in document["shortlist"])
    print_head(document["question"], console, defaults, layout=False)
    tried = count["several_stages"]
    several_stages = f", and {whole(tried)} of them tried with several stages a rank" if tried else ""
    searched = f"{whole(count['enumerated'])} layouts in {duration(document['seconds'])}"
    say(
        console,
        f"{searched}: {whole(count['impossible'])} impossible, {whole(count['too_large'])} too large for the memory, "
        f"{whole(count['ranked'])} ranked{several_stages}.",
    )
    if best:
        print_ranking(document["shortlist"], console, several)
    else:
        say(
            console,
            "No layout fits. More GPUs, a shorter sequence, or chips with more memory are needed."
            if count["too_large"]
            else "No layout is possible: the rules below leave none of this number of GPUs and this batch.",
            "red",
        )
        _least(document.get("least"), console, asked)
    print_list(console, "Why the first", document.get("explanations", ()))
    print_list(console, "Left out", (f"{whole(one['count'])}: {one['why']}" for one in document["rejected"]))
    if best:
        first = best[0]
        title(console, "The first")
        say(console, f"{first['engine']['name']}: " * several + layout_words(first["layout"]), "bold")
        _verdict(first, console)
        _time(first["time"], console)
        _throughput(first, console)
        say(console, f"ledger and memory by stage: nanum predict {asked} {flags_of(first)}", "dim")
        assumed = [one["what"] for one in first["assumptions"] if one["tag"] == "assumed"]
        say(console, f"assumed, and listed there with their sources: {'; '.join(assumed)}", "dim")


def _least(least: Document | None, console: Console, asked: str) -> None:
    """Where nothing fits: what comes nearest, and by how much it does not."""
    if least is None:
        return
    needs, capacity = least["device_bytes"], least["capacity_bytes"]
    over = f"{gib(needs)} of {gib(capacity)} GiB, {gib(needs - capacity)} GiB too much"
    say(console, f"The least that any needs is {over}:")
    say(console, f"  {layout_words(least['layout'])}", "bold")
    say(console, f"  nanum predict {asked} {flags_of(least)}", "dim")
    _levers(least["levers"], console, "But it fits")


def _job_words(job: Document, model: Document) -> str:
    usual = {"trained": job.get("trained"), "routing": job.get("routing"), "expert_imbalance": 1.0}
    plain = [f"{key} {_value(value)}" for key, value in job.items() if key not in usual or value != usual[key]]
    plain += [flag[2:].replace("-", " ") for flag in routing_flags(job.get("routing", {}))]
    return " · ".join([*plain, *_trained_words(job.get("trained", {}), model.get("trained_parameters", 0))])


def _trained_words(trained: Document, parameters: int) -> list[str]:
    """What is trained, where it is not all of the model."""
    if trained.get("weights", "all") == "all":
        return []
    words = [f"{whole(parameters)} parameters trained"]
    if trained["lora_rank"]:
        where = "" if trained["lora_targets"] == "all" else f" in {trained['lora_targets']}"
        words.append(f"adapters of rank {trained['lora_rank']}{where}")
    if trained["weights"] != "none":
        words.append(f"of the model's own the {trained['weights']}")
    if trained["quantize"] != "none":
        words.append(f"frozen layers in {trained['quantize']}")
    return words


def print_head(document: Document, console: Console, defaults: Sequence[str], layout: bool = True) -> None:
    """What was asked."""
    model, cluster, engine = document["model"], document["cluster"], document["engine"]
    gpus = cluster.get("gpus") or cluster["nodes"] * cluster["gpus_per_node"]
    lines = [
        ("model", f"{model['name']}, {whole(model['parameters'])} parameters{_modules(model)}"),
        ("job", _job_words(document["job"], model)),
        ("cluster", f"{cluster['name']}, {whole(gpus)} GPU{'s' if gpus > 1 else ''}"),
        *(("", _link_words(link)) for link in cluster.get("links", ()) if gpus > 1),
        ("engine", f"{engine['name']} {engine.get('version') or ''}".strip()),
    ]
    if layout:
        lines.append(("layout", layout_words(document["layout"])))
    if defaults:
        lines.append(("by default", " · ".join(defaults)))
    grid = Table.grid(padding=(0, 2))
    for name, words in lines:
        grid.add_row(Text(name, "dim"), Text(words))
    console.print(grid)
    console.print()


def _modules(model: Document) -> str:
    return f", with {n} of multi-token prediction" if (n := model.get("mtp_layers")) else ""


def _link_words(link: Document) -> str:
    """A link with what is assumed of it: no speed without the link that it rests on."""
    rate = f"{link['name']} {format_rate(link['bytes_per_second'])} a GPU ({link['tag']})"
    reached = f"{percent(link['efficiency'])} of it among {link['efficiency_group_size']} ranks"
    return f"{rate}, {reached} ({link['efficiency_tag']})"


def _verdict(document: Document, console: Console) -> None:
    memory, worst = document["memory"], document["memory"]["worst"]
    needs, capacity = worst["device_bytes"], memory["capacity_bytes"]
    where = f"on stage {worst['stage']}, at {worst['moment']}"
    if document["fits"]:
        most = worst["device_bytes_high"]
        tight = f"; tight: by the most that is assumed beyond tensors it is {gib(most)}" if most > capacity else ""
        say(console, f"It fits: {gib(needs)} of {gib(capacity)} GiB, {where}{tight}.", "green")
    else:
        over = f"{gib(needs - capacity)} GiB too much"
        say(console, f"It does not fit: {gib(needs)} of {gib(capacity)} GiB, {over}, {where}.", "red")
        if "nearest" in document:
            _nearest(document["nearest"], console)
        _levers(document.get("levers"), console, "This very layout fits")


def _levers(found: Sequence[Document] | None, console: Console, what: str) -> None:
    """What makes it fit beside another layout."""
    if found:
        said = ", ".join(f"{one['flags']} ({gib(one['device_bytes'])} GiB)" for one in found)
        say(console, f"{what} with {'any one of ' if len(found) > 1 else ''}{said}.")


def _nearest(near: Document | None, console: Console) -> None:
    """The layout that fits and is nearest to one that does not."""
    if near is None:
        say(console, "No layout of this engine fits this cluster.", "red")
        return
    needs = near["memory"]["worst"]["device_bytes"]
    say(console, f"The nearest that fits ({gib(needs)} GiB, {duration(near['time']['step_seconds'])} a step):")
    say(console, f"  {layout_words(near['layout'])}", "bold")
    say(console, f"  {flags_of(near)}", "dim")


def _body(document: Document, console: Console) -> None:
    _memory(document["memory"], console)
    _communication(document["communication"], console)
    _time(document["time"], console)
    _throughput(document, console)
    _assumptions(document["assumptions"], console)
    print_list(console, "Not modelled", document["unmodelled"])


def _memory(memory: Document, console: Console) -> None:
    title(console, "Memory of one GPU, GiB")
    rows = []
    alike = groupby(memory["stages"], key=lambda stage: (stage["allocated_peak_bytes"], dict(stage["by_category"])))
    for (peak_bytes, by_category), group in alike:
        rows.append(
            (
                ranges([stage["stage"] for stage in group]),
                *(gib(by_category.get(name)) for name in CATEGORIES),
                gib(peak_bytes),
            )
        )
    print_table(console, MEMORY, rows, words=1)
    worst = memory["worst"]
    seen = [worst.get(f"device_bytes_{end}") for end in ("low", "high")]
    between = f" (between {gib(seen[0])} and {gib(seen[1])})" if all(seen) else ""
    say(
        console,
        f"stage {worst['stage']}, the worst: {gib(worst['allocated_bytes'])} allocated, {gib(worst['reserved_bytes'])} "
        f"reserved by PyTorch, {gib(worst['context_bytes'])} for contexts and communicators: "
        f"{gib(worst['device_bytes'])}{between} of the device's {gib(memory['capacity_bytes'])} GiB",
    )
    if host := max(stage.get("host_bytes", 0) for stage in memory["stages"]):
        say(console, f"in the host's memory, for one GPU: {gib(host)} GiB at the most")


def _communication(rows: Sequence[Document], console: Console) -> None:
    title(console, "Communication of one GPU in one step")
    if not rows:
        say(console, "none")
        return
    by_stage: dict[int, list[Document]] = {}
    for row in rows:
        by_stage.setdefault(row["stage"], []).append(row)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for stage, its_rows in by_stage.items():
        alike.setdefault(tuple(_what_is_sent(row) for row in its_rows), []).append(stage)
    for stages in list(alike.values())[:KINDS_OF_STAGE_SHOWN]:
        slowest = max(stages, key=lambda stage: sum(row["exposed_seconds"] or 0.0 for row in by_stage[stage]))
        if len(by_stage) > 1:
            whose = f"; times are of stage {slowest}, which waits longest" if len(stages) > 1 else ""
            say(console, f"stage {ranges(stages)}{whose}", "italic")
        print_table(console, COMMUNICATION, [_communication_row(row) for row in by_stage[slowest]], words=1)
    if len(alike) > KINDS_OF_STAGE_SHOWN:
        say(console, f"{len(alike) - KINDS_OF_STAGE_SHOWN} more kinds of stage: --json has every one", "dim")


def _communication_row(row: Document) -> Row:
    return (
        f"{row['kind']} of {row['what']}, {row['dtype']}, {row['phase']}\n  "
        + (f"{row['axis']}, {row['group_size']} ranks, {row['link']}" if row["axis"] else row["link"]),
        whole(row["calls"]),
        gigabytes(row["payload_bytes"]),
        gigabytes(row["wire_bytes"]),
        duration(row["seconds"]),
        duration(row["exposed_seconds"]),
    )


def _what_is_sent(row: Document) -> tuple[Any, ...]:
    """A row without its stage and its times: stages that agree in this are shown once."""
    return tuple(value for key, value in row.items() if key not in ("stage", "seconds", "exposed_seconds"))


SEEN = 0.02
"""Of a step: what launches add to it is not told below."""


def _time(time: Document, console: Console) -> None:
    title(console, "Time of one step")
    step_seconds = time["step_seconds"]
    parts = {
        "compute": time["compute_seconds"],
        "exposed communication": time["exposed_communication_seconds"],
        "pipeline bubble": time["bubble_seconds"],
        "optimizer": time["optimizer_seconds"],
    }
    rows: list[Row] = []
    cells = min(BAR_CELLS, max(console.width - BESIDE_BARS, 0))
    for name, seconds in parts.items():
        share = (seconds or 0.0) / step_seconds if step_seconds else 0.0
        rows.append((name, duration(seconds), percent(share), Text("█" * round(cells * min(share, 1.0)), "cyan")))
    low, high = time["step_seconds_low"], time["step_seconds_high"]
    span = f"between {duration(low)} and {duration(high)}"
    rows.append((Text("step", "bold"), Text(duration(step_seconds), "bold"), "", span))
    print_table(console, None, rows, words=1, last_is_words=True)
    if (launches := time.get("launch_seconds", 0.0)) > SEEN * step_seconds:
        say(
            console,
            f"bound by launches: {duration(launches)} of it the GPU waits for its host, which launches kernels one by "
            "one; larger micro-batches hide that",
        )


def _throughput(document: Document, console: Console) -> None:
    throughput, time = document["throughput"], document["time"]
    peak = throughput["peak_flops_per_second"]
    precision = document["job"].get("precision", "")
    say(
        console,
        f"{whole(throughput['tokens_per_second'])} tokens/s, {whole(throughput['tokens_per_second_per_gpu'])} a GPU; "
        f"MFU {percent(throughput['mfu'])}, HFU {percent(throughput['hfu'])} of "
        f"{'?' if peak is None else format_flops_per_second(peak)} a GPU ({precision} dense, attention causal)",
    )
    if (serial := time.get("serial_fraction")) is not None:
        more = f"; below 0: {LESS_THAN_A_SHARE}" if serial < 0 else ""
        say(
            console,
            f"serial fraction {fraction(serial)} (Karp-Flatt: against one GPU, were its memory large enough{more})",
        )


def _assumptions(assumptions: Iterable[Document], console: Console) -> None:
    rows = [(str(one["tag"]).upper(), _assumption(one), str(one["source"])) for one in assumptions]
    if rows:
        title(console, "What this rests on")
        grid = Table.grid(padding=(0, 2))
        for tag, what, source in sorted(rows):
            grid.add_row(Text(tag, "dim"), Text(what), Text(source, "dim"))
        console.print(grid)


def _assumption(one: Document) -> str:
    what, unit = str(one["what"]), one.get("unit", "")
    if one["value"] is None:
        return what
    seen = f" ({_quantity(one['low'], unit)} to {_quantity(one['high'], unit)})" if "low" in one else ""
    return f"{what}: {_quantity(one['value'], unit)}{seen}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _quantity(value: Any, unit: str) -> str:
    """A value in people's units."""
    return FORMATS[unit](value) if unit in FORMATS and value is not None else _value(value)
