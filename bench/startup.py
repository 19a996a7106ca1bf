"""Whole commands, from a cold process to the last line: what a person waits for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from bench.timing import Result, repeat

COMMANDS = (
    (("--help",), 0.3),
    (("plan", "llama-3.1-70b", "8x8xh100-sxm"), 1.0),
    (("predict", "llama-3.1-70b", "8x8xh100-sxm", "--tp", "8", "--recompute", "full"), 1.0),
)


def commands() -> Iterator[Result]:
    for words, asked in COMMANDS:
        yield _command(words, asked)


def _command(words: tuple[str, ...], most_seconds: float) -> Result:
    def run() -> None:
        done = subprocess.run([sys.executable, "-m", "nanum", *words], capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            sys.exit(f"nanum {' '.join(words)}: {done.stderr}")

    return Result(f"nanum {' '.join(words)}"[:48], repeat(run), most_seconds=most_seconds)
