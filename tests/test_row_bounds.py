"""Rows of one's own whose numbers make no run: each is told why, and none is met as a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from nanum.validate import read
from nanum.validate.causes import differing_repeats
from nanum.validate.questions import Question, question_of
from nanum.validate.rows import Row
from nanum.validate.summary import Compared


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.id: row for row in read()}


def changed(row: Row, values: dict[str, Any]) -> Row:
    return Row({**row.fields, **values, "id": "own-1"})


MOE = "simumax-b200-deepseekv3_l4_tp1_ep8_pp1_dp8_mbc4"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"model.heads": 12, "model.kv_heads": 5}, "kv_heads=5 does not divide heads=12"),
        ({"model.moe.topk": 300}, "topk=300 exceeds experts=256"),
        ({"model.moe.experts": None}, "the number of experts is not stated"),
        ({"model.moe.dense_layers": 9}, "dense_layers=9 exceeds layers=4"),
        ({"hardware.gpu": None}, "the GPU is not stated"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_makes_no_model_is_said(rows: dict[str, Row], values: dict[str, Any], why: str) -> None:
    assert why in question_of(changed(rows[MOE], values))  # type: ignore[operator]


def test_a_public_model_has_the_experts_that_a_row_leaves_out(rows: dict[str, Row]) -> None:
    row = next(row for row in rows.values() if row.source == "mbridge/moe" and row["model.name"] == "Qwen3-30B-A3B")
    found, whole = question_of(Row({**row.fields, "model.moe.experts": None})), question_of(row)
    assert isinstance(found, Question), found
    assert isinstance(whole, Question)
    assert found.model == whole.model


def test_experts_are_cut_as_a_row_says(rows: dict[str, Row]) -> None:
    row = rows["dgxc-grok1-bf16-g512"]
    uncut, cut = question_of(changed(row, {"layout.etp": 1, "layout.sequence_parallel": True})), question_of(row)
    assert isinstance(uncut, Question), uncut
    assert isinstance(cut, Question)
    assert (uncut.layout.structure.own_experts, uncut.layout.etp) == (True, 1)
    assert cut.layout.etp == 4


@pytest.mark.parametrize("stage", [2.0, True, 4, -1])
def test_a_zero_stage_is_a_whole_number(nanum: Run, tmp_path: Path, stage: object) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"id": "own-1", "layout": {"zero_stage": stage}}) + "\n", encoding="utf-8")
    done = nanum("validate", str(file))
    assert done.returncode == 2
    assert f"layout.zero_stage = {json.dumps(stage)} is not 0, 1, 2 or 3" in done.stderr


def test_a_run_like_no_other_has_no_repeats() -> None:
    one = Compared("own-1", "mine", "step_seconds", 2.0, 1.0, 0.9, 1.1, likely_cause="a cause")
    assert differing_repeats([one]) == [one]
