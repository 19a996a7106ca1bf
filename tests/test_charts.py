"""`nanum validate --plot`: the picture as a file, and what stands in its way."""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from test_validate import ROW, lines

from nanum.cli.validating import Words, question
from nanum.errors import Refused
from nanum.report import charts

TWO = ({"id": "a-1", "quantity": "step_seconds", "source": "a", "measured": 1.0, "predicted": 1.1},
       {"id": "a-2", "quantity": "step_seconds", "source": "a", "measured": 500.0, "predicted": 20.0},
       {"id": "b-1", "quantity": "memory_bytes", "source": "b", "measured": 2.0**35, "predicted": 2.0**34},
       {"id": "b-2", "quantity": "memory_bytes", "source": "b", "measured": None, "predicted": 2.0**34})  # fmt: skip


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures can be made here, as far as anybody asks."""
    monkeypatch.setattr(charts, "check", lambda: None)


def reasons(tmp_path: Path, **changes: Any) -> list[str]:
    said = {"file": str(lines(tmp_path / "rows.jsonl", ROW)), "plot": None, "force": False, "jobs": None} | changes
    with pytest.raises(Refused) as refused:
        question(Words(**said))
    return list(refused.value.reasons)


def test_a_picture_of_another_kind_is_refused(tmp_path: Path, drawn: None) -> None:
    assert reasons(tmp_path, plot="errors.pdf") == ["--plot errors.pdf: must end in .svg or .png"]


def test_a_file_that_is_there_is_kept(tmp_path: Path, drawn: None) -> None:
    (tmp_path / "errors.svg").write_text("mine")
    asked = {"file": None, "plot": str(tmp_path / "errors.svg"), "jobs": None}
    assert reasons(tmp_path, **asked) == [f"{tmp_path / 'errors.svg'}: is there already (--force replaces it)"]
    plot = question(Words(**asked, force=True)).plot  # type: ignore[arg-type]
    assert plot is not None
    assert (plot.kind, plot.force) == ("svg", True)


def test_every_reason_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)  # as where it is not installed
    found = reasons(tmp_path, file=str(tmp_path / "none.jsonl"), plot=str(tmp_path / "no" / "errors.png"), jobs="0")
    assert [reason.split(": ")[0] for reason in found] == [
        "--jobs 0 must be at least 1",
        str(tmp_path / "no" / "errors.png"),
        "a plot needs altair and vl-convert-python",
        str(tmp_path / "none.jsonl"),
    ]
    assert "pip install 'nanum[plot]'" in found[2]
    assert reasons(tmp_path, force=True) == ["--force: replaces the file of --plot, which is not said"]


def test_the_ticks_of_a_scale() -> None:
    assert charts._ticks(0.8, 12.0) == [1, 2, 5, 10]
    assert charts._ticks(0.05, 900.0) == [0.1, 1, 10, 100]


def test_a_vector_picture_has_its_words_and_a_point_for_each_run() -> None:
    pytest.importorskip("altair")
    picture = charts.predicted_against_measured({"rows": TWO}, "svg")
    assert picture is not None
    text = picture.decode("utf-8")
    assert text.startswith("<svg")
    for words in ("measured (s)", "predicted (GiB)", "Step time: 2 runs", "Memory of a GPU: 1 run<", "+20%"):
        assert words in text
    # Each run is a point in both panels of its quantity.
    points = re.findall(r'<path aria-label="[^"]*source: (?:a|b)"', text)
    assert len(points) == 2 * 3


def test_a_bitmap_of_twice_the_size() -> None:
    pytest.importorskip("altair")
    picture = charts.predicted_against_measured({"rows": TWO}, "png")
    assert picture is not None
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 4 * charts.SIDE
    assert height > 2 * charts.SIDE


def test_nothing_to_draw() -> None:
    pytest.importorskip("altair")
    assert charts.predicted_against_measured({"rows": [TWO[3]]}, "svg") is None


def test_the_command_draws(nanum: Run, tmp_path: Path) -> None:
    pytest.importorskip("altair")
    file, plot = lines(tmp_path / "rows.jsonl", ROW), tmp_path / "errors.svg"
    for force in ([], ["--force"]):
        done = nanum("validate", str(file), "--plot", str(plot), *force)
        assert done.returncode == 0, done.stderr
        assert plot.read_text(encoding="utf-8").startswith("<svg")
        plot.write_text("another")
    assert nanum("validate", str(file), "--plot", str(plot)).returncode == 2
    assert plot.read_text() == "another"
    unread = lines(tmp_path / "none.jsonl", {**ROW, "precision": "nvfp4"})
    done = nanum("validate", str(unread), "--plot", str(tmp_path / "none.svg"))
    assert (done.returncode, "no run was compared" in done.stderr) == (1, True)
    assert not (tmp_path / "none.svg").exists()
