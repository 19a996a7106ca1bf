"""Whole commands, from a cold process to the last line: what a person waits for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from bench.timing import Result, repeat

COMMANDS = (
    (("--help",), "0.3 s"),
    (("plan", "llama-3.1-70b", "8x8xh100-sxm"), "1 s"),
    (("predict", "llama-3.1-70b", "8x8xh100-sxm", "--tp", "8", "--recompute", "full"), "1 s"),
)


def commands() -> Iterator[Result]:
    for words, asked in COMMANDS:
        yield _command(words, asked)


def _command(words: tuple[str, ...], asked: str) -> Result:
    def run() -> None:
        done = subprocess.run([sys.executable, "-m", "nanum", *words], capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            sys.exit(f"nanum {' '.join(words)}: {done.stderr}")

    return Result(f"nanum {' '.join(words)}"[:48], repeat(run), asked=f"under {asked}")
