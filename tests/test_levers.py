"""Where nothing fits: what makes the layout that comes nearest fit, and what is tight where something does."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from nanum import cluster
from nanum import model as models
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.prediction import predict
from nanum.report.terminal import print_plan, print_prediction
from nanum.search import levers, plan

from conftest import Run  # isort: skip

ASKED = models.load("llama-3.1-70b"), Job(8192, 512), cluster.load("4x8xa100-sxm-40gb")


def flowing(printer: Any, document: dict[str, Any]) -> str:
    page = io.StringIO()
    printer(document, Console(file=page, width=80))
    return re.sub(r"\s+", " ", page.getvalue())


def test_a_plan_of_nothing_names_what_it_does_not_search() -> None:
    found = plan(*ASKED)
    assert not found.candidates
    document = found.to_dict(in_full=False)
    named = {one["flags"]: one["device_bytes"] for one in document["least"]["levers"]}
    capacity = document["least"]["capacity_bytes"]
    assert {"--optimizer adamw-8bit", "--offload params"} <= named.keys()
    assert all(size <= capacity < document["least"]["device_bytes"] for size in named.values())
    assert "But it fits with any one of --optimizer adamw-bf16" in flowing(print_plan, document)


def test_each_lever_is_what_predict_says_of_it(nanum: Run) -> None:
    words = ["llama-3.1-70b", "4x8xa100-sxm-40gb", "--tp", "8", "--cp", "2", "--cp-kind", "allgather"]
    words += ["--recompute", "full", "--global-batch-size", "512"]
    document = json.loads(nanum("predict", *words, "--json").stdout)
    assert document["nearest"] is None
    assert document["levers"]
    assert "This very layout fits with any one of" in flowing(print_prediction, document)
    for one in document["levers"]:
        again = json.loads(nanum("predict", *words, *one["flags"].split(), "--json").stdout)
        assert again["fits"]
        assert again["memory"]["worst"]["device_bytes"] == one["device_bytes"]


def test_an_engine_s_levers_are_its_own() -> None:
    layout = Layout(
        dp_shard=2, tp=8, pp=2, structure=Structure(zero=1, tensor="sequence", recompute="full", pipelined=True)
    )
    named = {one["flags"] for one in levers(predict(*ASKED, layout, engine="megatron"))}
    assert not named & {"--offload params", "--loss chunked", "--optimizer adamw-8bit"}


@pytest.mark.parametrize(("high", "tight"), [(0.99, False), (1.01, True)])
def test_what_may_be_too_large_is_tight(
    high: float, tight: bool, prediction_document: dict[str, Any], plan_document: dict[str, Any]
) -> None:
    """By the most of what is assumed beyond tensors, whatever is expected of it."""
    memory = prediction_document["memory"]
    memory["worst"]["device_bytes_high"] = int(high * memory["capacity_bytes"])
    assert ("tight: by the most that is assumed" in flowing(print_prediction, prediction_document)) == tight
    for one in plan_document["shortlist"]:
        one["memory"] = memory
    assert ("* is tight" in flowing(print_plan, plan_document)) == tight
