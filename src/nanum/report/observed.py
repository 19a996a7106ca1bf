"""What an observed step says of its machine, on a terminal: what moved, and what that implies for other layouts."""

from __future__ import annotations

from rich.console import Console

from nanum.report.layouts import layout_words
from nanum.report.numbers import duration, percent
from nanum.report.tables import Document, Row, print_list, print_table, say, title

COEFFICIENTS = ("coefficient", "before", "now", "", "unsure\nbefore", "now")
BEST = ("", "was", "layout", "step\nbefore", "now")


def print_observed(document: Document, console: Console) -> None:
    """Print what `predict --observed` says besides."""
    found = document["observed"]
    title(console, "What the observed step says")
    runs = len(found["runs_seconds"])
    of_runs = f" (the mean of {runs})" if runs > 1 else ""
    before, after = found["before"], found["after"]
    say(console, f"observed: {duration(found['step_seconds'])}{of_runs}")
    say(console, f"predicted before: {_between(before)}")
    say(console, f"and now: {_between(after)} (the rest is taken for this layout's own)")
    moved = [one for one in found["coefficients"] if one["moved"]]
    if moved:
        print_table(console, COEFFICIENTS, [_coefficient(one) for one in moved], words=1)
        still = [one["what"] for one in found["coefficients"] if not one["moved"]]
        if still:
            say(console, f"not moved: {'; '.join(still)}", "dim")
    else:
        say(console, "no coefficient moved by as much as is shown.")
    print_list(console, "Before you believe it", found["notes"])
    _implied(found, console)
    if found["file"] is not None:
        console.print()
        say(console, f"{found['file']} is this machine: it works wherever a cluster does, and --observed refines it.")


def _between(time: Document) -> str:
    low, high = duration(time["step_seconds_low"]), duration(time["step_seconds_high"])
    return f"{duration(time['step_seconds'])}, between {low} and {high}"


def _coefficient(one: Document) -> Row:
    seconds = one["unit"] == "seconds"
    shown = (duration(one[key]) if seconds else f"{one[key]:.3f}" for key in ("before", "after"))
    unsure = (f"±{percent(one[key])}" for key in ("deviation_before", "deviation_after"))
    return (one["what"], *shown, f"{one['after'] / one['before'] - 1:+.1%}", *unsure)


def _implied(found: Document, console: Console) -> None:
    title(console, "What that implies: the best layouts of this job")
    if not found["best"]:
        say(console, "none that a plan tries fits this cluster")
        return
    rows = [
        (
            "–" if one["place"] is None else str(one["place"]),
            "–" if one["place_before"] is None else str(one["place_before"]),
            layout_words(one["layout"]),
            duration(one["step_seconds_before"]),
            duration(one["step_seconds"]),
        )
        for one in found["best"]
    ]
    print_table(console, BEST, rows, words=3)
    said = "Their order changes." if found["reordered"] else "Their order stays."
    say(console, f"{said} Of other models this says little: published ones were no better predicted for it.")
