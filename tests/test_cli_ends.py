"""How a command ends when something goes wrong around it: pipes, full disks, closed streams, interrupts and bugs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from nanum.cli import answers


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "nanum", "models"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == answers.BROKEN_PIPE


@pytest.mark.parametrize("argv", [["models"], ["models", "--json"], ["--help"], ["plan", "--help"], ["--version"]])
def test_an_answer_that_cannot_be_written_exits_74(argv: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "nanum", *argv], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == answers.NOT_WRITTEN
    assert done.stderr == "nanum: stdout could not be written: No space left on device\n"


def test_closed_streams() -> None:
    command = f"{sys.executable} -m nanum"
    done = subprocess.run(f"{command} models >&-", shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (answers.NOT_WRITTEN, "nanum: stdout is closed\n")
    done = subprocess.run(f"{command} predict nobody nowhere 2>&-", shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (answers.REFUSED, "")  # print would turn to stdout


def test_an_interrupted_command_exits_130_without_a_traceback() -> None:
    # Its document is a stdin with nothing in it: once it says that it is there, it waits until it is interrupted.
    stub = """
import sys, nanum.cli, nanum.cli.listings as listings
def document():
    print("waiting", flush=True)
    return sys.stdin.read()
listings.models_document = document
sys.argv[1:] = ["models"]
nanum.cli.main()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", stub], text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "nanum: interrupted\n")


def test_one_interrupted_while_it_starts_says_so_too() -> None:
    # The first room that it imports is interrupted in its first line.
    stub = """
import sys, nanum.cli
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "nanum.cli.answers":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
nanum.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", stub], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "nanum: interrupted\n")


def test_one_interrupted_before_its_words_are_read_says_so_too() -> None:
    stub = """
import sys, typer.main, nanum.cli
def interrupted(*_, **__):
    raise KeyboardInterrupt
typer.main.get_params_from_function = interrupted
sys.argv[1:] = ["models"]
nanum.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", stub], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "nanum: interrupted\n")


def test_a_bug_is_one_line_and_its_own_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @answers.ends
    def broken() -> int:
        raise KeyError("nothing by this name")

    monkeypatch.delenv("NANUM_DEBUG", raising=False)
    with pytest.raises(typer.Exit) as ended:
        broken()
    assert ended.value.exit_code == answers.BUG
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setenv("NANUM_DEBUG", "1")
    with pytest.raises(KeyError):
        broken()


def test_json_has_no_infinity_and_takes_numpy(capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    answers.print_json({"a": float("inf"), "b": [np.int64(3), np.float64("nan")], "c": np.arange(2), "d": True})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [3, None], "c": [0, 1], "d": True}
