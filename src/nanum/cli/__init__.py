"""The command line. Rooms below are imported inside a command, when it runs: `nanum --help` must not wait for numpy."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """The `nanum` command.

    Exits 0 (good), 1 (bad news), 2 (cannot be asked), 70 (a bug), 130 (interrupted), 141 (the reader of a pipe left).
    """
    try:
        from nanum.cli.commands import app
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    app(prog_name="nanum")
