"""Part E on a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nanum.lesson.page import Page
from nanum.lesson.words import megabytes, percent

HELD = ("params", "grads", "optimizer_states", "saved", "allocated_peak")
COLUMNS = {"allocated_peak": "peak"}
STATES = HELD[:3]


def print_e(part: dict[str, Any], page: Page) -> None:
    page.title("E.title")
    model, job, ways = part["model"], part["job"], part["ways"]
    counts = {name: f"{model[name]:,}" for name in ("layers", "hidden", "vocab", "parameters")}
    page.paragraph(
        "E.intro",
        ranks=part["ranks"],
        torch=part["torch"],
        backend=part["backend"],
        sequences=job["sequences"],
        seq=job["seq_len"],
        precision=job["precision"],
        **counts,
    )
    for name, way in ways.items():
        formula = {key: f"{count:,}" for key, count in way["formula"].items()}
        formula["payload"] = formula.pop("payload_bytes")
        page.paragraph(
            f"E.formula.{name}",
            n=part["ranks"],
            layers=counts["layers"],
            parameters=counts["parameters"],
            **formula,
        )
    _print_run(ways, page)
    _print_sockets(ways, page)
    _print_held(part, page)
    _print_learned(part, page)
    wrong = [
        f"{page.say(name)} ({', '.join(checks)})"
        for name, way in ways.items()
        if (checks := [check["name"] for check in way["checks"] if not check["ok"]])
    ]
    if wrong:
        page.paragraph("E.bad_news", checks="; ".join(wrong))


def _print_run(ways: dict[str, Any], page: Page) -> None:
    page.paragraph("E.run")
    rows = [
        [
            page.say(name),
            f"{way['formula']['bytes']:,}",
            f"{way['predicted_bytes']:,}",
            f"{way['counted_bytes']:,}",
            f"{way['difference_bytes']:+,}" if way["difference_bytes"] else "0",
        ]
        for name, way in ways.items()
    ]
    columns = [page.say(f"E.{name}") for name in ("formula", "predicted", "counted", "difference")]
    page.table([page.say("way"), *columns], rows, right={1, 2, 3, 4})
    wrong = {name: way["rows_that_differ"] for name, way in ways.items() if way["rows_that_differ"]}
    if wrong:
        said = ", ".join(page.say("E.rows_of_way", way=page.say(name), rows=rows) for name, rows in wrong.items())
        page.paragraph("E.differs", ways=said)
    else:
        page.paragraph("E.equal", calls=sum(way["calls"] for way in ways.values()))
    beyond = [
        page.say(f"E.beyond.{name}", bytes=f"{way['beyond_formula_bytes']:,}")
        for name, way in ways.items()
        if way["beyond_formula_bytes"]
    ]
    if beyond:
        page.paragraph("E.beyond", said=" ".join(beyond))


def _print_sockets(ways: dict[str, Any], page: Page) -> None:
    if any(way["sockets"]["counted_bytes"] is None for way in ways.values()):
        page.paragraph("E.no_sockets")
        return
    said = [
        page.say(
            "E.sockets_of_way",
            way=page.say(name),
            counted=f"{way['sockets']['counted_bytes']:,}",
            predicted=f"{way['sockets']['predicted_bytes']:,}",
        )
        for name, way in ways.items()
    ]
    page.paragraph("E.sockets", said="; ".join(said))


def _print_held(part: dict[str, Any], page: Page) -> None:
    ways = part["ways"]
    page.paragraph("E.held")
    named = {"one_process": part["alone"]["held"], **{name: way["held"] for name, way in ways.items()}}
    rows = [
        [
            page.say(f"E.{name}" if name == "one_process" else name),
            str(rank["rank"]),
            *(megabytes(rank["bytes"][what]["counted_bytes"]) if what in rank["bytes"] else "" for what in HELD),
            _compared(rank["bytes"], page),
        ]
        for name, held in named.items()
        for rank in held
    ]
    columns = [page.say(f"E.{name}") for name in ("rank", *(COLUMNS.get(what, what) for what in HELD), "predicted")]
    page.table([page.say("E.way"), *columns], rows, right=set(range(1, 7)))
    figures = [figure for held in named.values() for figure in _figures(held)]
    exact = [figure for figure in figures if figure["exact"]]
    wrong = sum(not figure["ok"] for figure in exact)
    furthest = max((abs(_off(figure)) for figure in figures if not figure["exact"]), default=0.0)
    within = {"count": len(exact), "percent": percent(furthest, 2)}
    if wrong:
        page.paragraph("E.held_differs", wrong=wrong, **within)
    else:
        page.paragraph("E.held_equal", **within)
    alone = _states(part["alone"]["held"][0])
    kept = {name: percent(_states(way["held"][0]) / alone) for name, way in ways.items()}
    page.paragraph("E.states", data=kept["data_parallel"], tensor=kept["tensor_parallel"], pipeline=kept["pipeline"])
    tensor = ways["tensor_parallel"]["held"][0]["bytes"]
    if tensor["grads"]["counted_bytes"] > tensor["params"]["counted_bytes"]:
        page.paragraph("E.whole_gradient")


def _figures(held: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for rank in held:
        yield from rank["bytes"].values()


def _off(figure: dict[str, Any]) -> float:
    return float(figure["predicted_bytes"] / figure["counted_bytes"] - 1)


def _compared(figures: dict[str, Any], page: Page) -> str:
    """`equal`, or which of a rank's figures is not: the peak alone by its percentage."""
    if any(not figure["ok"] for figure in figures.values() if figure["exact"]):
        return page.say("E.disagrees")
    off = f"{100 * _off(figures['allocated_peak']):+.2f}%"
    return page.say("E.agrees") if off in ("+0.00%", "-0.00%") else page.say("E.peak_off", percent=off)


def _states(rank: dict[str, Any]) -> int:
    return sum(rank["bytes"][what]["counted_bytes"] for what in STATES)


def _print_learned(part: dict[str, Any], page: Page) -> None:
    """Whether the three trained what one process does, as `verify` judges it."""
    ways = part["ways"].values()
    learned = all(check["ok"] for way in ways for check in way["checks"] if check["name"] in ("loss", "gradients"))
    page.paragraph(
        "E.same" if learned else "E.not_same",
        steps=part["job"]["steps"],
        loss=_tiny(max(way["loss_error"] for way in ways)),
        gradient=_tiny(max(way["gradient_error"] or 0.0 for way in ways)),
    )


def _tiny(ratio: float) -> str:
    return f"{ratio:.0e}" if ratio else "0"
