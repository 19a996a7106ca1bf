"""How the lesson ends: what it refuses, and what it says where torch, a device or a measurement is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import nothing

from nanum import lesson, processes
from nanum.errors import Refused, RunFailed
from nanum.lesson import measured
from nanum.processes import Progress

SOURCE = Path(lesson.__file__).resolve().parents[2]


def test_a_part_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Refused, match="F is not a part of the lesson"):
        lesson.run(("A", "F"))
    assert capsys.readouterr().out == ""
    with pytest.raises(Refused, match="A, B, C, D, E"):
        lesson.document(("F",))


def test_every_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused) as refused:
        lesson.run(("X", "A", "Y"), lang="fr")
    asked = ("lang=fr is not", "X is not", "Y is not")
    assert len(refused.value.reasons) == len(asked)
    assert all(reason.startswith(start) for reason, start in zip(refused.value.reasons, asked, strict=True))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Refused) as refused:
        lesson.document(("F", "B", "D"))
    assert ["torch" in reason for reason in refused.value.reasons] == [False, True, True]


def test_what_is_refused_is_said_as_by_every_command() -> None:
    command = [sys.executable, "-m", "nanum", "lesson", "F", "x\n", "--lang", "fr"]
    done = subprocess.run(command, capture_output=True, text=True, env=processes.environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 3
    assert all(line.startswith("nanum: ") for line in done.stderr.splitlines())


def test_parts_in_any_order_and_case_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert lesson.run(("a", "A")) == 0
    assert capsys.readouterr().out.count("A. What is exchanged") == 1


def test_without_torch_the_arithmetic_is_printed_and_the_rest_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Refused) as refused:
        lesson.run(())
    assert "28.0 GB" in capsys.readouterr().out
    assert ["pip install 'nanum[torch]'" in reason for reason in refused.value.reasons] == [True] * 4
    assert [reason.split()[1] for reason in refused.value.reasons] == ["B", "C", "D", "E"]
    with pytest.raises(Refused, match="설치되어 있지 않다"):
        lesson.run(("B",), "ko", json=True)
    assert capsys.readouterr().out == ""


def test_a_run_that_fails_is_told_after_what_came_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(progress: Progress) -> dict[str, Any]:
        raise RunFailed("rank 1 was killed by SIGKILL")

    monkeypatch.setattr(lesson, "torch_is_missing", lambda: False)
    monkeypatch.setitem(lesson.MEASUREMENTS, "D", fails)
    with pytest.raises(RunFailed, match="rank 1"):
        lesson.run(("A", "D"), json=True)
    assert list(json.loads(capsys.readouterr().out)) == ["A"]
    with pytest.raises(RunFailed, match="rank 1"):
        lesson.document(("D",))


@pytest.mark.parametrize("ok", [True, False])
def test_a_run_that_differs_from_the_prediction_is_bad_news(
    ok: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lesson, "torch_is_missing", lambda: False)
    monkeypatch.setitem(lesson.MEASUREMENTS, "E", lambda progress: {"ok": ok})
    assert lesson.run(("E",), json=True) == (0 if ok else 1)
    assert json.loads(capsys.readouterr().out) == {"E": {"ok": ok}}


def test_a_torch_that_does_not_import_is_told_by_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is broken')", encoding="utf-8")
    monkeypatch.setattr(processes, "torch_is_missing", lambda: False)
    monkeypatch.setattr(
        processes, "environment", lambda: {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}"}
    )
    with pytest.raises(Refused, match=r"nanum\[torch\].*libtorch is broken"):
        measured.bench(["memory"], nothing)


def test_a_device_that_is_not_there_is_refused() -> None:
    torch = pytest.importorskip("torch")
    absent = "mps" if torch.cuda.is_available() else "cuda"
    with pytest.raises(Refused, match=f"device={absent} is not available"):
        measured.bench(["memory", "--device", absent], nothing)


def test_a_measurement_that_fails_is_no_refusal() -> None:
    pytest.importorskip("torch")
    with pytest.raises(RuntimeError, match="--seconds"):
        measured.bench(["amdahl", "--seconds", "soon"], nothing)


def test_the_measurement_speaks_json_and_reports_progress() -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "nanum.live.bench", "amdahl", "--quick", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=processes.environment())
    assert json.loads(done.stdout)["repeats"] == 3
    assert done.stderr.splitlines()[-1] == "progress 3 3"
