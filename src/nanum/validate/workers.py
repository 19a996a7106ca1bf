"""Rows answered by several processes, in the order of the rows.

The protocol: chunks of rows on a worker's stdin and their answers on its stdout, each as one pickle. A worker ends when
its stdin does, so none outlives who asked; it is in a session of its own, so that Ctrl-C is not its matter.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from nanum.errors import RunFailed
from nanum.processes import environment

WORKER = "nanum.validate.worker"
CHUNK = 8  # rows that a worker is handed at once: few, for some take a second and others a hundredth
ENOUGH = 64  # rows for which one more process is worth its start of half a second

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def jobs_for(rows: int) -> int:
    """Processes that are worth their start: all cores, but for few rows."""
    return max(1, min(cores(), rows // ENOUGH))


def in_order(
    answer: Callable[[T], R], rows: Sequence[T], progress: Callable[[int, int], None], jobs: int = 1
) -> list[R]:
    """The answer to each row. Of several `jobs` each has a copy of `answer`, and that alone remembers.

    Raises what `answer` raises, or where a process raised it, RuntimeError with what that said; RunFailed where a
    process was killed.
    """
    if jobs == 1 or len(rows) <= 1:
        found = []
        for row in rows:
            found.append(answer(row))
            progress(len(found), len(rows))
        return found
    chunks = [rows[i : i + CHUNK] for i in range(0, len(rows), CHUNK)]
    answers: list[list[R]] = [[] for _ in chunks]
    done = 0
    for i, said in _answered(answer, chunks, min(jobs, len(chunks))):
        answers[i] = said
        done += len(said)
        progress(done, len(rows))
    return [each for chunk in answers for each in chunk]


def _answered(answer: Callable[[T], R], chunks: Sequence[Sequence[T]], jobs: int) -> Iterator[tuple[int, list[R]]]:
    """Each chunk's number and answers, as they come."""
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in range(len(chunks)):
        todo.put(i)
    said: queue.SimpleQueue[tuple[int, Any] | Exception] = queue.SimpleQueue()

    def ask(process: subprocess.Popen[bytes]) -> None:
        """Hand one worker chunk after chunk until none is left."""
        try:
            _send(process, answer)
            with contextlib.suppress(queue.Empty):
                while True:
                    i = todo.get_nowait()
                    _send(process, chunks[i])
                    said.put((i, _received(process)))
        except Exception as error:  # raised again where the answers are read
            said.put(error)

    with contextlib.ExitStack() as stack:
        for _ in range(jobs):
            stack.enter_context(_started(ask))
        for _ in chunks:
            found = said.get()
            if isinstance(found, Exception):
                raise found
            yield found


@contextlib.contextmanager
def _started(ask: Callable[[subprocess.Popen[bytes]], None]) -> Iterator[None]:
    """A worker, and a thread that asks it; when this is left both have ended."""
    with subprocess.Popen(
        [sys.executable, "-m", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        start_new_session=True,
    ) as process:
        thread = threading.Thread(target=ask, args=[process], daemon=True)
        try:
            thread.start()
            yield
        finally:
            process.kill()
            if thread.ident is not None:  # an interrupt may come before it is started
                thread.join()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _send(process: subprocess.Popen[bytes], what: Any) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # why it is gone is said by what does not come back
        pickle.dump(what, process.stdin)
        process.stdin.flush()


def _received(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    try:
        kind, what = pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError):
        code = process.wait()
        raise RunFailed(
            f"{WORKER} was killed by signal {-code} (out of memory?)" if code < 0 else f"{WORKER} ended with {code}"
        ) from None
    if kind == "failed":
        raise RuntimeError(what)
    return what
