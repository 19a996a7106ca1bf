"""Runs a module as a process that speaks JSON: how the rooms that import no torch ask one that does.

The protocol. The question is one JSON document on stdin, or nothing. The answer is one JSON document on stdout. On
stderr `progress DONE TOTAL [WHAT]` is progress, and every other line is said to a person. The exit code is one of those
below.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from nanum.errors import Refused, RunFailed

REFUSED, NO_TORCH, NO_DEVICE, FAILED = 2, 3, 4, 5  # exit codes of what is run, besides 0
MISSING_TORCH = (
    "this is run with PyTorch, which is not installed: pip install 'nanum[torch]' "
    "(in a checkout: pip install -e '.[torch]')"
)

OWNER = "NANUM_OWNER"  # tells what is run `PID FOLDER`: who asked, and the folder of its temporary files
PATIENCE_SECONDS = 2.0  # between asking a process to end and ending it


class Progress(Protocol):
    """How much is done, how much there is and, where a run says so, what it is at."""

    def __call__(self, done: int, total: int, what: str = ..., /) -> None: ...


def torch_is_missing() -> bool:
    """Whether torch cannot be found; a torch that is found and does not import is told by the process."""
    return importlib.util.find_spec("torch") is None


def run(
    module: str, arguments: Sequence[str], progress: Progress, *, question: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run `python -m MODULE ARGUMENTS`, hand it `question`, and read its document; `progress` is called as it goes.

    It runs in a session of its own. However this call ends, be it by Ctrl-C, SIGTERM or SIGHUP, that session has ended
    before, and the folder of its temporary files is gone.

    Raises:
        Refused: there is no torch, or not the device asked for, or the question cannot be run here, as the process
            says; or there is no folder to write temporary files into.
        RunFailed: the run did not end well, as the process says.
        RuntimeError: the process failed otherwise, with what it said.
    """
    if torch_is_missing():
        raise Refused([MISSING_TORCH])
    said: list[str] = []
    with signals_unwind(), run_folder() as folder, _file(folder) as asked, _file(folder) as answer:
        if question is not None:
            json.dump(question, asked)
            asked.seek(0)
        with _started([sys.executable, "-m", module, *arguments], asked, answer, folder) as process:
            assert process.stderr is not None
            for line in process.stderr:
                match line.split(maxsplit=3):
                    case ["progress", done, total, *what] if done.isdecimal() and total.isdecimal():
                        progress(int(done), int(total), *(words.rstrip() for words in what))
                    case _:
                        said.append(line.rstrip())
            process.wait()
        if process.returncode:
            raise _failure(" ".join([module, *arguments]), process.returncode, said)
        answer.seek(0)
        document: dict[str, Any] = json.load(answer)
        return document


def _failure(command: str, code: int, said: list[str]) -> Exception:
    if code == NO_TORCH:
        return Refused([f"{MISSING_TORCH} ({said[-1]})" if said else MISSING_TORCH])
    misused = any(line.startswith("usage: ") for line in said)  # argparse ends with 2 as well: a mistake of the caller
    if code in (REFUSED, NO_DEVICE) and said and not misused:
        return Refused(said)
    if code == FAILED and said:
        return RunFailed("\n".join(said))
    if code == -9:
        return RunFailed("\n".join([f"{command} was killed by SIGKILL (out of memory?)", *said]))
    return RuntimeError("\n".join([f"{command} ended with {code}", *said]))


@contextlib.contextmanager
def _started(command: Sequence[str], asked: IO[str], answer: IO[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The process; when this is left it has ended, and all of its session has.

    Its stdin and stdout are files: what reads or writes the other end of a pipe could be busy with the third.
    """
    with subprocess.Popen(
        command,
        stdin=asked,
        stdout=answer,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=environment() | {"TMPDIR": str(folder), OWNER: f"{os.getpid()} {folder}"},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End the process, if it still runs, and whatever is left of its session."""
    try:
        if process.poll() is None:
            _signal_session(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_SECONDS)
    finally:  # also where one interrupt follows another
        patience_ends = time.monotonic() + PATIENCE_SECONDS
        while _signal_session(process, signal.SIGKILL) and time.monotonic() < patience_ends:
            process.poll()
            time.sleep(0.01)  # a process that was killed is still there until its parent, or init, has noticed
        process.wait()


def _signal_session(process: subprocess.Popen[str], number: int) -> bool:
    """Whether there was anybody to signal."""
    if not hasattr(os, "killpg"):  # Windows, which has no sessions
        process.kill()
        return process.poll() is None
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # PermissionError: macOS, where only ended processes are left
        return False
    return True


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process through its `finally` clauses, as Ctrl-C does: the first of them, once."""

    def end(number: int, frame: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [number for name in names if signal.getsignal(number := getattr(signal, name)) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # only the main thread may say what a signal does
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Around what a process does that was asked: what it refuses, and a run that failed, are lines on stderr and the
    exit code.
    """
    try:
        yield
    except Refused as refused:
        print("\n".join(refused.reasons), file=sys.stderr)
        sys.exit(REFUSED)
    except RunFailed as failed:
        print(failed, file=sys.stderr)
        sys.exit(FAILED)


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A folder for one run, which is gone afterwards. Raises Refused where it cannot be made."""
    folder = temporary_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def temporary_folder() -> Path:
    """A new folder for one run; whoever asked removes it. TMPDIR is taken at its word, not passed over for another.

    Raises:
        Refused: it cannot be made.
    """
    named = os.environ.get("TMPDIR")
    try:
        return Path(tempfile.mkdtemp(prefix="nanum-", dir=named or None))
    except OSError as error:
        where = f"TMPDIR={named}" if named else "the folder for temporary files"
        raise Refused(f"{where} cannot be written: {error.strerror or error}") from None


def _file(folder: Path) -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", dir=folder)


def environment() -> dict[str, str]:
    """This process's environment, with the same nanum to be found first, from wherever it was imported here."""
    found = str(Path(__file__).resolve().parents[1])
    others = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([found, others]) if others else found}
