"""From the user's words to what `validate` compares and draws. Every reason why it cannot is raised at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from nanum import files
from nanum.cli.reader import Reader
from nanum.errors import Refused, cut_short
from nanum.validate import read
from nanum.validate.rows import Row
from nanum.validate.workers import cores, jobs_for

Kind = Literal["svg", "png"]


@dataclass(frozen=True)
class Plot:
    file: Path
    kind: Kind
    force: bool


@dataclass(frozen=True)
class Validating:
    """The rows, in how many processes they are answered, and what is drawn of the answer."""

    rows: list[Row]
    jobs: int
    plot: Plot | None


@dataclass(frozen=True)
class Words:
    """As the user said them."""

    file: str | None
    plot: str | None
    force: bool
    jobs: str | None


def question(said: Words) -> Validating:
    """Read what is asked, before anything is predicted. Raises Refused with every reason."""
    reader = Reader({"jobs": said.jobs})
    jobs = reader.whole("jobs", 0)
    plot = _plot(said, reader)
    rows: list[Row] = []
    try:
        rows = read(None if said.file is None else Path(said.file))
    except Refused as refused:
        reader.reasons.extend(refused.reasons)
    if reader.reasons:
        raise Refused(reader.reasons)
    return Validating(rows, min(jobs, cores()) or jobs_for(len(rows)), plot)


def _plot(said: Words, reader: Reader) -> Plot | None:
    """Where to draw, if that can be done."""
    if said.plot is None:
        if said.force:
            reader.reasons.append("--force: replaces the file of --plot, which is not said")
        return None
    from nanum.report import charts

    file = Path(said.plot)
    kind = next((kind for kind in get_args(Kind) if file.suffix.lower() == f".{kind}"), None)
    if kind is None:
        reader.reasons.append(f"--plot {cut_short(said.plot)}: must end in .svg or .png")
        return None
    try:
        files.check_writable(file, force=said.force)
    except Refused as refused:
        reader.reasons.extend(refused.reasons)
    try:
        charts.check()
    except Refused as refused:
        reader.reasons.extend(refused.reasons)
    return Plot(file, kind, said.force)


def draw(document: Mapping[str, Any], asked: Validating) -> None:
    """Write the plot that is asked for, or say on stderr that there is nothing to draw."""
    if asked.plot is None:
        return
    from nanum.report.charts import predicted_against_measured

    picture = predicted_against_measured(document, asked.plot.kind)
    if picture is None:
        print(f"nanum: {asked.plot.file} is not written: no run was compared", file=sys.stderr)
        return
    files.write_whole(asked.plot.file, picture, force=asked.plot.force)
