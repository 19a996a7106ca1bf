"""Answers as wide as the terminal: every column, whatever its width, and no number cut."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from conftest import Run
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nanum.cli.listings import models_document
from nanum.report.listings import print_models
from nanum.report.measured import print_measured
from nanum.report.numbers import whole
from nanum.report.tables import print_table

MEASURED: dict[str, Any] = {
    "file": "here.toml",
    "cluster": {
        "nodes": 1, "gpus_per_node": 2, "chip": "AMD EPYC 9B14", "memory_bytes": 8e9, "memory_bytes_per_second": 9e9,
        "best_flops_per_second": {"fp32": 1.1e11},
        "links": [
            {
                "name": "memory", "bytes_per_second": 1e10, "tag": "measured", "efficiency": 1.0,
                "efficiency_group_size": 2, "efficiency_tag": "derived", "latency_seconds": 1e-4,
                "latency_tag": "derived",
            }
        ],
    },
    "grids": {"matmul": 2},
    "operation_seconds": 1.1e-6, "together": None, "beside": None, "framework": {}, "sources": ["gloo"],
    "exchanges": [
        {
            "kind": kind, "ranks": 2, "nodes": 1, "payload_bytes": [65_536, 67_108_864], "seconds": [1.234e-4, 0.1234],
            "low_seconds": [1.022e-4, 0.1022], "high_seconds": [2.345e-4, 0.2345],
            "algbw_bytes_per_second": [1.234e8, 5.678e8], "busbw_bytes_per_second": [2.345e8, 6.789e8],
        }
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    ],
}  # fmt: skip


def at(columns: int, printer: Callable[[Any, Console], None], document: Mapping[str, Any]) -> str:
    page = io.StringIO()
    printer(document, Console(file=page, width=columns, highlight=False))
    return page.getvalue()


@pytest.mark.parametrize("columns", [80, 100])
def test_each_model_has_all_of_its_columns(columns: int) -> None:
    document = models_document()
    lines = [line.rstrip() for line in at(columns, print_models, document).splitlines()]
    assert max(map(len, lines)) <= columns
    ends = [line.split()[-4:] for line in lines]
    for model in document["models"]:
        sizes = [whole(model[name]) for name in ("num_hidden_layers", "hidden_size", "max_position_embeddings")]
        assert any(end[1:] == sizes for end in ends), model["name"]


def test_each_measured_exchange_has_its_bus_bandwidth() -> None:
    text = at(80, print_measured, MEASURED)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert len(re.findall(r" 0\.123 +0\.234$| 0\.568 +0\.679$", text, re.MULTILINE)) == 2 * len(MEASURED["exchanges"])


@pytest.mark.parametrize(
    "words",
    [
        ("clusters",),
        ("predict", "llama-3.1-8b", "2x8xh100-sxm", "--tp", "2", "--pp", "2"),
        ("plan", "llama-3.1-8b", "1x8xh100-sxm", "--top", "2"),
        ("scale", "llama-3.1-8b", "2x8xh100-sxm"),
    ],
)  # fmt: skip
def test_a_narrow_terminal_gets_lines_that_it_can_show(nanum: Run, words: tuple[str, ...]) -> None:
    done = nanum(*words, env={**os.environ, "COLUMNS": "60"})
    assert done.returncode == 0
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert 40 < max(map(len, lines)) <= 60


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (60, ["a long name of it  1,234 B  2,345 B"]),
        (24, ["a long name of it", "1,234 B  2,345 B"]),
        (14, ["a long name of", "it", "  payload", "  1,234 B;", "  wire 2,345 B"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_side_by_side_is_told_below(columns: int, shown: list[str]) -> None:
    page = io.StringIO()
    row = ("a long name of it", "1,234 B", "2,345 B")
    print_table(Console(file=page, width=columns, highlight=False), ("what", "payload", "wire"), [row], 1)
    assert [line.rstrip() for line in page.getvalue().splitlines()][-len(shown) :] == shown


@given(
    rows=st.lists(
        st.tuples(st.text("ab ", min_size=1, max_size=30), *(st.integers(0, 10**9).map(str) for _ in range(3))),
        min_size=1, max_size=5,
    ),
    columns=st.integers(5, 90),
)  # fmt: skip
def test_no_number_is_cut_or_wrapped(rows: list[tuple[str, ...]], columns: int) -> None:
    page = io.StringIO()
    print_table(
        Console(file=page, width=columns, highlight=False), ("what it is", "payload", "wire", "exposed"), rows, 1
    )
    found = re.findall(r"\d+", page.getvalue())
    assert found == [number for row in rows for number in row[1:]]
