"""Runs the ranks of one machine, forked from a process that has imported torch, and ends them whatever happens.

A rank that fails, dies, hangs or runs out of memory ends the run, with one message: the first cause, not what followed
from it at other ranks. A rank that has failed or is done is kept, with its connections, until the run is over: what the
others then lack they wait for, and do not report. Only a rank that died has closed its connections on them.

However a run ends, its ranks have ended and its folder is gone. What ranks print goes into files without a name, and
they meet at a file in the run's own folder, so that two runs at once never meet each other. Where this process is
killed, Linux kills its ranks, and its folder lies in that of the process that asked for the run (`nanum.processes`),
which removes it; where that one is killed, this one ends and removes both.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nanum.errors import Refused, RunFailed, cut_short
from nanum.live.pulse import Beat, Board, Pulse, behind, laggard
from nanum.live.rank import be_rank, debugging, end_with_parent, ran_out_of_memory, returned
from nanum.processes import OWNER, run_folder, signals_unwind

TICK_SECONDS = 0.05
SETTLE_SECONDS = 0.2  # after a failure, for an earlier one to be read
LOST_PEER_SETTLE_SECONDS = 2.0  # after a rank says that it lost another, for that one's death to be seen
STACKS_SECONDS = 0.5  # for a rank that hangs to print where it is, under NANUM_DEBUG=1
LOOKS = 9  # at what a rank that hangs is doing, so far apart:
LOOK_SECONDS = 0.05
LEAST_WORK = 0.01  # of a processor: a rank that sleeps, its library's threads with it, uses less
LAST_LINES, LONGEST_LINE = 8, 200  # of what a rank printed before it died, that the message repeats

DIED, RAISED, LOST_PEER = range(3)  # what is the cause of what, the cause first

# Taken out of the environment: it is meant for the process that was started, not for one that this starts.
_OWNER_PID, _, _OWNER_FOLDER = os.environ.pop(OWNER, "").partition(" ")


class RankFailed(RunFailed):
    """A rank ended a run: the text names the rank, how it ended, and its last operation."""


def run_ranks(entry: Callable[[int, Pulse, Path], Any], ranks: int, *, patience_seconds: float = 20.0) -> list[Any]:
    """Fork `ranks` ranks, let each do `entry(rank, pulse, folder)`, and return what each has returned (it is pickled).

    `pulse.beat(text)` says what a rank is about to do, `pulse.progress` how far the run is. `folder` is the run's own
    and gone afterwards; the ranks meet in it (`nanum.live.launch.join`). A run hangs when none of its ranks has beaten
    for `patience_seconds`: one that computes for longer must beat meanwhile, though on a busy machine it is given that
    much of a processor's time. What ranks print is not shown.

    To be called from the main thread, and before torch has computed anything: its threads do not survive a fork.

    Raises:
        RankFailed: a rank ended the run. NANUM_DEBUG=1 adds its traceback and what the ranks printed.
        Refused: there is no folder to write into, or a rank refused.
    """
    board = Board(ranks)
    started: list[_Rank] = []
    with signals_unwind(), owned(), run_folder() as folder:
        try:
            with _signals_wait() as mask:
                for number in range(ranks):
                    started.append(_fork(entry, number, board, folder, mask))  # noqa: PERF401 - each is known at once
            _watch(started, board, patience_seconds)
            return [pickle.loads(returned(folder, number).read_bytes()) for number in range(ranks)]
        finally:
            with _signals_wait():
                for rank in started:
                    rank.end()


class _Rank:
    """A forked rank, seen from the process that forked it."""

    def __init__(self, number: int, pid: int, report: int, output: IO[bytes]) -> None:
        self.number, self.pid = number, pid
        self.report = report  # a file descriptor: it says once that it is done, or how it failed
        self.output = output
        self._code: int | None = None

    def code(self) -> int | None:
        """Its exit code once it has ended, with a minus before a signal's number."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def end(self) -> None:
        if self.code() is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.report)
        self.output.close()

    def printed(self) -> str:
        return os.pread(self.output.fileno(), 1 << 20, 0).decode(errors="replace")


def _fork(entry: Callable[[int, Pulse, Path], Any], number: int, board: Board, folder: Path, mask: set[int]) -> _Rank:
    reads, writes = os.pipe()
    output = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - `_Rank.end` closes it
    supervisor = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or a rank has what is still in them as well, and writes it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: see `run_ranks`
        try:
            pid = os.fork()
        except OSError as error:
            raise Refused(f"rank {number} cannot be started: {error.strerror}") from None
    if pid == 0:
        be_rank(entry, number, board.pulse(number), folder, supervisor, mask, writes, output)
    os.close(writes)
    return _Rank(number, pid, reads, output)


# --- watching


@dataclass(frozen=True, slots=True)
class _Failure:
    """How a rank failed."""

    rank: _Rank
    kind: int
    monotonic_seconds: float
    how: str
    trace: str = ""

    @property
    def settles_seconds(self) -> float:
        return LOST_PEER_SETTLE_SECONDS if self.kind == LOST_PEER else SETTLE_SECONDS


def _first(failures: list[_Failure]) -> _Failure:
    return min(failures, key=lambda failure: (failure.kind, failure.monotonic_seconds))


def _watch(started: list[_Rank], board: Board, patience_seconds: float) -> None:
    """Returns when all ranks are done. Raises for the first that never will be."""
    running = {rank.number: rank for rank in started}
    moved, since = time.monotonic(), 0.0
    before: dict[int, float] = {}  # what ranks had worked when one of them last moved
    with selectors.DefaultSelector() as reports:
        for rank in started:
            reports.register(rank.report, selectors.EVENT_READ, rank)
        while running:
            count = len(running)
            if failures := _ended(running, reports):
                failed = time.monotonic()
                while running and time.monotonic() < failed + _first(failures).settles_seconds:
                    failures += _ended(running, reports)
                raise RankFailed(_told(_first(failures), started, board))
            now = time.monotonic()
            beats = [board.read(number).monotonic_seconds for number in running]
            moved = max(now if len(running) < count else moved, *beats, 0.0)
            worked = {number: _processor_seconds(rank.pid) for number, rank in running.items()}
            if moved > since:
                since, before = moved, worked
            if now > moved + patience_seconds and not _waits_its_turn(before, worked, now - moved, patience_seconds):
                raise RankFailed(_hang(running, started, board))
            if _orphaned():  # Linux tells by a signal
                raise SystemExit(128 + signal.SIGTERM)


def _waits_its_turn(
    before: Mapping[int, float], worked: Mapping[int, float], seconds: float, patience_seconds: float
) -> bool:
    """Whether a rank works, but on a machine so busy that it has not had `patience_seconds` of a processor yet."""
    used = [now - before.get(number, now) for number, now in worked.items()]
    return any(LEAST_WORK * seconds < mine < patience_seconds for mine in used)


def _processor_seconds(pid: int) -> float:
    """What Linux says that a process has worked, all its threads; 0 elsewhere."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ended(running: dict[int, _Rank], reports: selectors.BaseSelector) -> list[_Failure]:
    """Wait for a moment, and take those that are done, or have failed, out of `running`."""
    failures = []
    for key, _ in reports.select(TICK_SECONDS):
        reports.unregister(key.fd)
        rank: _Rank = key.data
        if not (raw := os.read(rank.report, 1 << 16)):
            continue  # it has died, or is about to
        del running[rank.number]
        said = json.loads(raw)
        if "refused" in said:
            raise Refused(said["refused"])
        if said:
            kind = LOST_PEER if said["lost_peer"] else RAISED
            failures.append(_Failure(rank, kind, said["monotonic_seconds"], said["how"], said["trace"]))
    for rank in [*running.values()]:
        if (code := rank.code()) is not None:
            del running[rank.number]
            failures.append(_Failure(rank, DIED, time.monotonic(), _death(code, rank.printed())))
    return failures


def _orphaned() -> bool:
    return bool(_OWNER_PID) and os.getppid() != int(_OWNER_PID)


# --- what is told


def _told(failure: _Failure, started: list[_Rank], board: Board) -> str:
    rank = failure.rank
    lines = [f"rank {rank.number} {failure.how}{_after(board.read(rank.number))}"]
    if failure.kind == DIED and rank.code() != -signal.SIGKILL and not debugging():
        printed = [line for line in rank.printed().splitlines() if line.strip() and not line.startswith("[Gloo]")]
        lines += [f"  {cut_short(line, LONGEST_LINE)}" for line in printed[-LAST_LINES:]]
    return "\n".join([*lines, *failure.trace.splitlines(), *_printed(started)] if debugging() else lines)


def _after(last: Beat) -> str:
    return f", after: {last.text}" if last.text else ", before its first operation"


def _death(code: int, printed: str) -> str:
    how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    if ran_out_of_memory(printed):
        return f"ran out of memory and {how}"
    return f"{how} (out of memory?)" if code == -signal.SIGKILL else how


def _hang(running: Mapping[int, _Rank], started: list[_Rank], board: Board) -> str:
    beats = {number: board.read(number) for number in running}
    stopped = [number for number, rank in running.items() if "T" in _states(rank.pid)]
    number = stopped[0] if stopped else laggard(beats)
    rank, last = running[number], beats[number]
    waited_seconds = time.monotonic() - last.monotonic_seconds
    doing = _doing(rank.pid)
    how = f"hangs: it has not moved for {waited_seconds:.0f} s{f' ({doing})' if doing else ''}{_after(last)}"
    waiting = [other for other in beats if number in behind(other, beats)]
    gone = behind(number, {**beats, **{rank.number: board.read(rank.number) for rank in started}})
    if waiting:
        how += f"; rank {waiting[0]} waits for it in: {beats[waiting[0]].text}"
    elif gone and gone[0] not in beats:
        how += f"; rank {gone[0]}, which it waits for, is done"
    if debugging():
        os.kill(rank.pid, signal.SIGUSR1)  # faulthandler prints its stacks
        time.sleep(STACKS_SECONDS)
    return "\n".join([f"rank {number} {how}", *_printed(started)])


def _doing(pid: int) -> str:
    """What Linux knows of a process that has not moved, by several looks at it. Elsewhere nothing.

    Who computes is always ready to, however busy the machine; a thread of who sleeps may wake, and wait there for
    its turn. One look may be a page that computing waits for.
    """
    looks = []
    for _ in range(LOOKS):
        states = _states(pid)
        if "T" in states:
            return "stopped"
        if states:
            looks.append("R" in states)
        time.sleep(LOOK_SECONDS)
    if not looks:
        return ""
    return "computing" if looks.count(False) <= 1 else "asleep"


def _states(pid: int) -> set[str]:
    """Of all its threads: R is running or ready to, S asleep, T stopped (proc(5))."""
    states = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            states.add(thread.read_text().rpartition(")")[2].split()[0])
    return states


def _printed(started: list[_Rank]) -> list[str]:
    """Under NANUM_DEBUG=1, all that the ranks printed."""
    if not debugging():
        return []
    return [f"[rank {rank.number}] {line}" for rank in started for line in rank.printed().splitlines()]


# --- what is left behind: nothing


@contextlib.contextmanager
def owned() -> Iterator[None]:
    """Where `nanum.processes` started this process: end with the one that asked for it, and then remove its folder."""
    if _OWNER_PID:
        end_with_parent(int(_OWNER_PID), signal.SIGTERM)
    try:
        yield
    finally:
        if _orphaned():
            shutil.rmtree(_OWNER_FOLDER, ignore_errors=True)


@contextlib.contextmanager
def _signals_wait() -> Iterator[set[int]]:
    """While ranks are forked or ended: no signal may come between. Yields what was blocked before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
