"""Runs the lesson's measurements: `nanum.live.bench` as a process that speaks JSON. Torch is never imported here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from nanum.errors import Refused

NO_TORCH, NO_DEVICE = 3, 4  # exit codes of nanum.live.bench
MISSING_TORCH = "this part measures with PyTorch, which is not installed: pip install 'nanum[torch]'"

Progress = Callable[[int, int], None]


def torch_is_missing() -> bool:
    """Whether torch cannot be found; a torch that is found and does not import is told by the process."""
    return importlib.util.find_spec("torch") is None


def bench(arguments: Sequence[str], progress: Progress) -> dict[str, Any]:
    """Run `python -m nanum.live.bench ARGUMENTS` and read its document; `progress(done, total)` is called as it goes.

    Raises:
        Refused: there is no torch, or not the device asked for.
        RuntimeError: the process failed, with what it said.
    """
    if torch_is_missing():
        raise Refused([MISSING_TORCH])
    said: list[str] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8") as answer:
        with _started(arguments, answer) as process:
            assert process.stderr is not None
            try:
                for line in process.stderr:
                    match line.split():
                        case ["progress", done, total]:
                            progress(int(done), int(total))
                        case _:
                            said.append(line.rstrip())
            except BaseException:
                process.kill()
                raise
        if process.returncode == NO_TORCH:
            raise Refused([f"{MISSING_TORCH} ({said[-1]})" if said else MISSING_TORCH])
        if process.returncode == NO_DEVICE:
            raise Refused(said)
        if process.returncode:
            ended = f"nanum.live.bench {' '.join(arguments)} ended with {process.returncode}"
            raise RuntimeError("\n".join([ended, *said]))
        answer.seek(0)
        document: dict[str, Any] = json.load(answer)
        return document


def _started(arguments: Sequence[str], answer: IO[str]) -> subprocess.Popen[str]:
    """Its stdout is a file: it is read only once the process has ended, and a pipe could fill up until then."""
    return subprocess.Popen(
        [sys.executable, "-m", "nanum.live.bench", *arguments],
        stdout=answer,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=_environment(),
    )


def device_name(device: dict[str, Any]) -> str:
    """`cpu (AMD EPYC, 1 thread)`, `cuda (NVIDIA H100 80GB HBM3)`, as a document has it."""
    threads = device["threads"]
    counted = f", {threads} thread{'s' if threads > 1 else ''}" if threads else ""
    return f"{device['kind']} ({device['name']}{counted})"


def _environment() -> dict[str, str]:
    """The process must find the same nanum, from wherever it was imported here."""
    found = str(Path(__file__).resolve().parents[2])
    others = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([found, others]) if others else found}
