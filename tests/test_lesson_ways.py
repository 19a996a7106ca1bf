"""Part E of the lesson, from a real run and from runs that are made up; and every text of parts D and E."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import nothing, printed, widest
from test_lesson_runs import STEPS, flat, noisy, part_d, sampled, unlisted

from nanum.engines.torch import on_gloo
from nanum.lesson import three_ways
from nanum.lesson.three_ways import Tiny
from nanum.lesson.words import TEXTS
from nanum.verify import Case, Verification
from nanum.verify.gloo import received_bytes

WAYS = ("data_parallel", "tensor_parallel", "pipeline")
TINY = Tiny(hidden_size=32, layers=2, vocab_size=100, seq_len=16)


def test_the_three_ways_are_really_run() -> None:
    pytest.importorskip("torch")
    part = three_ways.part_e(nothing, tiny=TINY)
    assert part["ok"]
    for way in part["ways"].values():
        assert (way["difference_bytes"], way["rows_that_differ"]) == (0, 0)
        assert way["sockets"]["ok"]
        assert way["loss_error"] < 1e-4
        assert way["gradient_error"] < 1e-4
    held = [each for way in part["ways"].values() for rank in way["held"] for each in rank["bytes"].values()]
    exact = [each for each in held if each["exact"]]
    assert len(exact) == 2 * (
        4 + 4 + 3
    )  # params, gradients and states of each rank, and what it saves but in a pipeline
    assert all(each["predicted_bytes"] == each["counted_bytes"] for each in exact)
    assert unlisted("E", part) == []
    assert "And all three train the same model: over 4 steps" in flat(printed("en", "E", part))


# Part E from runs that are made up


def as_predicted(case: Case) -> Verification:
    """A run that exchanges and holds what is predicted."""
    run = Verification(case, on_gloo(None), {"torch": "2", "backend": "gloo", "ranks": []})
    for rank, of in enumerate(run.predicted):
        came = sum(received_bytes(key.kind, row.payload_bytes, key.group_size) for key, row in of.ledger.items())
        memory = {name: of.memory[name] for name in ("params", "grads", "optimizer_states")}
        memory |= {"before": 0, "after_forward": of.memory.get("saved"), "peak": of.memory["allocated_peak"]}
        answer = {"rank": rank, "exchanges": [[*key, *row] for key, row in of.ledger.items()], "memory": memory}
        answer |= {
            "reference_losses": [2.0, 1.0],
            "losses": [[2.0], [1.0]],
            "parameters": ["w"],
            "gradients": {"w": 0.0},
            "traces": {"w": [1.0, 1.0]},
        }
        answer |= {"received_bytes": round(came), "did": run._order(rank) if case.layout.structure.pipelined else []}
        run.answer["ranks"].append(answer)
    return run


@pytest.fixture(scope="module")
def part_e() -> dict[str, Any]:
    return three_ways.from_runs(TINY, {name: as_predicted(case) for name, case in TINY.cases().items()})


def test_the_formulas_and_what_the_ledger_has_beyond_them(part_e: dict[str, Any]) -> None:
    h, layers, vocab, tokens = 32, 2, 100, 8 * 16
    parameters = 2 * vocab * h + layers * (4 * h * h + 3 * h * 88 + 2 * h) + h
    assert part_e["ok"]
    assert part_e["model"]["parameters"] == parameters
    assert part_e["alone"]["held"][0]["bytes"]["params"]["counted_bytes"] == 4 * parameters
    ways = part_e["ways"]
    assert {name: ways[name]["formula"]["bytes"] for name in WAYS} == {
        "data_parallel": 4 * parameters,  # 2 (N - 1) / N is 1 for two ranks
        "tensor_parallel": 4 * layers * tokens * h * 4,
        "pipeline": tokens * h * 4,
    }
    ends = 2 * tokens * h * 4 + tokens * vocab * 4 // 2  # one more all-reduce each way, and logits gathered from halves
    assert {name: ways[name]["beyond_formula_bytes"] for name in WAYS} == {
        "data_parallel": 2 * 16 * (h // 4) * 4,  # cosines and sines of each place
        "tensor_parallel": ends,
        "pipeline": 0,
    }
    for way in ways.values():
        assert way["predicted_bytes"] == way["counted_bytes"] == way["formula"]["bytes"] + way["beyond_formula_bytes"]
    text = flat(printed("en", "E", part_e))
    assert f"gathers the logits over the vocabulary ({ends:,} bytes)" in text
    assert "is 0 in every row" in text
    assert "Not all of it is as predicted" not in text


def wrong(part_e: dict[str, Any]) -> dict[str, Any]:
    """The same run, had it found something else than was predicted, on a system that tells nothing of sockets."""
    document: dict[str, Any] = json.loads(json.dumps(part_e))
    document["ok"] = False
    way = document["ways"]["pipeline"]
    way |= {"ok": False, "rows_that_differ": 2, "counted_bytes": 7, "difference_bytes": -9, "beyond_formula_bytes": 5}
    way["checks"][1] |= {"name": "gradients", "ok": False}
    way["sockets"] |= {"counted_bytes": None}
    params, peak = (way["held"][0]["bytes"][what] for what in ("params", "allocated_peak"))
    params |= {"counted_bytes": params["counted_bytes"] + 1, "ok": False}
    peak = way["held"][1]["bytes"]["allocated_peak"]
    peak |= {"counted_bytes": 2 * peak["predicted_bytes"], "ok": False}
    tensor = document["ways"]["tensor_parallel"]["held"][0]["bytes"]
    tensor["grads"]["counted_bytes"] = tensor["params"]["counted_bytes"]
    return document


def test_a_difference_is_shown(part_e: dict[str, Any]) -> None:
    text = flat(printed("en", "E", wrong(part_e)))
    assert "Predicted and counted differ: pipeline in 2 rows" in text
    assert "is 0 in every row" not in text
    assert "did not train the same model" in text
    assert "pipeline (gradients)" in text
    assert "peak -50.00%" in text
    assert "0 differ" not in text


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_every_text_is_printed_and_fits_the_page(lang: str, part_e: dict[str, Any], said: set[str]) -> None:
    more = sampled({**STEPS, "at_once": (0.06, 0.12, 0.05), "buckets": (0.1, 0.2, 0.05)}, 0.06)
    parts = [
        part_d(sampled(STEPS, 0.06)),
        part_d(more),
        part_d(sampled({**STEPS, "buckets": (0.04, 0.08, 0.03)}, 0.06), cores=1),
        part_d(sampled(STEPS, 0.06, jitter=(1.0, 1.0)), cores=3),
        part_d(noisy("buckets", [1.2, 1.2, 1.2, 1.2, 1.2, 0.9, 0.9, 0.9, 0.9])),
        part_d(noisy("at_once", [0.8, 1.3, 0.7, 1.2, 0.75, 1.1, 0.8, 1.05, 1.4])),
    ]
    text = "".join(printed(lang, "D", document) for document in parts)
    text += printed(lang, "E", part_e) + printed(lang, "E", wrong(part_e))
    assert widest(text) <= 80
    keys = {key for key in TEXTS[lang] if key[:2] in ("D.", "E.")}
    assert keys - said <= {"D.progress", "E.progress", "D.no_speedup", "D.crowded"}
