"""Waits until the threads that gloo works in have let go of the tensors of an exchange that has ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

THREAD = "pt_gloo_runloop"  # ProcessGroupGloo.cpp: its name, in the 15 characters that Linux keeps
PAUSE_SECONDS = 0.0001
QUIET_READINGS = 2  # between two works a thread may wait for a lock: it looks idle then, for less than a pause

_known: dict[int, list[Path]] = {}


def settle() -> None:
    """Return once all of gloo's threads sleep. They tell that an exchange has ended before they drop its tensors, and
    one that is not scheduled in between would free them later, unseen.
    """
    quiet = 0
    while quiet < QUIET_READINGS:
        time.sleep(PAUSE_SECONDS)
        quiet = 0 if any(map(_runs, _threads())) else quiet + 1


def _threads() -> list[Path]:
    """The state files of gloo's threads of this process; they are looked for again where there are more threads."""
    folder = Path("/proc/self/task")
    try:
        names = os.listdir(folder)
    except OSError:  # not Linux
        return []
    if len(names) not in _known:
        _known.clear()
        _known[len(names)] = [folder / name / "stat" for name in names if _name(folder / name) == THREAD[:15]]
    return _known[len(names)]


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:
        return ""


def _runs(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:
        return False
