"""How a job scales, on a terminal: a table of points, a chart beside Amdahl's curve, and what is serial in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from nanum.report.layouts import layout_words
from nanum.report.numbers import LESS_THAN_A_SHARE, duration, fraction, gib, percent, span, whole
from nanum.report.tables import Document, Row, print_list, print_table, say, title
from nanum.report.terminal import print_head

SPEEDUPS = ("effi-\nciency", "over the\nfirst", "effi-\nciency")
PARTS = ("", "time", "of s")
CUTS = ("", "step", "faster", "s", "limit")
CHART_CELLS = 40
ROOM_FOR_RANGES = 80
"""Columns of a terminal in which the range of a step stands beside it, and not below."""
BESIDE_CHART = 24  # cells of a line
EXCHANGES_SHOWN = 6
NOT_THE_LAW = 0.02
"""Where Amdahl's curve misses a point by more, the one with shares is told too."""
NO_LAW = "One count of GPUs makes no law (--gpus asks for several)"
NAMES = {
    "exposed_communication": "exposed communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer, beyond an even share",
    "uneven_compute": "compute, beyond an even share",
}


def print_scaling(document: Document, console: Console, defaults: Sequence[str] = ()) -> None:
    """Print `scale`'s document."""
    print_head(document, console, defaults, layout=False)
    points, weak = document["points"], document["weak"]["points"]
    if points:
        _strong(document, console)
        if len(points) > 1:
            _chart(document, console)
        _amdahl(document, console)
        if document["serial"] is not None:
            _serial(document["serial"], console)
            _cuts(document, console)
    if weak:
        _weak(document, console)
    if not points and not weak:
        other = "" if document["best"] else ", or --best seeks another layout"
        say(console, f"It fits on none of these counts of GPUs: --gpus asks for more of them{other}.", "red")
    print_list(console, "Left out", _left_out(document))
    assumed = [one["what"] for one in document["assumptions"] if one["tag"] == "assumed"]
    if assumed:
        console.print()
        say(console, f"assumed, and listed by --json with their sources: {'; '.join(assumed)}", "dim")


def _strong(document: Document, console: Console) -> None:
    points = document["points"]
    title(console, f"Strong form: the same {whole(points[0]['global_batch_size'])} sequences a step")
    rows = [
        (
            whole(point["gpus"]),
            *_step(point, console),
            *_beside(point),
            "" if point["serial_fraction"] is None else fraction(point["serial_fraction"]),
        )
        for point in points
    ]
    headings = ("GPUs", *_step_heading(console), "speed-up", *SPEEDUPS, "serial\nfraction")
    print_table(console, headings, rows, words=0)
    alone, first = duration(document["one_gpu_seconds"]), whole(points[0]["gpus"])
    if points[0]["gpus"] == 1:
        words = f"Speed-ups are over one GPU, which takes {alone}."
    else:
        needed, there = gib(document["one_gpu_bytes"]), gib(document["capacity_bytes"])
        too_small = "" if document["one_gpu_fits"] else f" were its memory large enough ({needed} of {there} GiB)"
        words = (
            f"Speed-ups are over one GPU, which would take {alone}{too_small}; then over the first count, {first} "
            f"GPUs, where perfect is N/{first}."
        )
    say(console, f"{words} The serial fraction is Karp and Flatt's.")
    _layouts(document, points, console)


def _step_heading(console: Console) -> tuple[str, ...]:
    return ("step", "low–high\n(80%)") if console.width >= ROOM_FOR_RANGES else ("step\n(80%)",)


def _step(point: Document, console: Console) -> tuple[str, ...]:
    """What is expected, and the range that 80% of such published runs were in."""
    cells = duration(point["step_seconds"]), span(point["step_seconds_low"], point["step_seconds_high"])
    return cells if console.width >= ROOM_FOR_RANGES else ("\n".join(cells),)


def _beside(point: Document) -> tuple[str, ...]:
    return (
        _times(point["speedup"]),
        percent(point["efficiency"]),
        _times(point["speedup_over_first"]),
        percent(point["efficiency_over_first"]),
    )


def _layouts(document: Document, points: Sequence[Document], console: Console) -> None:
    """The one that grows, at the largest count, or each of the best."""
    if document["best"]:
        rows = [(whole(point["gpus"]), layout_words(point["layout"])) for point in points]
        print_table(console, ("GPUs", "the best layout"), rows, words=0, last_is_words=True)
    else:
        last = points[-1]
        where = f"{document['grows']} grows: on {whole(last['gpus'])} GPUs " if last["gpus"] > 1 else ""
        say(console, f"{where}{layout_words(last['layout'])}")


def _real_law(document: Document) -> Document | None:
    """The law over the first count of GPUs, where one GPU is too small for the step."""
    found: Document | None = None if document["one_gpu_fits"] else document["amdahl"]["over_first"]
    return found


def _chart(document: Document, console: Console) -> None:
    """A bar for each point, with a mark where Amdahl's curve is, and the mark alone beyond them."""
    points, amdahl = document["points"], document["amdahl"]
    first = _real_law(document)
    title(console, f"Efficiency over {'one GPU' if first is None else _first_gpus(first)}; │ is Amdahl's curve")
    if first is None:
        efficiencies = [point["efficiency"] for point in points]
        laws = [None if (s := point["speedup_by_the_law"]) is None else s / point["gpus"] for point in points]
        continued = amdahl["continued"]
    else:
        efficiencies = [point["efficiency_over_first"] for point in points]
        laws = [one["efficiency"] for one in first["curve"][: len(points)]]
        continued = first["curve"][len(points) :]
    most = max(1.0, *efficiencies)
    widest = max(len(whole(one["gpus"])) for one in [*points, *continued])
    rows: list[Row] = []
    cells = min(CHART_CELLS, max(console.width - BESIDE_CHART, 1))
    for point, efficiency, law in zip(points, efficiencies, laws, strict=True):
        gpus = Text(whole(point["gpus"]).rjust(widest))
        rows.append((gpus, _bar(efficiency, law, most, cells), percent(efficiency), _law(law)))
    for one in continued:
        gpus = Text(whole(one["gpus"]).rjust(widest), "dim")
        rows.append((gpus, _bar(0.0, one["efficiency"], most, cells), "", _law(one["efficiency"])))
    print_table(console, ("GPUs", "", "", "law"), rows, words=2)
    most_gpus = document["most_gpus"]
    if most_gpus is not None and any(one["gpus"] > most_gpus for one in continued):
        batch = f"{whole(document['job']['global_batch_size'])} sequences"
        say(
            console,
            f"{batch}, a micro-batch for each data-parallel rank, divide among at most {whole(most_gpus)} GPUs: beyond "
            "them the curve is the law's alone.",
        )


def _first_gpus(first: Document) -> str:
    return f"the first {whole(first['gpus'])} GPUs"


def _law(efficiency: float | None) -> Text:
    return Text("" if efficiency is None else percent(efficiency), "dim")


def _bar(efficiency: float, law: float | None, most: float, width: int) -> Text:
    filled = round(width * max(efficiency, 0.0) / most)
    cells = Text("█" * filled + " " * (width - filled), "cyan")
    if law is None:
        return cells
    at = min(max(round(width * law / most) - 1, 0), width - 1)
    return Text.assemble(cells[:at], ("│", "bold"), cells[at + 1 :])


def _amdahl(document: Document, console: Console) -> None:
    law = document["amdahl"]
    if law["serial_fraction"] is None:
        return
    if len(document["points"]) == 1:
        say(console, f"{NO_LAW}: s = {fraction(law['serial_fraction'])} is of it alone.")
        return
    if (first := _real_law(document)) is not None:
        _amdahl_over_first(document, first, console)
        return
    say(console, f"Amdahl's law through the points: {_ends(law, 'one')}")
    if document["best"]:  # layouts that differ obey no one law
        say(console, f"Its curve misses a point by {_small(law['worst_error'])}: the layouts differ.")
        return
    _trend(document["points"], console)
    if law["worst_error"] > NOT_THE_LAW and (shares := law["with_shares"]) is not None:
        s, limit = shares["serial_fraction"], shares["limit"]
        ends = "there is no limit" if limit is None else f"the limit is {_times(limit)}"
        say(
            console,
            f"Its curve misses a point by {percent(law['worst_error'])}. Were a share of the work "
            f"{percent(shares['share_efficiency'])} efficient on any number of GPUs, s = {fraction(s)} would miss by "
            f"{_small(shares['worst_error'])}, and {ends}.",
        )


def _ends(law: Document, one: str) -> str:
    """Where a law ends; `one` is what its speed-ups are over."""
    s = f"s = {fraction(law['serial_fraction'])}"
    if law["limit"] is None:
        return f"{s}. N GPUs are N times as fast as {one}, or more, and there is no limit."
    half = whole(law["gpus_at_half_efficiency"])
    return f"{s}, a limit of {_times(law['limit'])}, and half the efficiency lost at {half} GPUs."


def _amdahl_over_first(document: Document, first: Document, console: Console) -> None:
    """What can be run, and then what a GPU that is too small would say."""
    gpus, law = _first_gpus(first), document["amdahl"]
    ends = _ends(first, "one such group") if first["limit"] is None else _ends(first, "")
    misses = f"Its curve misses a point by {_small(first['worst_error'])}"
    differ = ": the layouts differ" if document["best"] else ""
    say(console, f"Amdahl's law over {gpus}, as if they were one: {ends} {misses}{differ}.")
    limit = "no limit" if law["limit"] is None else f"a limit of {_times(law['limit'])}"
    say(
        console,
        f"Over one GPU, which is too small for this step, the same law has s = {fraction(law['serial_fraction'])} and "
        f"{limit}, and misses by {_small(law['worst_error'])}: it is of a step that nobody can run.",
    )
    if not document["best"]:
        _trend(document["points"], console)


def _trend(points: Sequence[Document], console: Console) -> None:
    """What Karp and Flatt read off their fraction: serial work stays, overhead grows with the GPUs. Nothing, where it
    does not go one way.
    """
    found = [point["serial_fraction"] for point in points if point["serial_fraction"] is not None]
    if len(found) < 2 or max(found) <= 0:
        return
    first, last = found[0], found[-1]
    if found not in (sorted(found), sorted(found, reverse=True)):
        return
    if last < 0.8 * first:
        why = "most of the loss is divided with the work, as what is exchanged in each micro-batch is"
        say(console, f"It falls from {fraction(first)} to {fraction(last)}: {why}.")
    elif last > 1.25 * max(first, 0.0):
        why = "the loss grows with the GPUs, and the limit is lower than a curve through few of them says"
        say(console, f"It grows from {fraction(first)} to {fraction(last)}: {why}.")


def _serial(serial: Document, console: Console) -> None:
    title(console, f"What s = {fraction(serial['serial_fraction'])} consists of, on {whole(serial['gpus'])} GPUs")
    rows: list[Row] = []
    for part in serial["parts"]:
        rows.append((NAMES[part["part"]], duration(part["seconds"]), fraction(part["serial_fraction"])))
        if part["part"] == "exposed_communication":
            rows += list(_exchanges(serial["exchanges"]))
    print_table(console, PARTS, rows, words=1)
    if any(part["part"] == "uneven_compute" and part["seconds"] < 0 for part in serial["parts"]):
        say(console, f"Below 0: {LESS_THAN_A_SHARE}.", "dim")


def _exchanges(exchanges: Sequence[Document]) -> Iterator[Row]:
    for row in exchanges[:EXCHANGES_SHOWN]:
        what = f"  {row['kind']} of {row['what']}, {row['phase']}, over {row['axis']} ({row['link']})"
        cells = (what, duration(row["exposed_seconds"]), fraction(row["serial_fraction"]))
        yield tuple(Text(cell, "dim") for cell in cells)
    if (more := len(exchanges) - EXCHANGES_SHOWN) > 0:
        yield (Text(f"  {more} more: --json has every one", "dim"), "", "")


def _cuts(document: Document, console: Console) -> None:
    cuts = document["cuts"]
    if not cuts:
        return
    title(console, f"What each cut of it would buy, on {whole(document['serial']['gpus'])} GPUs")
    serial, point = document["serial"], document["points"][-1]
    s = serial["serial_fraction"]
    rows: list[Row] = [("as it is", duration(point["step_seconds"]), "", fraction(s), _limit(1 / s if s > 0 else None))]
    for cut in cuts:
        remark = " (a bound)" if cut["kind"] == "bound" else " (does not fit)" if cut["fits"] is False else ""
        faster = f"{cut['times_faster']:.3f}x"
        rows.append(
            (
                cut["what"] + remark,
                duration(cut["step_seconds"]),
                faster,
                fraction(cut["serial_fraction"]),
                _limit(cut["limit"]),
            )
        )
    print_table(console, CUTS, rows, words=1)
    print_list(
        console, "No cut here", (f"{each['cut'].replace('_', ' ')}: {each['why']}" for each in document["uncut"])
    )


def _limit(limit: float | None) -> str:
    return "none" if limit is None else _times(limit)


def _weak(document: Document, console: Console) -> None:
    points, law = document["weak"]["points"], document["weak"]["gustafson"]
    title(console, "Weak form: the batch grows with the GPUs")
    rows = [
        (whole(point["gpus"]), whole(point["global_batch_size"]), *_step(point, console), *_beside(point))
        for point in points
    ]
    headings = ("GPUs", "sequences", *_step_heading(console), "scaled\nspeed-up", *SPEEDUPS)
    print_table(console, headings, rows, words=0)
    if document["best"]:
        _layouts(document, points, console)
    if len(points) == 1 and law["serial_fraction"] is not None:
        say(console, f"{NO_LAW}: s = {fraction(law['serial_fraction'])} of the time is of it alone.")
    elif law["serial_fraction"] is not None:
        say(
            console,
            f"Gustafson's law through them: s = {fraction(law['serial_fraction'])} of the time on N GPUs, which makes "
            f"a speed-up of N - s(N - 1); it misses a point by {_small(law['worst_error'])}.",
        )


def _left_out(document: Document) -> Iterator[str]:
    """Each reason once, with the counts that it holds for, and the form where it is not of both."""
    where: dict[str, dict[str, list[Document]]] = {}
    for each in document["rejected"]:
        for why in each["why"]:
            where.setdefault(why, {}).setdefault(each["form"], []).append(each)
    for why, forms in where.items():
        counts = {form: ", ".join(whole(each["gpus"]) for each in several) for form, several in forms.items()}
        both = len(forms) == 2 and len(set(counts.values())) == 1
        for form, several in list(forms.items())[: 1 if both else 2]:
            needs = [gib(each["device_bytes"]) for each in several if each["device_bytes"] is not None]
            sizes = f" ({', '.join(needs)} of {gib(document['capacity_bytes'])} GiB)" if needs else ""
            yield f"{counts[form]} GPU{'s' * (counts[form] != '1')}{'' if both else f', {form} form'}: {why}{sizes}"


def _small(error: float) -> str:
    return percent(error) if error >= 0.001 else "less than 0.1%"


def _times(factor: float) -> str:
    """A speed-up, to three digits or the unit."""
    return f"{factor:,.0f}x" if factor >= 100 else f"{factor:.1f}x" if factor >= 10 else f"{factor:.2f}x"
