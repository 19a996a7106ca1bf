"""Attention over a split sequence on real gloo ranks: the numbers of one process, and the exchanges and saved bytes
that are derived for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nanum import engines
from nanum.job import Job
from nanum.layout import AXES, Structure
from nanum.model import load
from nanum.operators.context_parallel import context_attention
from nanum.operators.tape import Tape
from nanum.program import Collective, Repeat
from nanum.sharding import Shapes, Tensor

SCRIPT = Path(__file__).parent / "context_ranks.py"
KINDS = ("ulysses", "allgather", "ring", "ring_alltoall")
MODEL = load("llama-3.2-1b")  # of which only the block kinds are asked
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
def test_every_rank_does_what_is_derived(ranks: int, kind: str) -> None:
    exchanged, saved_bytes = derived(ranks, kind)
    for rank in run(ranks)[kind]["ranks"]:
        assert rank == {"rows": exchanged, "saved_bytes": saved_bytes}


def derived(ranks: int, kind: str) -> tuple[list[Any], int]:
    """Exchanges of attention, forward and backward, and what its forward leaves for its backward."""
    torch = engines.load("torch").conventions(MODEL, Job(64, 2, "fp32"), Structure(zero=0))
    conventions = replace(torch, ring_gathers=kind != "ring_alltoall")
    shapes = Shapes(
        {axis: ranks if axis == "cp" else 1 for axis in AXES},
        {"B": 2, "S": 64, "T": 64, "Q": 8 * 16, "K": 4 * 16, "A": 8, "head": 16, "pair": 2},
    )
    tape = Tape(shapes, conventions, (), False, context=kind.removesuffix("_alltoall"))
    q, k, v = (
        Tensor(name, ("B", "S", heads), {"S": ("cp",)}, "fp32") for name, heads in zip("qkv", "QKK", strict=True)
    )
    for given in (q, k, v):
        tape.require_grad(given)
    out = context_attention(tape, q, k, v, 0.0)
    tape.add_grad(out, dy := out.like(name="dy"))
    tape.run_backward()
    rows: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
    for op in (*tape.forward, *tape.backward):
        times, nodes = (op.node.count, op.node.body) if isinstance(op.node, Repeat) else (1, (op.node,))
        for node in nodes:
            if isinstance(node, Collective):
                kind = "all_to_all" if node.kind == "permute" else node.kind  # which PyTorch carries a permute by
                row = rows[kind, "float32"]
                row[:] = row[0] + times * int(node.calls), row[1] + times * int(node.payload_bytes)
    there = {q, k, v}.union(*(op.writes for op in tape.forward))
    left = {t for op in tape.backward for t in op.reads if t in there and t is not dy}
    return sorted([*key, *row] for key, row in rows.items()), sum(int(shapes.bytes(t)) for t in left)
