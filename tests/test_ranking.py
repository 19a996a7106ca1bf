"""How well layouts are ranked: pairs by hand and against brute force, repeats, regrets, and what a group is."""

from __future__ import annotations

from itertools import product
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_validate import question

from nanum.validate import alike, layout
from nanum.validate.ranking import THRESHOLD, groups, ranking
from nanum.validate.summary import Compared


def run(name: str, at: Any, measured: float | None, predicted: float, group: Any = "g", source: str = "s") -> Compared:
    quantity = "step_seconds"
    return Compared(name, source, quantity, measured, predicted, alike=(source, group), layout=at)


def ranked(*rows: Compared) -> dict[str, Any]:
    return ranking(groups(rows).values())


def test_a_right_and_a_wrong_call() -> None:
    right = ranked(run("a", 1, 1.0, 10.0), run("b", 2, 2.0, 11.0))
    assert (right["groups"], right["pairs"], right["right"], right["regret_worst"]) == (1, 1, 1.0, 0.0)
    wrong = ranked(run("a", 1, 1.0, 11.0), run("b", 2, 2.0, 10.0))
    assert (wrong["groups"], wrong["pairs"], wrong["right"], wrong["regret_worst"]) == (1, 1, 0.0, 1.0)
    assert wrong["worst_group"] == {"layouts": 2, "chosen": "b", "best": "a"}


def test_a_tie_calls_nothing_right_and_chooses_the_slower() -> None:
    found = ranked(run("a", 1, 1.0, 10.0), run("b", 2, 1.5, 10.0))
    assert (found["pairs"], found["right"], found["regret_worst"]) == (1, 0.0, 0.5)


def test_layouts_that_are_close_are_no_pair_but_have_a_regret() -> None:
    found = ranked(run("a", 1, 1.0, 11.0), run("b", 2, 1.04, 10.0))
    assert (found["groups"], found["pairs"], found["right"]) == (1, 0, None)
    assert found["regret_median"] == pytest.approx(0.04)


def test_a_source_whose_repeats_differ_has_a_threshold_of_its_own() -> None:
    for source, pairs in (("bs176", 0), ("other", 1)):
        found = ranked(run("a", 1, 1.0, 1.0, source=source), run("b", 2, 1.08, 1.1, source=source))
        assert (found["pairs"], found["threshold"]) == (pairs, 0.10 if source == "bs176" else 0.05)


def test_repeats_are_averaged() -> None:
    """Measured 1 and 3 s, one layout is as fast as the other of 2 s: no pair."""
    found = ranked(run("a", 1, 1.0, 5.0), run("b", 1, 3.0, 5.0), run("c", 2, 2.0, 4.0))
    assert (found["groups"], found["pairs"], found["regret_worst"]) == (1, 0, 0.0)
    assert ranked(run("a", 1, 1.0, 5.0), run("b", 1, 3.0, 5.0))["groups"] == 0  # one layout is no group


def test_what_was_not_measured_or_is_no_time_is_not_ranked() -> None:
    memory = Compared("m", "s", "memory_bytes", 1.0, 1.0, alike=("s", "g"), layout=3)
    unknown = Compared("u", "s", "step_seconds", 1.0, 1.0)
    assert ranked(run("a", 1, 1.0, 10.0), run("b", 2, None, 11.0), memory, unknown)["groups"] == 0


def test_sources_weigh_the_same() -> None:
    one = [run("a", 1, 1.0, 2.0, source="one"), run("b", 2, 2.0, 1.0, source="one")]  # its only pair is wrong
    many = [run(str(i), i, 1.0 + i, 1.0 + i, source="many") for i in range(5)]  # ten pairs, all right
    found = ranked(*one, *many)
    assert (found["sources"], found["groups"], found["pairs"]) == (2, 2, 11)
    assert (found["right"], found["regret_median"], found["regret_worst"]) == (0.5, 0.5, 1.0)


seconds = st.integers(1, 30).map(lambda n: n / 10)
runs = st.lists(
    st.tuples(st.sampled_from("xy"), st.sampled_from("gh"), st.integers(0, 3), seconds, seconds), max_size=12
)


@given(runs)
def test_pairs_are_those_of_brute_force(made: list[tuple[str, str, int, float, float]]) -> None:
    """Over all ordered pairs of averaged layouts, each counted from its faster side alone."""
    rows = [run(str(i), at, m, p, group, source) for i, (source, group, at, m, p) in enumerate(made)]
    mean: dict[tuple[str, str, int], tuple[float, float]] = {}
    for key in {each[:3] for each in made}:
        repeats = [(m, p) for *k, m, p in made if tuple(k) == key]
        mean[key] = fmean(m for m, _ in repeats), fmean(p for _, p in repeats)
    shares, medians, pairs = [], [], 0
    for source in "xy":
        called = [
            mean[a][1] < mean[b][1]
            for a, b in product(mean, mean)
            if a[:2] == b[:2] and a[0] == source and mean[b][0] > (1 + THRESHOLD) * mean[a][0]
        ]
        regrets = []
        for group in "gh":
            inside = [value for key, value in mean.items() if key[:2] == (source, group)]
            if len(inside) > 1:
                least = min(p for _, p in inside)
                regrets.append(max(m for m, p in inside if p == least) / min(m for m, _ in inside) - 1)
        pairs += len(called)
        shares += [fmean(called)] if called else []
        medians += [median(regrets)] if regrets else []
    found = ranked(*rows)
    assert found["pairs"] == pairs
    assert found["right"] == (pytest.approx(fmean(shares)) if shares else None)
    assert found["regret_median"] == (pytest.approx(fmean(medians)) if medians else None)


@given(runs)
def test_who_knows_the_measured_times_ranks_perfectly(made: list[tuple[str, str, int, float, float]]) -> None:
    known = [run(str(i), at, m, m, group, source) for i, (source, group, at, m, _) in enumerate(made)]
    found = ranked(*known)
    assert found["right"] in (None, 1.0)
    assert found["regret_worst"] in (None, 0.0)


# --- what differs in its layout alone ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change",
    [
        {"layout__tp": 4, "layout__dp": 2},
        {"layout__pp": 2, "layout__dp": 2},
        {"layout__sequence_parallel": False},
        {"layout__zero_stage": 1},
        {"micro_batch": 2},
        {"recompute": "full"},
    ],
    ids=lambda change: "-".join(change),
)  # fmt: skip
def test_another_layout(tmp_path: Any, change: dict[str, Any]) -> None:
    one, other = question(tmp_path), question(tmp_path, **change)
    assert alike(one) == alike(other)
    assert layout(one) != layout(other)


@pytest.mark.parametrize(
    "change",
    [
        {"id": "mine-1"},
        {"source": "another notebook"},
        {"model__layers": 20},
        {"model__seq": 2048},
        {"hardware__gpu": "A100-SXM4-80GB"},
        {"layout__gpus": 16, "layout__dp": 8},
        {"global_batch": 64},
        {"precision": "fp8, one recipe"},
        {"precision": "bf16, another optimizer"},
        {"overlap": "exchanges one at a time"},
        {"task": "another container"},
    ],
    ids=lambda change: "-".join(change),
)
def test_more_than_another_layout(tmp_path: Any, change: dict[str, Any]) -> None:
    assert alike(question(tmp_path)) != alike(question(tmp_path, **change))


@pytest.mark.parametrize("change", [{"id": "own-2"}, {"model__name": "another name"}, {"measured__step_time_s": 3.0}])
def test_neither_names_nor_what_was_measured_tell_runs_apart(tmp_path: Any, change: dict[str, Any]) -> None:
    one, other = question(tmp_path), question(tmp_path, **change)
    assert (alike(one), layout(one)) == (alike(other), layout(other))
