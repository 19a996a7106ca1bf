"""The lesson's measurements: `nanum.live.bench`, run as a process. Torch is never imported here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanum import processes
from nanum.processes import Progress


def bench(arguments: Sequence[str], progress: Progress) -> dict[str, Any]:
    """The document of `python -m nanum.live.bench ARGUMENTS`. Raises as `processes.run` does."""
    return processes.run("nanum.live.bench", arguments, progress)


def device_name(device: dict[str, Any]) -> str:
    """`cpu (AMD EPYC, 1 thread)`, `cuda (NVIDIA H100 80GB HBM3)`, as a document has it."""
    threads = device["threads"]
    counted = f", {threads} thread{'s' if threads > 1 else ''}" if threads else ""
    return f"{device['kind']} ({device['name']}{counted})"
