"""A verification on a terminal: each check with its figures, and where something differs the rows, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from nanum.report.numbers import whole
from nanum.report.tables import Document, print_table, say, title

SHOWN = 12  # differing rows of each kind
ROWS = ("axis", "exchange", "phase", "dtype", "ranks", "calls", "payload bytes")
SIDES = ("calls\npredicted", "counted", "bytes\npredicted", "counted")
DIFFERENT = ("rank", *ROWS[:5], *SIDES)
HELD = ("rank", "bytes held", "predicted", "counted", "difference")
CATEGORIES = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer_states": "optimizer states",
    "saved": "saved from forward for backward",
    "allocated_peak": "the most at any moment",
}


def print_verification(document: Document, console: Console, layout: str, defaults: Sequence[str]) -> None:
    """Print one `verify` document."""
    if defaults:
        say(console, "Left to defaults: " + ", ".join(defaults), "dim")
    ranks = f"{document['ranks']} rank{'s' * (document['ranks'] != 1)}"
    where = f"{ranks} on {document['backend']}, torch {document['engine']['version']}"
    say(console, f"{document['name']}: {layout}; {where}", "bold")
    console.print()
    for check in document["checks"]:
        say(console, _line(check["ok"], f"{check['name']}: {check['detail']}"))
    print_differences(document, console)
    if document["ok"]:
        first = [row for row in document["communication"] if row["rank"] == 0]
        if first:
            title(console, "Exchanged by rank 0 in a step, as predicted and as counted")
            print_table(console, ROWS, (_row(row) for row in first), words=4)
        title(console, "Held by rank 0, in bytes")
        held = (each for each in document["memory"] if each["rank"] == 0)
        print_table(console, HELD[1:], (_held(each)[1:] for each in held), words=1)


def print_differences(document: Document, console: Console) -> None:
    """The first rows that differ, predicted beside counted."""
    rows = [row for row in document["communication"] if not row["ok"]]
    if rows:
        title(console, f"Exchanges that differ ({len(rows)} rows)")
        print_table(console, DIFFERENT, (_beside(row) for row in rows[:SHOWN]), words=5)
    held = [each for each in document["memory"] if not each["ok"]]
    if held:
        title(console, f"Bytes held that differ ({len(held)} rows)")
        print_table(console, HELD, (_held(each) for each in held[:SHOWN]), words=2)


def print_matrix(document: Document, console: Console) -> None:
    """Print the document of `verify --all`: a line a layout, and what differs where one does."""
    for case in document["cases"]:
        wrong = [check for check in case["checks"] if check["ok"] is False]
        rows, peak = len(case["communication"]), _peak(case)
        said = f"{case['name']}: {case['ranks']} ranks, {rows} rows equal, peak {peak:+.2%}"
        if wrong:
            said = f"{case['name']}: " + "; ".join(f"{check['name']}: {check['detail']}" for check in wrong)
        say(console, _line(case["ok"], said))
        if wrong:
            print_differences(case, console)
    good = sum(case["ok"] for case in document["cases"])
    console.print()
    say(console, f"{good} of {len(document['cases'])} layouts verified in {document['seconds']:.0f} s", "bold")


def _peak(case: Document) -> float:
    peaks = [each for each in case["memory"] if each["category"] == "allocated_peak"]
    return max((float(each["predicted_bytes"] / each["counted_bytes"]) - 1 for each in peaks), key=abs)


def _line(ok: bool | None, words: str) -> Text:
    mark = (
        Text("ok    ", "green") if ok else Text("DIFFERS ", "bold red") if ok is False else Text("unknown ", "yellow")
    )
    return mark.append(words, "not bold default")


def _row(row: Document) -> list[str]:
    calls, payload = row["counted_calls"], row["counted_payload_bytes"]
    words = [row["axis"], row["kind"], row["phase"], row["dtype"]]
    return [*words, str(row["group_size"]), whole(calls), whole(payload)]


def _beside(row: Document) -> list[Any]:
    numbers = (row[f"{side}_{what}"] for what in ("calls", "payload_bytes") for side in ("predicted", "counted"))
    return [str(row["rank"]), *_row(row)[:5], *map(whole, numbers)]


def _held(each: Document) -> list[str]:
    predicted, counted = each["predicted_bytes"], each["counted_bytes"]
    difference = "0" if predicted == counted else f"{predicted - counted:+,}"
    return [str(each["rank"]), CATEGORIES[each["category"]], whole(predicted), whole(counted), difference]
