"""The house: what an import costs, whether its documents are true, and whether it works where it is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "nanum"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def imported_by(statement: str) -> set[str]:
    """The modules that a fresh Python has imported after `statement`."""
    code = f"{statement}\nimport sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_nanum_loads_no_torch() -> None:
    loaded = imported_by("import nanum")
    assert "nanum" in loaded
    assert "torch" not in loaded


def test_predicting_and_planning_load_no_torch() -> None:
    rooms_of_a_plan = "nanum.prediction, nanum.search, nanum.lesson, nanum.report.terminal, nanum.cli.commands"
    loaded = imported_by(f"import {rooms_of_a_plan}")
    assert "nanum.search" in loaded
    assert "torch" not in loaded


def rooms() -> set[str]:
    """What lies directly in the package: its rooms."""
    names = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    return (names | {"data"}) - {"__init__", "__main__"}


def test_the_architecture_names_every_room() -> None:
    table = ARCHITECTURE.split("## Rooms")[1].split("## Doors")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert rooms() == named


def test_the_architecture_justifies_every_dependency(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    extras = [needed for extra in project["optional-dependencies"].values() for needed in extra]
    needed = project["dependencies"] + extras + pyproject["build-system"]["requires"]
    names = {re.match(r"[a-zA-Z0-9-]+", one).group() for one in needed}  # type: ignore[union-attr]
    justified = set(re.findall(r"[a-z-]+", " ".join(re.findall(r"^\| (.*?) \|", ARCHITECTURE, re.MULTILINE))))
    assert names <= justified


def test_the_readmes_commands_are_the_makefiles(pyproject: dict[str, Any]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", readme)) <= targets
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").strip().endswith("make test")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_no_file_of_the_package_is_a_drawer() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert files
    assert not [path for path in files if path.stem in {"utils", "helpers", "manager", "common"}]


def test_the_notice_names_the_tables_that_others_measured(pyproject: dict[str, Any]) -> None:
    tables = sorted((PACKAGE / "data").rglob("*.csv"))
    assert tables
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert [str(table) for table in tables if str(table.relative_to(ROOT)) not in notice] == []
    assert {"LICENSE", "NOTICE"} <= set(pyproject["project"]["license-files"])


@pytest.mark.slow
def test_a_wheel_works_in_an_empty_environment_elsewhere(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(tmp_path / "dist"), str(ROOT)], check=True)
    (wheel,) = (tmp_path / "dist").glob("nanum-*.whl")

    data_files = {path.relative_to(PACKAGE.parent) for path in (PACKAGE / "data").rglob("*.*")}
    assert data_files
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {str(path) for path in data_files} <= packed
    assert {"LICENSE", "NOTICE"} <= {Path(name).name for name in packed if "/licenses/" in name}

    venv.create(tmp_path / "env", with_pip=True)
    binaries = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [str(binaries / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q", str(wheel)]
    subprocess.run(install, check=True, env=environment)

    def nanum(*words: str) -> dict[str, Any]:
        command = [str(binaries / "nanum"), *words, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    assert len(nanum("models")["models"]) > 10
    assert nanum("plan", "llama-3.1-70b", "8x8xh100-sxm")["best"][0]["fits"] is True
    assert nanum("lesson", "A")["A"]["data_parallel"]["bytes"] == 28e9
