"""Published runs that no fit and no range sees, and what their rows say that others do not."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from nanum.account.coefficients import coefficients
from nanum.job import Routing
from nanum.report.validation import print_validation
from nanum.validate import read, validate
from nanum.validate.questions import Question, question_of
from nanum.validate.rows import HELD_OUT, SHIPPED, Row


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.id: row for row in read()}


def question(row: Row) -> Question:
    asked = question_of(row)
    assert isinstance(asked, Question), asked
    return asked


def test_a_row_says_how_experts_are_laid_out(rows: dict[str, Row]) -> None:
    """Grok-1 as NVIDIA's recipe has it: cut by tp, padded to its share, FlashAttention (NVTE_FUSED_ATTN=0)."""
    asked = question(rows["dgxc-grok1-bf16-g512"])
    assert asked.job.routing == Routing(1.0, padded=True)
    assert (asked.layout.ep, asked.layout.etp, asked.layout.tp) == (8, 4, 4)
    assert asked.layout.structure.tp_overlap
    said = asked.engine.conventions(asked.model, asked.job, asked.layout.structure)
    assert (said.attention_library, said.tp_behind) == ("flash", "all")
    other = question(rows["dgxc-llama31-70b-bf16-g64"])
    said = other.engine.conventions(other.model, other.job, other.layout.structure)
    assert said.attention_library == "cudnn"


def test_a_row_of_ones_own_may_name_its_attention_library(rows: dict[str, Row]) -> None:
    fields = {**rows["dgxc-nemotron4-15b-bf16-g16"].fields, "id": "mine-1"}
    for library in ("flash", "cudnn"):
        asked = question(Row({**fields, "attention_library": library}))
        assert asked.engine.conventions(asked.model, asked.job, asked.layout.structure).attention_library == library


def test_nvidia_s_rows_agree_with_themselves() -> None:
    """GPUs are what the axes multiply to, and the batch divides among them."""
    of = [row for row in read(SHIPPED) if row.source.startswith("dgxc")]
    assert len(of) == 70 + 18 + 24
    for row in of:
        axes = [row[f"layout.{axis}"] or 1 for axis in ("dp", "tp", "pp", "cp")]
        assert np.prod(axes) == row["layout.gpus"], row.id
        assert row["global_batch"] % (row["layout.dp"] * row["micro_batch"]) == 0, row.id


def test_two_tables_part_what_fits_have_seen(rows: dict[str, Row]) -> None:
    these = [next(row for row in rows.values() if row.source == "sc21")]
    held = [rows["dgxc-gpt3-175b-bf16-g128"], rows["dgxc25-llama31-405b-h100-bf16-g512"]]
    document = validate([*these, *held])
    flags = {name: each["held_out"] for name, each in document["by_source"].items()}
    assert flags == {these[0].source: False, "dgxc/dense": True, "dgxc25": True}
    step = document["summary"]["step_seconds"]
    of = {name: each["step_seconds"]["mape"] for name, each in document["by_source"].items()}
    assert step["mean_of_sources"]["mape"] == of[these[0].source]
    assert step["mean_of_held_out"]["mape"] == pytest.approx((of["dgxc/dense"] + of["dgxc25"]) / 2)
    text = shown(document)
    assert "that no fit and no range has seen" in text
    assert "All 3 runs, of both tables" in text
    assert "of both tables" not in shown(validate(held))
    assert "All 2 runs" in shown(validate(held))


def shown(document: dict[str, Any]) -> str:
    page = io.StringIO()
    print_validation(document, Console(file=page, width=100), rows=False)
    return re.sub(r"\s+", " ", page.getvalue())


@pytest.fixture
def calibrate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SHIPPED.parents[4]))
    from bench import calibrate

    return calibrate


def test_what_is_held_out_is_predicted_by_what_all_others_say(rows: dict[str, Row], calibrate: Any) -> None:
    """As `make calibrate` works its errors out, and as `validate` prints them."""
    row = rows["dgxc-gpt3-175b-bf16-g128"]
    assert row.unseen == HELD_OUT["dgxc/dense"] == ""
    fitted = [getattr(coefficients().fitted, name).value for name in calibrate.NAMES]
    other = rows["dgxc-gpt3-175b-bf16-g256"]
    missed = calibrate._missed([row, other], {"": np.array(fitted), "zb": np.ones(len(fitted))}, [])
    (told,) = validate([row])["rows"]
    assert missed.ratio[0] == pytest.approx(told["measured"] / told["predicted"])
    assert missed.unlike[0]  # among no fitted runs nothing is usual


def test_a_run_is_held_by_the_range_of_its_kind(calibrate: Any) -> None:
    of = {"dense": [0.9, 1.1], "moe": [0.8, 1.2], "unlike": [0.7, 1.3]}
    ratio, moe, unlike = np.array([1.15, 1.15, 1.25, 1.25]), np.array([0, 1, 1, 0], bool), np.array([0, 0, 0, 1], bool)
    runs = calibrate.Missed(ratio, np.array(["a"] * 4), moe, unlike)
    assert calibrate.held(of, runs) == 0.5


def test_a_source_that_warns_of_its_noise_widens_nothing(calibrate: Any) -> None:
    noisy = [name for name, source in calibrate.SOURCES.items() if source.noisy]
    assert noisy == ["jz"]
    names = np.repeat(["mpt", "zb", "jz"], 20)
    ratio = np.concatenate([np.linspace(0.95, 1.05, 40), np.linspace(0.5, 2.0, 20)])
    missed = calibrate.Missed(ratio, names, *np.zeros((2, 60), bool))
    low, high = calibrate._of(missed, ["mpt", "zb", "jz"], (0.1, 0.9))["unlike"]
    assert 0.9 < low < high < 1.1
