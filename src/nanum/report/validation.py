"""Published runs beside their predictions, on a terminal: how far off, by source, and why rows were skipped."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from nanum.report.numbers import duration, gib, percent, whole
from nanum.report.tables import Document, print_list, print_table, say, title

QUANTITIES = {"step_seconds": "Step times", "memory_bytes": "Memory"}
HEADINGS = ("source", "runs", "mean error", "median", "90 % below", "most", "bias", "in range")
ROW = ("run", "source", "measured", "predicted", "error")
NOTE = "an error is |predicted/measured - 1|, and the bias its mean with its sign"


def print_validation(document: Document, console: Console, *, rows: bool) -> None:
    """Print one `validate` document; every row of it where asked, worst first."""
    say(console, f"Published runs beside predictions: {NOTE}", "bold")
    for quantity, heading in QUANTITIES.items():
        if not _n(document["summary"][quantity]):
            continue
        title(console, heading)
        by_source = ((name, each[quantity]) for name, each in document["by_source"].items())
        lines = [_line(name, errors) for name, errors in by_source if errors["n"]]
        print_table(console, HEADINGS, [*lines, _line("all", document["summary"][quantity])], words=1)
        _print_out_of_memory(document["summary"][quantity]["oom"], console)
    for quantity, heading in QUANTITIES.items():
        found = [row for row in document["rows"] if row["quantity"] == quantity]
        if rows and found:
            title(console, f"{heading}, worst first")
            print_table(console, ROW, map(_row, sorted(found, key=_badness, reverse=True)), words=2)
    _print_why(document, console)
    assumed = [f"{each['source']}: {each['engine']}; " + "; ".join(each["assumed"]) for each in document["sources"]]
    print_list(console, "Taken for granted, by source", assumed)


def _n(errors: Document) -> int:
    return int(errors["n"] + errors["oom"]["n"])


def _line(name: str, errors: Document) -> tuple[str, ...]:
    bias = errors["bias"]
    return (
        name,
        whole(errors["n"]),
        *(percent(errors[key]) for key in ("mape", "median", "p90", "max")),
        percent(None) if bias is None else f"{bias:+.1%}",
        "-" if errors["in_range"] is None else f"{errors['in_range']:.0%}",
    )


def _print_out_of_memory(oom: Document, console: Console) -> None:
    if oom["n"]:
        say(console, f"Of {oom['n']} runs that did not fit, {oom['right']} are predicted not to.")


def _badness(row: Document) -> float:
    error = row["signed_error"]
    return abs(error) if error is not None else 0.0 if row["oom_right"] else float("inf")


def _row(row: Document) -> tuple[str, ...]:
    show = duration if row["quantity"] == "step_seconds" else gib
    error = row["signed_error"]
    if error is None:
        measured, said = "did not fit", "right" if row["oom_right"] else "wrong"
    else:
        measured, said = show(row["measured"]), f"{error:+.1%}"
    return row["id"], row["source"], measured, show(row["predicted"]), said


def _print_why(document: Document, console: Console) -> None:
    """Reasons with their counts; what is said of one layout alone is counted together."""
    counts: Counter[str] = Counter()
    for each in document["skipped"]:
        counts.update(dict.fromkeys(map(_reason, each["reasons"]), 1))
    if counts:
        title(console, f"Skipped: {len(document['skipped'])} rows, each for one reason or more")
        print_table(console, ("reason", "rows"), [(why, whole(n)) for why, n in counts.most_common()], words=1)
    left_out: Counter[str] = Counter(each["why"] for each in document["left_out"])
    if left_out:
        title(console, "Not compared, of rows that were")
        print_table(console, ("reason", "rows"), [(why, whole(n)) for why, n in left_out.most_common()], words=1)


def _reason(why: str) -> str:
    if why.startswith("impossible: "):
        return "an impossible layout"
    for general in ("no chip like", "the model's size is not stated"):
        if why.startswith(general):
            return f"{general} the row's" if general.startswith("no chip") else general
    return why
