"""From the user's words to a step that he observed, and from that to the answer of the machine so calibrated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanum.cli import words
from nanum.cli.measuring import cluster_file, say_lost_comments
from nanum.cli.reader import Flags, Reader
from nanum.errors import Refused, cut_short
from nanum.layout import Layout
from nanum.units import parse

if TYPE_CHECKING:
    from nanum.prediction import Prediction

LEAST_SECONDS, MOST_SECONDS = 1e-6, 1e6
"""Of a step: between a microsecond and some eleven days."""


@dataclass(frozen=True)
class Observed:
    """A step's seconds, in each run of it; and where the machine that it makes is to be written, if anywhere."""

    runs: tuple[float, ...]
    file: Path | None
    force: bool

    @property
    def seconds(self) -> float:
        """The mean of the runs."""
        return sum(self.runs) / len(self.runs)


def question(model: str, cluster: str, flags: Flags) -> tuple[words.Question, Layout, Observed | None]:
    """Read what `predict` asks. Raises Refused with every reason."""
    reader = Reader({})
    observed = _observed(flags, reader)
    try:
        asked, layout = words.question_and_layout(model, cluster, flags)
    except Refused as refused:
        raise Refused([*refused.reasons, *reader.reasons]) from None
    if reader.reasons:
        raise Refused(reader.reasons)
    return asked, layout, observed


def _observed(flags: Flags, reader: Reader) -> Observed | None:
    said: Any = flags.get("observed") or ()
    output, force = flags.get("output"), bool(flags.get("force"))
    runs = [seconds for word in said if (seconds := _seconds(str(word), reader)) is not None]
    if not said:
        if output is not None:
            reader.reasons.append("-o FILE.toml: is for --observed, which makes a cluster to write")
        elif force:
            reader.reasons.append("--force: replaces the file of -o, which is not said")
        return None
    file = None if output is None else cluster_file(str(output), reader, force=force)
    if output is None and force:
        reader.reasons.append("--force: replaces the file of -o, which is not said")
    return Observed(tuple(runs), file, force) if runs else None


def _seconds(word: str, reader: Reader) -> float | None:
    """A step's seconds; None, and why, where they are none."""
    try:
        seconds = parse(word, "seconds")
    except ValueError as error:
        why, write, _ = str(error).partition(" (write")
        reader.reasons.append(f"--observed {cut_short(why)}{' (write 3.2 s or 850 ms)' if write else ''}")
        return None
    if LEAST_SECONDS <= seconds <= MOST_SECONDS:
        return seconds
    reader.reasons.append(f"--observed {cut_short(word, 24)}: no step takes that (from 1 us to {MOST_SECONDS:,.0f} s)")
    return None


def answer(predicted: Prediction, observed: Observed) -> tuple[Prediction, dict[str, Any]]:
    """The prediction of the calibrated machine, and its document; the machine is written where that is asked for.

    Raises Refused where nothing can be learned, or the file cannot be written.
    """
    from nanum.calibration import calibrate
    from nanum.calibration.document import document
    from nanum.calibration.implied import implied
    from nanum.cli.progress import Progress
    from nanum.measure import save

    found = calibrate(predicted, observed.seconds)
    with Progress("layouts") as progress:
        best = implied(found, progress)
    if observed.file is not None:
        machine = replace(found.cluster, name=observed.file.stem)
        if save(machine, observed.file, force=observed.force):
            say_lost_comments(observed.file)
    written = None if observed.file is None else str(observed.file)
    return found.after, document(found, best, written, observed.runs)
