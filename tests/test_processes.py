"""The protocol between nanum and a process that it asks: what each end of such a process becomes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import nothing

from nanum import processes
from nanum.errors import Refused, RunFailed

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Runs a module that is made of `source`, whose temporary files lie in `tmp_path / "files"`."""
    (tmp_path / "files").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "files"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(processes, "torch_is_missing", lambda: False)

    def run(source: str, progress: processes.Progress = nothing, **options: Any) -> dict[str, Any]:
        (tmp_path / "speaker.py").write_text(f"import json, os, sys, time\n{source}", encoding="utf-8")
        return processes.run("speaker", ["a", "b"], progress, **options)

    return run


@pytest.mark.parametrize("characters", [1, 1 << 20])  # more than a pipe holds, to a process that reads it late
def test_a_question_comes_back_as_the_answer(characters: int, ask: Ask) -> None:
    question = {"text": "나" * characters}
    echo = "print(json.dumps({'question': json.load(sys.stdin), 'arguments': sys.argv[1:]}))"
    assert ask(echo, question=question) == {"question": question, "arguments": ["a", "b"]}


def test_without_a_question_there_is_nothing_to_read(ask: Ask) -> None:
    assert ask("print(json.dumps({'read': sys.stdin.read()}))") == {"read": ""}


def test_progress_is_relayed_and_what_only_looks_like_it_is_said(ask: Ask) -> None:
    seen: list[tuple[Any, ...]] = []
    lines = ["progress 1 2", "progress 2 2 the last of them", "progress is slow today"]
    with pytest.raises(RunFailed, match=r"^progress is slow today$"):
        ask(f"print(*{lines}, sep='\\n', file=sys.stderr)\nsys.exit(5)", lambda *told: seen.append(told))
    assert seen == [(1, 2), (2, 2, "the last of them")]


@pytest.mark.parametrize(
    ("code", "said", "error", "text"),
    [
        (2, "one\ntwo", Refused, r"^one\ntwo$"),
        (3, "libtorch is broken", Refused, r"pip install 'nanum\[torch\]' .* \(libtorch is broken\)$"),
        (4, "no such device", Refused, r"^no such device$"),
        (5, "rank 2 failed\n  somehow", RunFailed, r"^rank 2 failed\n  somehow$"),
        (2, "usage: speaker [-h]", RuntimeError, r"^speaker a b ended with 2\nusage: "),
        (5, "", RuntimeError, r"^speaker a b ended with 5"),
        (1, "Traceback", RuntimeError, r"^speaker a b ended with 1\nTraceback$"),
    ],
)
def test_an_exit_code_says_what_became_of_the_question(
    code: int, said: str, error: type[Exception], text: str, ask: Ask
) -> None:
    with pytest.raises(error, match=text) as raised:
        ask(f"print({said!r}, end='', file=sys.stderr)\nsys.exit({code})")
    assert type(raised.value) is error


def test_a_process_that_is_killed_is_bad_news(ask: Ask) -> None:
    with pytest.raises(RunFailed, match=r"^speaker a b was killed by SIGKILL"):
        ask("os.kill(os.getpid(), 9)")


@pytest.mark.parametrize("source", ["print({})", "sys.exit(5)", "time.sleep(100)"])
def test_neither_files_nor_descendants_are_left(source: str, ask: Ask, tmp_path: Path) -> None:
    leave = """
import signal, tempfile
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tempfile.mkdtemp(); tempfile.mkstemp()
child = os.fork()
if child == 0:
    os.close(2)
    time.sleep(100)
print(f"progress {os.getpid()} {child}", file=sys.stderr, flush=True)
"""
    seen: list[int] = []

    def interrupt(own: int, child: int) -> None:
        seen.extend((own, child))
        if "sleep" in source:
            raise KeyboardInterrupt

    start = time.monotonic()
    if "print" in source:
        assert ask(leave + source, interrupt) == {}
    else:
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            ask(leave + source, interrupt)
    assert time.monotonic() - start < 30
    assert not os.listdir(tmp_path / "files")
    assert len(seen) == 2
    assert not any(is_running(pid) for pid in seen)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # one that has ended may not have been waited for yet, by init
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_terminating_is_not_overheard_while_a_process_runs(ask: Ask) -> None:
    def terminate(done: int, total: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    with pytest.raises(SystemExit) as ended:
        ask("print('progress 1 1', file=sys.stderr, flush=True)\ntime.sleep(100)", terminate)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_folder_is_taken_at_its_word(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    with pytest.raises(Refused, match=r"^TMPDIR=.*missing cannot be written: No such file or directory$"):
        ask("print({})")
