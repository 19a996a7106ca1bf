"""`nanum validate`: the arithmetic of errors, of ranges, and of sources."""

from __future__ import annotations

import pytest

from nanum.validate.summary import Compared, errors, mean_of_sources, summary


def test_errors_by_hand() -> None:
    made = [("a", 2.0, 1.0), ("b", 4.0, 5.0), ("c", 10.0, 10.0), ("d", 1.0, 3.0)]  # errors -50 %, +25 %, 0, +200 %
    found = errors([Compared(i, "s", "step_seconds", m, p, 0.8 * p, 1.4 * p) for i, m, p in made])
    assert found["n"] == 4
    assert found["mape"] == pytest.approx((0.5 + 0.25 + 0 + 2) / 4)
    assert found["median"] == pytest.approx(0.375)
    assert found["max"] == pytest.approx(2)
    assert found["bias"] == pytest.approx((-0.5 + 0.25 + 0 + 2) / 4)
    assert found["p90"] == pytest.approx(0.5 + 0.7 * 1.5)  # 0.9 of the way from the first to the last of 0, .25, .5, 2
    assert found["in_range"] == pytest.approx(0.5)  # b's is 4 to 7, c's 8 to 14; a's ends at 1.4 and d's begins at 2.4


def test_the_width_of_a_range_by_hand() -> None:
    ranges = [
        (10.0, 8.0, 14.0),
        (10.0, 9.0, 11.0),
        (4.0, 3.0, 4.0),
    ]  # half of it over what is predicted: 0.3, 0.1, 0.125
    rows = [Compared(str(i), "s", "step_seconds", 10.0, p, low, high) for i, (p, low, high) in enumerate(ranges)]
    found = errors([*rows, Compared("none", "s", "step_seconds", 10.0, 10.0)])
    assert found["width_median"] == pytest.approx(0.125)
    assert errors(rows[:0])["width_median"] is None


def test_a_source_of_many_rows_does_not_speak_for_all() -> None:
    many = summary(Compared(str(i), "many", "step_seconds", 1.0, 2.0) for i in range(9))
    few = summary([Compared("a", "few", "step_seconds", 2.0, 1.0, 0.5, 3.0)])
    found = mean_of_sources([many, few, summary([])], "step_seconds")
    assert (found["sources"], found["mape"], found["bias"]) == (2, 0.75, 0.25)
    assert (found["in_range"], found["width_median"]) == (1.0, 1.25)  # of the one that has ranges
    assert mean_of_sources([many], "memory_bytes")["mape"] is None


def test_quantities_are_not_mixed() -> None:
    found = summary([Compared("a", "s", "step_seconds", 1, 2), Compared("a", "s", "memory_bytes", 4, 3)])
    assert found["step_seconds"]["bias"] == 1
    assert found["memory_bytes"]["bias"] == -0.25
    assert found["memory_bytes"]["in_range"] is None
    assert errors([])["mape"] is None
