"""What happens to a rank, done to one: each fault ends the run with one message, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import nothing
from hypothesis import given
from hypothesis import strategies as st

from nanum import processes
from nanum.errors import Refused
from nanum.live.pulse import Board, laggard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is left of a run is read from /proc")

TESTS = Path(__file__).parent
MARK = "NANUM_TEST_RUN"
ENDS_WITHIN_SECONDS = 30.0

# `nanum`'s own way to ask a worker and to end, for a worker that `nanum` does not have.
ASK = """
import json, sys, typer
from nanum import processes
from nanum.cli.answers import ends, print_json

def progress(done, total, what=""):
    print(done, total, what, file=sys.stderr, flush=True)

def ask() -> int:
    print_json(processes.run("faulty_worker", [], progress, question=json.loads(sys.argv[1])))
    return 0

app = typer.Typer(add_completion=False)
app.command()(ends(ask))
app(args=[])
"""


def question(*faults: str, ranks: int = 3, patience_seconds: float = 60.0) -> dict[str, Any]:
    return {"ranks": ranks, "faults": list(faults), "patience_seconds": patience_seconds}


class Place:
    """Where a run's processes and temporary files can be found, whoever started them."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder, self.mark = folder, mark

    def processes(self) -> list[int]:
        """The running processes of this place. One that has ended has no environment left to read."""
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in environ.read_bytes():
                    found.append(int(environ.parent.name))
        return found

    def holds(self, seen: Callable[[list[int]], bool]) -> bool:
        """Whether `seen` comes true of its processes, soon."""
        ends = time.monotonic() + ENDS_WITHIN_SECONDS
        while not seen(self.processes()):
            if time.monotonic() > ends:
                return False
            time.sleep(0.02)
        return True

    def is_empty(self) -> bool:
        return self.holds(lambda running: not running) and not os.listdir(self.folder)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """This test's processes are marked, and their temporary files are in a folder of their own."""
    pytest.importorskip("torch")
    folder = tmp_path / "temporary files"
    folder.mkdir()
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    here = Place(folder, mark)
    yield here
    for pid in here.processes():
        os.kill(pid, signal.SIGKILL)


def started(*command: str, **told: str) -> subprocess.Popen[str]:
    """A process in a session of its own, as a shell starts one on a terminal."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = processes.environment() | told
    return subprocess.Popen([sys.executable, *command], text=True, start_new_session=True, env=environment, **pipes)  # type: ignore[call-overload]


@contextlib.contextmanager
def asking(asked: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A process that asks the worker, at the moment when the first step of the run has ended."""
    with started("-c", ASK, json.dumps(asked)) as process:
        try:
            assert process.stderr.readline() == "1 3 step 0 ends\n"
            yield process
        finally:
            process.kill()


# --- one process, many runs

AFTER = ", after: forward, step 1"
PRINTED = r"\n  ranks print what nobody asked for"
WAITS = r"; rank [01] waits for it in: all_reduce over dp_shard, 4,096 bytes, step 1"

FAULTS = {
    "raises": rf"rank 2 failed with ValueError: a gradient that is{AFTER}",
    "loses a peer": rf"rank 2 failed with RuntimeError: Connection closed by peer .*{AFTER}",
    "exits": rf"rank 2 ended with exit code 7{AFTER}{PRINTED}",
    "exits as if done": rf"rank 2 ended with exit code 0{AFTER}{PRINTED}",
    "is killed": rf"rank 2 was killed by SIGKILL \(out of memory\?\){AFTER}",
    "crashes": rf"rank 2 was killed by SIGSEGV{AFTER}{PRINTED}",
    "aborts": rf"rank 2 ran out of memory and was killed by SIGABRT{AFTER}{PRINTED}\n  terminate called .*",
    "allocates": r"rank 2 ran out of memory \(RuntimeError: .*allocate.*\), after: allocates activations",
    "allocates in Python": rf"rank 2 ran out of memory \(MemoryError\){AFTER}",
    "refuses": "the first reason\nthe second reason",
    "nothing": "",
}
HANGS = {
    "hangs": rf"rank 2 hangs: it has not moved for \d+ s \(asleep\){AFTER}{WAITS}",
    "spins": rf"rank 2 hangs: it has not moved for \d+ s \(computing\){AFTER}{WAITS}",
    "is stopped": rf"rank 2 hangs: it has not moved for \d+ s \(stopped\){AFTER}{WAITS}",
    "leaves": (
        r"rank [01] hangs: it has not moved for \d+ s \(asleep\), after: all_reduce over dp_shard, .*, step 1; "
        r"rank 2, which it waits for, is done"
    ),
    "takes long": "",
}
SHORT_PATIENCE_SECONDS = 4.0  # of what takes long, as `faulty_worker` does it, and for ranks to start


@pytest.mark.parametrize(("faults", "patience_seconds"), [(FAULTS, 60.0), (HANGS, SHORT_PATIENCE_SECONDS)])
@pytest.mark.usefixtures("place")
def test_a_fault_is_told_once_with_its_rank_and_last_operation_and_nothing_is_left(
    faults: dict[str, str], patience_seconds: float
) -> None:
    asked = question(*faults, patience_seconds=patience_seconds)
    outcomes = processes.run("faulty_worker", [], nothing, question=asked)
    told = {fault: outcome["said"] for fault, outcome in outcomes.items()}
    assert told.keys() == faults.keys()
    assert {fault: said for fault, said in told.items() if not re.fullmatch(faults[fault], said)} == {}
    for fault, outcome in outcomes.items():
        assert outcome["returned"] == (None if faults[fault] else [2.0, 2.0, 2.0])
        assert (outcome["children"], outcome["files"]) == ([], [])
        assert outcome["seconds"] < ENDS_WITHIN_SECONDS
    assert len({outcome["descriptors"] for outcome in outcomes.values()}) == 1


@pytest.mark.usefixtures("place")
def test_where_it_was_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANUM_DEBUG", "1")
    asked = question("raises", "hangs", patience_seconds=SHORT_PATIENCE_SECONDS)
    outcomes = processes.run("faulty_worker", [], nothing, question=asked)
    for fault, where in (("raises", "raise ValueError("), ("hangs", "in fail")):
        said = outcomes[fault]["said"].splitlines()
        assert said[0].startswith("rank 2 ")
        assert any(where in line for line in said[1:])
        assert "[rank 0] ranks print what nobody asked for" in said[1:]


# --- signals


def test_an_interrupt_ends_all(place: Place) -> None:
    with asking(question("hangs")) as process:
        assert place.holds(lambda running: len(running) == 5)  # who asks, the supervisor, and three ranks
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert (process.wait(), process.stderr.read()) == (130, "nanum: interrupted\n")
        assert place.is_empty()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_worker_that_nobody_asked_ends_with_its_ranks(number: signal.Signals, place: Place) -> None:
    with started("-m", "faulty_worker", json.dumps(question("hangs"))) as process:
        assert process.stderr.readline() == "progress 1 3 step 0 ends\n"
        if number == signal.SIGINT:  # which a terminal sends to all of them
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait() in (-number, 128 + number)
        assert place.holds(lambda running: not running)
        assert number == signal.SIGKILL or place.is_empty()  # who is killed removes nothing: who asks does


def test_being_asked_to_end_ends_all(place: Place) -> None:
    with asking(question("hangs")) as process:
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
        assert place.is_empty()


def test_when_who_asked_is_killed_all_end(place: Place) -> None:
    with asking(question("hangs")) as process:
        process.kill()
        process.wait()
        assert place.is_empty()


def test_when_the_supervisor_is_killed_all_end_and_it_is_said(place: Place) -> None:
    with asking(question("hangs")) as process:
        (supervisor,) = children(process.pid)
        os.kill(supervisor, signal.SIGKILL)
        assert (process.wait(), process.stderr.read()) == (
            1,
            "nanum: faulty_worker was killed by SIGKILL (out of memory?)\n",
        )
        assert place.is_empty()


def test_a_rank_killed_from_outside_is_told(place: Place) -> None:
    with asking(question("hangs")) as process:
        (supervisor,) = children(process.pid)
        os.kill(children(supervisor)[0], signal.SIGKILL)
        assert process.wait() == 1
        assert process.stderr.read().startswith("nanum: rank 0 was killed by SIGKILL (out of memory?), after: ")
        assert place.is_empty()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# --- side by side, and where a run cannot be


def test_two_runs_at_once_do_not_meet(place: Place) -> None:
    with asking(question("takes long", ranks=2)) as one, asking(question("takes long")) as other:
        returned = [json.loads(process.communicate()[0])["returned"] for process in (one, other)]
    assert returned == [[1.5, 1.5], [2.0, 2.0, 2.0]]
    assert place.is_empty()


@pytest.mark.parametrize("where", ["missing", "a file"])
def test_a_folder_that_cannot_be_written_is_refused(where: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.folder.parent / "a file").touch()
    monkeypatch.setenv("TMPDIR", str(place.folder.parent / where))
    with pytest.raises(Refused, match=rf"^TMPDIR=.*{where} cannot be written: (No such file|Not a directory)"):
        processes.run("faulty_worker", [], nothing, question=question(""))


def test_a_busy_port_is_said(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with started("-m", "faulty_worker", json.dumps(question("")), **told) as process:
            _, said = process.communicate()
    assert process.returncode == processes.REFUSED
    assert f"port {port} of 127.0.0.1 is busy" in said
    assert place.is_empty()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", "rank 1 failed with ValueError: a gradient that is, after: forward, step 1"),
        ("hangs", "rank 0 lost another rank .*, after: all_reduce over dp_shard, 4,096 bytes, step 1"),
    ],
)
def test_a_launched_rank_says_what_it_knows_and_the_others_end(fault: str, said: str, place: Place) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "faulty_worker")
    with started(*launch, json.dumps(question(fault, patience_seconds=3.0))) as process:
        _, err = process.communicate()
    assert process.returncode == 1
    assert re.search(said, err)
    assert place.holds(lambda running: not running)
    assert not [*place.folder.glob("nanum-*")]  # torchrun's own logs are its own


# --- who waits for whom


@given(st.data())
def test_the_rank_that_stopped_is_told_from_those_that_wait_for_it(data: st.DataObject) -> None:
    """Exchanges in one order for all, of any groups: ranks go through theirs until the one that stopped is missed."""
    ranks = data.draw(st.integers(2, 6))
    groups = st.lists(st.integers(0, ranks - 1), min_size=2, max_size=ranks, unique=True)
    exchanges = data.draw(st.lists(groups, min_size=1, max_size=20))
    stopped = data.draw(st.integers(0, ranks - 1))
    left = data.draw(st.integers(0, 5))  # exchanges that it still comes to
    extra = data.draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))  # what each does besides
    board = Board(ranks)
    pulses = [board.pulse(rank) for rank in range(ranks)]
    waiting = set()
    for rank, pulse in enumerate(pulses):
        for _ in range(extra[rank]):
            pulse.beat("computes")
    for group in exchanges:
        if stopped in group and stopped not in waiting:
            left -= 1
            if left < 0:
                waiting.add(stopped)
        there = [rank for rank in group if rank not in waiting]
        for rank in there:
            pulses[rank].beat("exchanges", group)
        if len(there) < len(group):
            waiting.update(there)
    done = set(range(ranks)) - waiting
    beats = {rank: board.read(rank) for rank in range(ranks) if rank not in done}
    assert not beats or laggard(beats) == stopped


def test_without_groups_the_rank_with_the_fewest_beats_is_behind() -> None:
    board = Board(3)
    for rank, beats in enumerate((4, 3, 4)):
        for beat in range(beats):
            board.pulse(rank).beat(f"operation {beat}")
    assert laggard({rank: board.read(rank) for rank in range(3)}) == 1


def test_a_beat_is_read_whole_while_it_is_written() -> None:
    board = Board(1)
    over = threading.Event()

    def beats() -> None:
        pulse = board.pulse(0)
        while not over.is_set():
            number = board.read(0).number + 1
            pulse.beat(f"{number} " * (number % 50), (number % 7, 9))

    writer = threading.Thread(target=beats)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        writer.start()
        for _ in range(3000):
            beat = board.read(0)
            assert set(beat.text.split()) <= {str(beat.number)}
            assert beat.group in ((), (beat.number % 7, 9))
    finally:
        sys.setswitchinterval(before)
        over.set()
        writer.join()


def test_a_text_is_cut_and_hundreds_of_groups_are_not_kept() -> None:
    board = Board(1)
    pulse = board.pulse(0)
    for other in range(1000):
        pulse.beat("♥" * 1000, (0, other))
    last = board.read(0)
    assert (set(last.text), last.number, last.group) == ({"♥"}, 1001, ())
