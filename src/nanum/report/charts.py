"""Predicted against measured, as a picture: every published run, on scales where equal ratios are equal distances."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from nanum.errors import Refused
from nanum.units import GIB

if TYPE_CHECKING:
    import altair

Kind = Literal["svg", "png"]
Row = Mapping[str, Any]

MISSING = "a plot needs altair and vl-convert-python: pip install 'nanum[plot]'"
PNG_SCALE = 2.0  # dots a pixel, so that text is sharp

COLOURS = (
    "#8d97a8", "#4269d0", "#e8590c", "#2f9e44", "#c2255c", "#e0a100", "#7048e8", "#0c8599", "#8a5a3c", "#f06595",
    "#1b4f72", "#94b92c", "#343a40",
)  # fmt: skip
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
"""Given to sources from the one of most runs on, so that many points are the pale ones. Thirteen colours and seven
shapes have no common divisor: 91 sources are told apart by the two together.
"""
INK, FAINT, GRID = "#1b1e23", "#6b7280", "#eceef1"
SIDE, STRIP = 430, 220  # pixels of a square panel, and the height of the errors below it

BANDS: tuple[tuple[float, list[int]], ...] = ((0.1, [6, 3]), (0.2, [2, 3]))
"""Errors that have lines, and their dashes."""
FURTHEST = (0.4, 2.5)  # ratios of predicted and measured that the errors' panel ends at
ERRORS = (-0.5, -0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.5, 1.0)  # that are written there
PANELS = {"step_seconds": ("Step time", "s", 1.0), "memory_bytes": ("Memory of a GPU", "GiB", GIB)}
SUBTITLE = (
    "Each point is a run that its source published. Solid line: predicted as measured; dashed: 10 % off; dotted: 20 %.",
    "Above, both in their unit; below, the error of the same runs, those below -60 % and above +150 % at the edge.",
)


def check() -> None:
    """Whether a picture can be made here. Raises Refused where a package is missing."""
    try:
        import altair  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError:
        raise Refused(MISSING) from None


def predicted_against_measured(document: Mapping[str, Any], kind: Kind) -> bytes | None:
    """A `validate` document as a whole file of that kind; None where no run was compared.

    Raises Refused where a package is missing.
    """
    check()
    rows = [row for row in document["rows"] if row["measured"] is not None]
    if not rows:
        return None
    chart = _chart(rows)
    if kind == "svg":
        text = io.StringIO()
        chart.save(text, format="svg")
        return text.getvalue().encode("utf-8")
    image = io.BytesIO()
    chart.save(image, format="png", scale_factor=PNG_SCALE)
    return image.getvalue()


def _chart(rows: Sequence[Row]) -> altair.ConcatChart:
    import altair as alt

    sources = [source for source, _ in Counter(row["source"] for row in rows).most_common()]
    panels = [_panel(name, rows, sources) for name in PANELS if any(row["quantity"] == name for row in rows)]
    title = alt.TitleParams(
        "Published runs beside their predictions",
        subtitle=list(SUBTITLE),
        fontSize=18,
        anchor="start",
        offset=18,
        color=INK,
        subtitleColor=FAINT,
        subtitleFontSize=12,
        subtitlePadding=6,
    )
    return (
        alt.hconcat(*panels, spacing=44, title=title)
        .configure(font="DejaVu Sans, Helvetica, Arial, sans-serif", background="white", padding=24)
        .configure_view(stroke=None)
        .configure_axis(
            gridColor=GRID, domainColor=FAINT, tickColor=FAINT, labelColor=INK, titleColor=INK,
            labelFontSize=11, titleFontSize=12, titleFontWeight="normal", titlePadding=10,
        )
        .configure_legend(labelFontSize=11, titleFontSize=12, symbolSize=70, rowPadding=4, labelColor=INK)
    )  # fmt: skip


def _panel(quantity: str, rows: Sequence[Row], sources: list[str]) -> altair.VConcatChart:
    """One quantity: predicted over measured, and their errors below."""
    import altair as alt

    name, unit, size = PANELS[quantity]
    found = [row for row in rows if row["quantity"] == quantity]
    many = Counter(row["source"] for row in found)
    found.sort(key=lambda row: -many[row["source"]])  # the few lie on the many
    points = [
        {
            "source": row["source"],
            "measured": row["measured"] / size,
            "predicted": row["predicted"] / size,
            "ratio": min(max(row["predicted"] / row["measured"], FURTHEST[0]), FURTHEST[1]),
        }
        for row in found
    ]
    low, high = _limits([point[key] for point in points for key in ("measured", "predicted")])
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    ticks = _ticks(low, high)
    x = alt.X("measured:Q", scale=scale, axis=alt.Axis(values=ticks, title=f"measured ({unit})", format="~g"))
    y = alt.Y("predicted:Q", scale=scale, axis=alt.Axis(values=ticks, title=f"predicted ({unit})", format="~g"))
    ratio = alt.Y(
        "ratio:Q",
        scale=alt.Scale(type="log", domain=list(FURTHEST), nice=False),
        axis=alt.Axis(
            values=[1 + error for error in ERRORS],
            title="predicted / measured - 1",
            labelExpr="datum.value == 1 ? '0' : format(datum.value - 1, '+.0%')",
            labelFontSize=10,
            labelOverlap=False,
            grid=False,
        ),
    )
    looks = {
        channel: kind(
            "source:N",
            scale=alt.Scale(domain=sources, range=[among[i % len(among)] for i in range(len(sources))]),
            legend=alt.Legend(title="source", values=sorted(sources)),
        )
        for channel, kind, among in (("color", alt.Color, COLOURS), ("shape", alt.Shape, SHAPES))
    }
    marks = alt.Chart(alt.Data(values=points)).mark_point(filled=True, size=34, opacity=0.7, strokeWidth=0)
    square = alt.layer(*_lines(low, high), marks.encode(x=x, y=y, **looks)).properties(
        width=SIDE,
        height=SIDE,
        title=alt.TitleParams(
            f"{name}: {len(points):,} run{'s' * (len(points) != 1)}",
            anchor="start",
            frame="group",
            color=INK,
            fontSize=14,
            offset=10,
        ),
    )
    strip = alt.layer(*_levels(), marks.encode(x=x, y=ratio, **looks)).properties(width=SIDE, height=STRIP)
    return alt.vconcat(square, strip, spacing=16)


def _lines(low: float, high: float) -> list[altair.Chart]:
    """The diagonal, and parallels to it at each error's ratio, cut at the panel's edges."""
    import altair as alt

    def line(ratio: float, **style: Any) -> altair.Chart:
        start, end = max(low, low / ratio), min(high, high / ratio)
        ends = [{"measured": at, "predicted": at * ratio} for at in (start, end)]
        return alt.Chart(alt.Data(values=ends)).mark_line(color=FAINT, **style).encode(x="measured:Q", y="predicted:Q")

    off = [line(ratio, strokeWidth=0.9, strokeDash=dash) for error, dash in BANDS for ratio in (1 + error, 1 - error)]
    return [*off, line(1.0, strokeWidth=1.4)]


def _levels() -> list[altair.Chart]:
    """The same lines where the ratio is the height."""
    import altair as alt

    def level(ratio: float, **style: Any) -> altair.Chart:
        return alt.Chart(alt.Data(values=[{"ratio": ratio}])).mark_rule(color=FAINT, **style).encode(y="ratio:Q")

    off = [level(ratio, strokeWidth=0.9, strokeDash=dash) for error, dash in BANDS for ratio in (1 + error, 1 - error)]
    return [*off, level(1.0, strokeWidth=1.4)]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """A little beyond the least and the most."""
    return min(values) / 1.25, max(values) * 1.25


def _ticks(low: float, high: float) -> list[float]:
    """1, 10, 100, … within the limits; 2 and 5 times these too, where those are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1,) if high / low > 3000 else (1, 2, 5)
    return [tick for power in decades for step in steps if low <= (tick := step * 10.0**power) <= high]
