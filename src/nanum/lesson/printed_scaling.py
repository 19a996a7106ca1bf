"""Part B on a page."""

from __future__ import annotations

from typing import Any

from nanum.lesson.arithmetic import DIVISIONS
from nanum.lesson.page import Page
from nanum.lesson.words import percent, processor, times
from nanum.units import format_seconds


def print_b(part: dict[str, Any], page: Page) -> None:
    page.title("B.title")
    job, shares, noise = part["job"], part["shares"], part["noise"]
    page.paragraph(
        "B.intro",
        device=processor(part["processor"], page.say),
        torch=part["torch"],
        layers=job["layers"],
        hidden=job["hidden"],
        rows=f"{job['rows']:,}",
        dtype=job["dtype"],
        base=format_seconds(part["base_seconds"]),
        repeats=part["repeats"],
    )
    rows = []
    for share in shares:
        low, high = share["quartile_seconds"]
        rows.append(
            [
                f"1/{share['n']}",
                f"{share['rows']:,}",
                format_seconds(share["median_seconds"]),
                f"{format_seconds(low)} – {format_seconds(high)}",
                percent(share["spread"]),
                percent(share["efficiency"]),
            ]
        )
    columns = [page.say(f"B.{name}") for name in ("share", "rows", "median", "middle_half", "spread", "efficiency")]
    page.table(columns, rows, right={0, 1, 2, 3, 4, 5})
    verdict = "B.noisy" if noise["noisy"] else "B.quiet"
    spread, limit = percent(noise["worst_spread"]), percent(noise["limit"])
    page.paragraph(verdict, n=noise["at"], spread=spread, limit=limit)
    page.paragraph("B.measured")
    _print_speedups(part["rows"], page)
    page.paragraph("B.ideal")
    _print_speedups(part["ideal"], page)
    smallest = shares[-1]["efficiency"]
    why = "B.why_noisy" if noise["noisy"] else "B.why_slower" if smallest < 1 else "B.why_faster"
    page.paragraph(why, efficiency=percent(smallest))
    _print_doubling(part, page)


def _print_speedups(rows: list[dict[str, Any]], page: Page) -> None:
    table = [
        [
            percent(row["serial_fraction"]),
            *(times(row["speedup"][str(n)]) for n in DIVISIONS),
            page.say("no_limit") if row["limit"] is None else f"{row['limit']:.0f}",
        ]
        for row in rows
    ]
    columns = [page.say("B.serial"), *(str(n) for n in DIVISIONS), page.say("B.limit")]
    page.table(columns, table, right=set(range(len(columns))))


def _print_doubling(part: dict[str, Any], page: Page) -> None:
    """Where the samples are too noisy to rely on, the law's figures come first."""
    doubling, noise = part["doubling"], part["noise"]
    before, (low, high) = str(doubling["from"]), doubling["measured_range"]
    rows = part["ideal" if noise["noisy"] else "rows"]
    by_fraction = {row["serial_fraction"]: row["speedup"] for row in rows}
    smaller = max(fraction for fraction in by_fraction if 0 < fraction < doubling["serial_fraction"])
    page.paragraph(
        "B.doubling_noisy" if noise["noisy"] else "B.doubling",
        before=before,
        after=doubling["to"],
        serial=percent(doubling["serial_fraction"]),
        measured=times(doubling["measured"]),
        low=times(low),
        high=times(high),
        spread=percent(noise["worst_spread"]),
        ideal=times(doubling["ideal"]),
        lesson=times(doubling["lesson"]),
        smaller=percent(smaller),
        cutting=times(by_fraction[smaller][before] / by_fraction[doubling["serial_fraction"]][before]),
    )
