"""Likely causes: a hint where a prediction is off, and none where it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_validate import question

from nanum.account.traffic import kernels
from nanum.prediction import Prediction
from nanum.program import Compute, Repeat
from nanum.validate import compare, read
from nanum.validate.causes import differing_repeats, likely_cause, odd_rows
from nanum.validate.questions import Question, question_of
from nanum.validate.summary import Compared


def predicted(asked: Question) -> Prediction:
    return Prediction(asked.model, asked.job, asked.cluster, asked.layout, asked.engine)


def cause(asked: Question, ratio: float, quantity: str = "step_seconds") -> str | None:
    """Of that run, had `ratio` times the prediction been measured."""
    p = predicted(asked)
    of = next(each for each in compare(asked, p) if each.quantity == quantity)
    return likely_cause(replace(of, measured=ratio * of.predicted), asked, p)


def test_a_small_error_has_no_cause(tmp_path: Path) -> None:
    asked = question(tmp_path)
    for quantity in ("step_seconds", "memory_bytes"):
        assert cause(asked, 1.04, quantity) is None
        assert cause(asked, 0.97, quantity) is None
        assert cause(asked, 2.0, quantity) is not None


def test_a_run_that_did_not_fit_has_none(tmp_path: Path) -> None:
    asked = question(tmp_path)
    p = predicted(asked)
    of = next(each for each in compare(asked, p) if each.quantity == "memory_bytes")
    assert likely_cause(replace(of, measured=None, right=False), asked, p) is None


def test_small_kernels_wait_for_the_host(tmp_path: Path) -> None:
    small = question(tmp_path, model__hidden=512, model__heads=8, model__ffn=1024, model__seq=512, model__vocab=5000)
    assert "launch-bound" in (cause(small, 3.0) or "")
    assert "launch-bound" not in (cause(small, 0.3) or "")  # predicted too slow: launches cannot be why
    assert "launch-bound" not in (cause(question(tmp_path), 3.0) or "")


def test_a_large_part_is_named(tmp_path: Path) -> None:
    spread = question(tmp_path, layout={"gpus": 64, "tp": 8}, hardware__gpus_per_node=4)  # tp reaches between nodes
    assert "probably exposed exchanges" in (cause(spread, 0.8) or "")
    alone = question(tmp_path, layout={"gpus": 1}, global_batch=8)
    assert "exposed exchanges" not in (cause(alone, 0.8) or "")


def test_what_is_not_said_is_named_where_it_would_help(tmp_path: Path) -> None:
    silent = question(tmp_path, recompute=None)
    assert cause(silent, 1.3) == "recompute is not stated: none is assumed"
    assert "recompute" not in (cause(silent, 0.7) or "")  # recompute would be slower still


def test_a_head_that_is_no_multiple_of_eight(tmp_path: Path) -> None:
    odd = question(tmp_path, model__hidden=1984, model__heads=16, model__kv_heads=16)  # heads of 124
    assert cause(odd, 1.5) == "heads of 124, which is no multiple of 8, run slowly"


def test_the_shipped_odd_rows_are_there() -> None:
    """Each pattern has runs, and each says from where it is known."""
    runs = {row.id: question_of(row) for row in read()}
    for odd in odd_rows():
        assert odd.why
        assert odd.source
        for pattern in odd.ids:
            found = [name for name in runs if odd.has(Compared(name, "", odd.quantity, 1.0, 1.0))]
            assert found, pattern


def test_an_odd_row_is_said_to_be_one() -> None:
    row = next(row for row in read() if row.id == "titan25-8b-64-vanilla-float8rowwise")
    asked = question_of(row)
    assert isinstance(asked, Question)
    assert cause(asked, 1.5) == "odd row: fp8 that is slower than bf16"


def test_repeats_that_differ() -> None:
    def run(name: str, layout: int, measured: float, cause: str | None) -> Compared:
        return Compared(name, "s", "step_seconds", measured, 1.0, alike="g", layout=layout, likely_cause=cause)

    rows = [run("a", 1, 1.0, None), run("b", 1, 1.2, "x"), run("c", 2, 1.3, "y"), run("d", 3, 2.0, "z")]
    rows += [run("e", 3, 2.06, "w")]
    said = ["repeats of this run differ by 20%" if row.id == "b" else row.likely_cause for row in rows]
    assert [row.likely_cause for row in differing_repeats(rows)] == said


def test_kernels_are_counted_with_their_repeats() -> None:
    kernel, nothing = Compute("k", "forward", 1.0, 0, "bf16"), Compute("n", "forward", 0.0, 0, "bf16")
    assert kernels((kernel, nothing, Repeat(3, (kernel, Repeat(2, (kernel,)))))) == pytest.approx(1 + 3 * 3)
