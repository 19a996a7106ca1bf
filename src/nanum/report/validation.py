"""Published runs beside their predictions, on a terminal: how far off, by source, which layouts are called
faster, and why rows were skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from rich.console import Console

from nanum.report.numbers import duration, gib, percent, whole
from nanum.report.tables import Document, print_list, print_table, say, title

QUANTITIES = {"step_seconds": "Step times", "memory_bytes": "Memory"}
HEADINGS = ("source", "runs", "mean", "median", "90 % below", "most", "bias", "in range", "range")
RANKING = ("source", "groups", "pairs", "called right", "first choice: median regret", "worst")
ROW = ("measured", "predicted", "error", "likely cause")
NOTE = (
    "an error is |predicted/measured - 1|, and the bias its mean with its sign; the range is what is predicted, "
    "as low and high as it is printed, and its median width"
)
NO_RANGE = 0.005
"""Half a range over what is predicted, that is shown as nothing: of tensors, whose bytes are counted."""
HINT = "A likely cause is a hint, from what is known of the row and from the parts of its prediction: no finding."


def print_validation(document: Document, console: Console, *, rows: bool) -> None:
    """Print one `validate` document; every row of it where asked, worst first."""
    say(console, f"Published runs beside predictions: {NOTE}", "bold")
    for quantity, heading in QUANTITIES.items():
        if not _n(document["summary"][quantity]):
            continue
        total = document["summary"][quantity]
        fitted, held = (_lines(document, quantity, held_out=held_out) for held_out in (False, True))
        if fitted:
            title(console, heading)
            print_table(console, HEADINGS, fitted if held else [*fitted, _line("all runs", total)], words=1)
        if held:
            title(console, f"{heading}: runs that no fit and no range has seen")
            print_table(console, HEADINGS, held, words=1)
            both = f"All {whole(total['n'])} runs, of both tables" if fitted else f"All {whole(total['n'])} runs"
            say(console, f"{both}: off by {percent(total['mape'])}, {total['bias']:+.1%} with the sign.")
        _print_out_of_memory(total["oom"], console)
    _print_ranking(document, console)
    for quantity, heading in QUANTITIES.items():
        found = [row for row in document["rows"] if row["quantity"] == quantity]
        if rows and found:
            title(console, f"{heading}, worst first")
            say(console, HINT)
            worst_first = sorted(found, key=_badness, reverse=True)
            names = [row["id"] for row in worst_first]
            print_table(console, ROW, map(_row, worst_first), words=0, last_is_words=True, names=names)
    _print_why(document, console)
    assumed = [f"{each['source']}: {each['engine']}; " + "; ".join(each["assumed"]) for each in document["sources"]]
    print_list(console, "Taken for granted, by source", assumed)


def _lines(document: Document, quantity: str, *, held_out: bool) -> list[tuple[str, ...]]:
    """The sources that are held out of all fits, or the others, and the mean of them."""
    of = {name: each[quantity] for name, each in document["by_source"].items() if each["held_out"] == held_out}
    lines = [_line(name, errors) for name, errors in of.items() if errors["n"]]
    if len(lines) > 1:
        mean = document["summary"][quantity]["mean_of_held_out" if held_out else "mean_of_sources"]
        lines.append(_line("sources' mean", {**mean, "n": None, "max": None}))
    return lines


def _n(errors: Document) -> int:
    return int(errors["n"] + errors["oom"]["n"])


def _line(name: str, errors: Document) -> tuple[str, ...]:
    bias, width = errors["bias"], errors["width_median"]
    if width is not None and width < NO_RANGE:  # what has none can be in none
        width = None
    return (
        name,
        _or_dash(errors["n"], whole),
        *(_or_dash(errors[key], percent) for key in ("mape", "median", "p90", "max")),
        "-" if bias is None else f"{bias:+.1%}",
        "-" if width is None or errors["in_range"] is None else f"{errors['in_range']:.0%}",
        "-" if width is None else f"±{width:.0%}",
    )


def _or_dash(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def _print_ranking(document: Document, console: Console) -> None:
    """How well runs are ranked that differ in their layout alone."""
    total = document["summary"]["ranking"]
    if not total["groups"]:
        return
    title(console, "Which layout is faster: runs that differ in their layout alone")
    found = [(name, each["ranking"]) for name, each in document["by_source"].items() if each["ranking"]["groups"]]
    lines = [_ranked(name, each) for name, each in found]
    print_table(console, RANKING, [*lines, *([_ranked("sources' mean", total)] if len(found) > 1 else [])], words=1)
    apart = Counter(each["threshold"] for _, each in found)
    usual = apart.most_common(1)[0][0]
    others = [f"{name} {each['threshold']:.0%}" for name, each in found if each["threshold"] != usual]
    say(
        console,
        f"A pair is two layouts of a group whose steps were measured over {usual:.0%} apart"
        f"{' (' + ', '.join(others) + ')' if others else ''}; a regret is how much longer the layout that is predicted "
        "fastest took than the fastest.",
    )


def _ranked(name: str, ranking: Document) -> tuple[str, ...]:
    return (
        name,
        whole(ranking["groups"]),
        whole(ranking["pairs"]),
        *(_or_dash(ranking[key], percent) for key in ("right", "regret_median", "regret_worst")),
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
    return measured, show(row["predicted"]), said, row["likely_cause"] or "-"


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
