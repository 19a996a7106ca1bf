"""docs/json.md against the documents that the commands print: no key without its row, and no row without its key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

OBJECTS = ("nearest", "together")
"""That are `null` where there is none."""
WAYS = ("data_parallel", "tensor_parallel", "pipeline")


def documented(command: str) -> set[str]:
    """The paths that a command's tables list; those that end in `.*` stand for all below them."""
    text = (Path(__file__).resolve().parents[1] / "docs" / "json.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {command}\n")[1].split("\n## ")[0]
    table = section.rsplit("\n| key | unit | meaning |\n")[-1]
    paths = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(paths) == len(set(paths))
    return {path.replace("WAY", way) for path in paths for way in WAYS}


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """The path of each value that holds no other; an empty list is one entry that nobody gave."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, f"{path}[]")
    else:
        yield f"{path}.null" if value is None and path in OBJECTS else path


def covers(row: str, leaf: str) -> bool:
    return leaf.startswith(row[:-1]) if row.endswith(".*") else leaf == row


SMALL = ["llama-3.1-70b", "4x8xa100-sxm-40gb", "--global-batch-size", "512"]
TOO_LARGE = {
    "predict": [
        ["llama-3.1-8b", "1x8xh100-sxm", "--micro-batch-size", "8"],
        [*SMALL, "--tp", "8", "--cp", "2", "--cp-kind", "allgather", "--recompute", "full"],
    ],
    "plan": [SMALL],
}
"""Of the first another layout fits; none of the other's, but itself with less."""


@pytest.mark.parametrize(
    "argv",
    [
        ["predict", "llama-3.1-8b", "2x8xh100-sxm", "--tp", "2", "--pp", "2", "--observed", "20s"],  # noted as far off
        ["plan", "llama-3.1-8b", "2x8xh100-sxm"],  # some too large, some near ties
        [
            "scale",
            "llama-3.1-8b",
            "2x8xh100-sxm",
            "--tp",
            "2",
            "--pp",
            "2",
            "--engine",
            "megatron",
            "--gpus",
            "4,12,16,32",
        ],
        ["models"],
        ["clusters"],
        ["lesson", "A"],
    ],
    ids=lambda argv: argv[0],
)
def test_every_key_has_its_row(nanum: Run, argv: list[str]) -> None:
    command, *words = argv
    done = nanum(command, *words, "--json")
    assert done.returncode == 0, done.stderr
    printed = set(leaves(json.loads(done.stdout)))
    for large in TOO_LARGE.get(command, ()):  # which say more of what does not fit
        done = nanum(command, *large, "--json")
        assert done.returncode == 1
        printed |= set(leaves(json.loads(done.stdout)))
    part = f"{words[0]}." if command == "lesson" else ""
    rows = {row for row in documented(command) if row.startswith(part)}
    assert {leaf for leaf in printed if not any(covers(row, leaf) for row in rows)} == set()
    assert {row for row in rows if not any(covers(row, leaf) for leaf in printed)} == set()
