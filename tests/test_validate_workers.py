"""Rows answered by several processes: the same document as by one, what a worker's end looks like, and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanum.errors import RunFailed
from nanum.validate import read, validate
from nanum.validate.rows import SHIPPED
from nanum.validate.workers import CHUNK, cores, in_order, jobs_for


def nothing(done: int, total: int) -> None:
    """Progress that nobody watches."""


def negated(n: int) -> int:
    return -n


def noisy(n: int) -> int:
    print("not an answer", flush=True)
    return n


def failing(n: int) -> int:
    raise KeyError(f"row {n}")


def dying(n: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return n


def stopping(n: int) -> int:
    os._exit(3)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker finds the functions above where this file is."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


def test_answers_come_in_the_rows_order_with_their_progress() -> None:
    rows = list(range(5 * CHUNK + 3))
    seen: list[tuple[int, int]] = []
    assert in_order(negated, rows, lambda done, total: seen.append((done, total)), jobs=2) == [-n for n in rows]
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (len(rows), len(rows))
    assert in_order(noisy, rows, nothing, jobs=2) == rows


@pytest.mark.parametrize(
    ("work", "error", "said"),
    [(failing, RuntimeError, "row 0"), (dying, RunFailed, "killed by signal 9"), (stopping, RunFailed, "ended with 3")],
)
def test_a_worker_that_fails_is_an_error(work: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        in_order(work, list(range(CHUNK)), nothing, jobs=2)


def test_few_rows_are_not_worth_a_process() -> None:
    assert (jobs_for(1), jobs_for(100)) == (1, 1)
    assert jobs_for(10**6) == cores()


def test_the_document_is_the_same() -> None:
    shipped = read()
    rows = [row for row in shipped if row.source == "vtrain/single"][: 2 * CHUNK]
    rows += [row for row in shipped if row.source == "zero"][:CHUNK]  # which are skipped
    assert validate(rows, jobs=2) == validate(rows)


def children(pid: int) -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            _, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if int(parent) == pid:
                yield int(stat.parent.name)


def alive(pid: int) -> bool:
    """Whether it is there and no zombie, which nobody may reap in a container."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(cores() < 2, reason="one core is one process")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_who_asked(tmp_path: Path, number: signal.Signals) -> None:
    quick = [line for line in SHIPPED.read_text(encoding="utf-8").splitlines(True) if '"vtrain-single' in line]
    (tmp_path / "rows.jsonl").write_text("".join(quick), encoding="utf-8")
    command = [sys.executable, "-m", "nanum", "validate", str(tmp_path / "rows.jsonl")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while len(workers := list(children(process.pid))) < 2 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert len(workers) >= 2
    if number == signal.SIGINT:
        assert (process.returncode, errors) == (130, "nanum: interrupted\n")
    patience_ends = time.monotonic() + 60
    while any(map(alive, workers)) and time.monotonic() < patience_ends:
        time.sleep(0.01)
    assert not [worker for worker in workers if alive(worker)]
