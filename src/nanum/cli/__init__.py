"""The command line. Rooms below are imported inside a command, when it runs: `nanum --help` must not wait for numpy."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """The `nanum` command.

    Exits 0 (good), 1 (bad news), 2 (cannot be asked), 70 (a bug), 74 (cannot be written), 130 (interrupted), 141 (the
    reader of a pipe left).
    """
    if sys.stderr is None:  # closed by the caller (`2>&-`): print would turn to stdout instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it is held until the end
    if sys.stdout is None:
        print("nanum: stdout is closed", file=sys.stderr)
        raise SystemExit(74)
    # Nothing here multiplies large matrices in numpy: its BLAS need not start threads that spin while they wait.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from nanum.cli.answers import NOT_WRITTEN, drop_stdout, not_written
        from nanum.cli.commands import app
    except KeyboardInterrupt:
        print("nanum: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    try:
        app(prog_name="nanum")
    except KeyboardInterrupt:  # while the command line is read: a command's own ends in `answers`
        print("nanum: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except OSError as error:  # of help and usage: what a command writes ends in `answers`
        print(f"nanum: {not_written(error)}", file=sys.stderr)
        drop_stdout()
        raise SystemExit(NOT_WRITTEN) from None
