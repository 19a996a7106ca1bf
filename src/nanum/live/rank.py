"""A forked rank from within: what it does before and after its work, and how it says that it failed."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

from nanum.errors import Refused, cut_short
from nanum.live.pulse import Pulse

LONGEST_MESSAGE, LONGEST_TRACE = 400, 8192  # characters
PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Said by gloo, NCCL and the store of a peer that has gone: it is the cause, not the rank that says so.
LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was closed",
    "broken pipe",
    "remote process exited",
    "ncclremoteerror",
    "timed out",
    "timeout",
)
OUT_OF_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "failed to allocate",
    "not enough memory",
    "out of memory",
    "bad_alloc",
)


def be_rank(
    entry: Callable[[int, Pulse, Path], Any],
    rank: int,
    pulse: Pulse,
    folder: Path,
    supervisor: int,
    mask: set[int],
    report: int,
    output: IO[bytes],
) -> NoReturn:
    """What a process does that was forked to be `rank`: its work, one report, and then it waits to be ended.

    `supervisor` is the process that it ends with, `mask` the signals to block, `report` and `output` where it says how
    its work ended and where all goes that it prints.
    """
    try:
        pulse.relay = os.dup(2)
        _settle_in(supervisor, mask, output)
        pulse.beat("")
        returned(folder, rank).write_bytes(pickle.dumps(entry(rank, pulse, folder)))
        os.write(report, b"{}")
    except BaseException as error:
        os.write(report, _said(error))
    while True:
        signal.pause()


def returned(folder: Path, rank: int) -> Path:
    """The file for what a rank's work returned."""
    return folder / f"returned-{rank}.pickle"


def debugging() -> bool:
    return os.environ.get("NANUM_DEBUG") == "1"


def end_with_parent(parent: int, number: int) -> None:
    """Have Linux send this process the signal `number` when its parent ends. Elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it had ended before
            os.kill(os.getpid(), number)


def how_it_failed(error: BaseException) -> str:
    """An exception as a message has it, after `rank 2 `."""
    if isinstance(error, SystemExit):
        return f"exited with code {error.code}"
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    said = cut_short(": ".join(filter(None, [type(error).__name__, message])), LONGEST_MESSAGE)
    if isinstance(error, MemoryError) or ran_out_of_memory(str(error)):
        return f"ran out of memory ({said})"
    return f"failed with {said}"


def ran_out_of_memory(said: str) -> bool:
    return any(phrase in said.lower() for phrase in OUT_OF_MEMORY)


def lost_a_peer(error: BaseException) -> bool:
    return any(phrase in str(error).lower() for phrase in LOST_PEER)


def _settle_in(supervisor: int, mask: set[int], output: IO[bytes]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all of them: the supervisor ends its ranks
    for number in (signal.SIGTERM, signal.SIGHUP):
        if callable(signal.getsignal(number)):  # as `signals_unwind` has it; what is ignored, by nohup, stays so
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    end_with_parent(supervisor, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # it leaves no core file
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    if debugging():
        faulthandler.enable(2)
        faulthandler.register(signal.SIGUSR1, 2)


def _said(error: BaseException) -> bytes:
    if isinstance(error, Refused):
        return json.dumps({"refused": error.reasons}).encode()
    try:
        said = {
            "how": how_it_failed(error),
            "lost_peer": lost_a_peer(error),
            "monotonic_seconds": time.monotonic(),
            "trace": "".join(traceback.format_exception(error))[-LONGEST_TRACE:],
        }
        return json.dumps(said).encode()
    except MemoryError:  # not even for this was there any
        return b'{"how": "ran out of memory", "lost_peer": false, "monotonic_seconds": 0, "trace": ""}'
