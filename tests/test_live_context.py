"""Attention over a split sequence on real gloo ranks: the same numbers as one process, and the exchanges that PyTorch's
recorded steps had.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "context_ranks.py"
KINDS = ("ulysses", "allgather", "ring", "ring_alltoall")
Q, KV = 2 * 8 * 64 * 16 * 4, 2 * 4 * 64 * 16 * 4  # bytes of q, and of k or v, over all ranks


@cache
def runs() -> dict[str, Any]:
    pytest.importorskip("torch")
    words = [sys.executable, str(SCRIPT), "2", "4"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def run(ranks: int) -> Any:
    return runs()[str(ranks)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_output_and_gradients_are_those_of_one_process(ranks: int, kind: str) -> None:
    assert max(run(ranks)[kind]["errors"]) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_exchanges_what_was_recorded(ranks: int, kind: str) -> None:
    turns = 2 * (ranks - 1) + ranks  # keys and values go round twice, their gradients once and home
    expected = {
        "ulysses": [["all_to_all", "float32", 8, 2 * (2 * Q + 2 * KV) // ranks]],
        "allgather": [["all_gather", "float32", 2, 2 * KV], ["reduce_scatter", "float32", 2, 2 * KV]],
        "ring": [["all_gather", "float32", 2, 4 * KV], ["all_to_all", "float32", ranks, 2 * KV]],
        "ring_alltoall": [["all_to_all", "float32", turns, turns * 2 * KV // ranks]],
    }[kind]
    assert [rank["rows"] for rank in run(ranks)[kind]["ranks"]] == [expected] * ranks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_saved_are_the_operands_the_output_and_the_log_sum_exp(ranks: int, kind: str) -> None:
    whole = ranks if kind == "allgather" else 1  # keys and values are saved gathered
    lse = Q // 16
    assert {r["saved_bytes"] for r in run(ranks)[kind]["ranks"]} == {(2 * Q + lse + whole * 2 * KV) // ranks}
