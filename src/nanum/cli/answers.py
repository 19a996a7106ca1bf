"""How a command ends: its exit code, and what is said on stderr. Only the answer goes to stdout."""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from nanum.errors import Refused, RunFailed, printable

if TYPE_CHECKING:
    from rich.console import Console

    from nanum.cluster import Cluster

GOOD, BAD_NEWS, REFUSED = 0, 1, 2
BUG, NOT_WRITTEN = 70, 74  # sysexits.h EX_SOFTWARE and EX_IOERR: 1 would read as an answer
INTERRUPTED = 128 + 2  # as a shell reports SIGINT
BROKEN_PIPE = 128 + 13  # as a shell reports SIGPIPE

NARROWEST_COLUMNS = 40

P = ParamSpec("P")


def ends(command: Callable[P, int]) -> Callable[P, None]:
    """Turn what a command returns or raises into an exit code. A traceback is shown for bugs, under NANUM_DEBUG=1."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        raise typer.Exit(_exit_code(lambda: command(*args, **kwargs)))

    wrapped.__annotations__["return"] = None
    return wrapped


def _exit_code(command: Callable[[], int]) -> int:
    try:
        code = command()
        sys.stdout.flush()  # here, where a broken pipe can still be caught
        return code
    except Refused as refused:
        for reason in refused.reasons:
            print(f"nanum: {printable(reason)}", file=sys.stderr)
        return REFUSED
    except RunFailed as failed:
        for line in str(failed).splitlines():
            print(f"nanum: {printable(line)}", file=sys.stderr)
        return BAD_NEWS
    except KeyboardInterrupt:
        print("nanum: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        drop_stdout()  # the reader has gone, as in `nanum plan … | head`
        return BROKEN_PIPE
    except OSError as error:
        drop_stdout()
        print(f"nanum: {not_written(error)}", file=sys.stderr)
        return NOT_WRITTEN
    except typer.Exit:
        raise
    except Exception as error:
        if os.environ.get("NANUM_DEBUG") == "1":
            raise
        what = f"{type(error).__name__}: {error}"
        print(f"nanum: this is a bug in nanum: {what} (NANUM_DEBUG=1 shows where)", file=sys.stderr)
        return BUG


def warn(cluster: Cluster, about: Iterable[str] | None = None) -> None:
    """Say on stderr, in a line each, what one should know of a cluster; of itself what is doubted of the steps that its
    file rests on.
    """
    for words in cluster.doubts if about is None else about:
        print(f"nanum: warning: {printable(f'{cluster.name}: {words}')}", file=sys.stderr)


def not_written(error: OSError) -> str:
    """What could not be written and why, without Python's number for it."""
    what = error.filename or "stdout"
    return f"{what} could not be written: {error.strerror or error}"


def drop_stdout() -> None:
    """Python flushes stdout once more when it exits: let what is left in it go into nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout. Infinity and not-a-number become null."""
    import json

    print(json.dumps(_plain(document), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    """The same value made of what JSON knows; numpy's scalars and arrays answer to `tolist`."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if value is None or isinstance(value, str | int):
        return value
    return _plain(value.tolist())


def stdout_console() -> Console:
    """For tables: colours on a terminal only; 80 columns where the width is unknown, and never fewer than 40."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no middle dot gets a question mark

    class Pipe(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1, which is an answer here
            raise BrokenPipeError

    console = Pipe(highlight=False)
    console.width = max(console.width, NARROWEST_COLUMNS)
    return console
