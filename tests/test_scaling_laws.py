"""Ever more GPUs: the laws and their fits, and counts and layouts that grow."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy.optimize import least_squares

from nanum.cluster import load as load_cluster
from nanum.errors import Refused
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import load as load_model
from nanum.prediction import karp_flatt
from nanum.scaling import Growth, scale
from nanum.scaling.growth import cluster_of, doubling, job_of
from nanum.scaling.laws import (
    amdahl_limit,
    amdahl_speedup,
    fit_amdahl,
    fit_gustafson,
    fit_with_shares,
    gpus_at_half_efficiency,
    gustafson_speedup,
)

FRACTIONS = st.floats(1e-6, 0.9)
COUNTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=8, unique=True).filter(lambda counts: max(counts) > 1)
SPEEDUPS = st.lists(st.tuples(st.integers(2, 10**5), st.floats(0.01, 1.2)), min_size=1, max_size=6)

# --- laws -------------------------------------------------------------------------------------------------------------


@given(FRACTIONS, COUNTS)
def test_a_curve_of_amdahl_gives_back_its_fraction(fraction: float, counts: list[int]) -> None:
    found = fit_amdahl([(n, amdahl_speedup(fraction, n)) for n in counts])
    assert found == pytest.approx(fraction, rel=1e-9, abs=1e-9)


@given(FRACTIONS, COUNTS)
def test_a_line_of_gustafson_gives_back_its_fraction(fraction: float, counts: list[int]) -> None:
    found = fit_gustafson([(n, gustafson_speedup(fraction, n)) for n in counts])
    assert found == pytest.approx(fraction, rel=1e-9, abs=1e-9)


@given(FRACTIONS, st.floats(0.1, 1.0), st.lists(st.integers(1, 4096), min_size=3, max_size=8, unique=True))
def test_shares_of_some_efficiency_are_told_from_what_is_serial(
    fraction: float, each: float, counts: list[int]
) -> None:
    found = fit_with_shares([(n, amdahl_speedup(fraction, n, each)) for n in counts])
    assert found is not None
    assert found.serial_fraction == pytest.approx(fraction, rel=1e-6, abs=1e-9)
    assert found.share_efficiency == pytest.approx(each, rel=1e-6)
    half = found.gpus_at_half_efficiency
    assert half is not None
    assume(half > 0)
    assert found.speedup(half) / half == pytest.approx(0.5, rel=1e-4)


@given(FRACTIONS)
def test_half_the_efficiency_is_lost_at_one_and_the_limit(fraction: float) -> None:
    half, limit = gpus_at_half_efficiency(fraction), amdahl_limit(fraction)
    assert half is not None
    assert limit is not None
    assert half == pytest.approx(1 + limit)
    assert amdahl_speedup(fraction, half) / half == pytest.approx(0.5)


@given(st.lists(st.integers(1, 10**6), min_size=2, unique=True))
@example([3, 7, 49])  # whose seconds, divided and multiplied, are not quite those of one
def test_without_anything_serial_there_is_no_limit(counts: list[int]) -> None:
    seconds = 1.1
    pairs = [(n, seconds / (seconds / n)) for n in counts]
    assert fit_amdahl(pairs) == 0
    assert amdahl_limit(0.0) is None
    assert gpus_at_half_efficiency(0.0) is None


@given(SPEEDUPS)
def test_the_fitted_fraction_lies_between_the_points(points: list[tuple[int, float]]) -> None:
    pairs = [(n, n * efficiency) for n, efficiency in points]
    each = [karp_flatt(speedup, n) for n, speedup in pairs]
    found = fit_amdahl(pairs)
    assert found is not None
    assert min(each) - 1e-9 <= found <= max(each) + 1e-9


PAIRS = [(8, 6.9), (16, 12.0), (64, 33.0), (256, 71.0)]


def test_fits_are_the_least_squares_of_relative_errors() -> None:
    one = least_squares(lambda s: [speedup / amdahl_speedup(s[0], n) - 1 for n, speedup in PAIRS], [0.01], xtol=1e-14)
    assert fit_amdahl(PAIRS) == pytest.approx(one.x[0], rel=1e-6)
    two = least_squares(lambda q: [speedup * (q[0] + q[1] / n) - 1 for n, speedup in PAIRS], [0.01, 1.0], xtol=1e-14)
    shares = fit_with_shares(PAIRS)
    assert shares is not None
    assert shares.serial_fraction == pytest.approx(two.x[0], rel=1e-6)
    assert shares.share_efficiency == pytest.approx((1 - two.x[0]) / two.x[1], rel=1e-6)
    weak = least_squares(
        lambda s: [gustafson_speedup(s[0], n) / speedup - 1 for n, speedup in PAIRS], [0.1], xtol=1e-14
    )
    assert fit_gustafson(PAIRS) == pytest.approx(weak.x[0], rel=1e-6)


def test_one_gpu_alone_says_nothing_of_a_law() -> None:
    assert fit_amdahl([(1, 1.0)]) is None
    assert fit_gustafson([(1, 1.0)]) is None
    assert fit_with_shares(PAIRS[:2]) is None


@pytest.mark.parametrize(("fraction", "speedup"), [(0.004, 1020), (0.008, 1016)])
def test_gustafsons_paper(fraction: float, speedup: int) -> None:
    """Gustafson 1988: 1,024 processors whose serial time is 0.4 to 0.8 percent are 1,016 to 1,020 times as fast."""
    assert round(gustafson_speedup(fraction, 1024)) == speedup


# --- what grows -------------------------------------------------------------------------------------------------------

NODE, EIGHT = load_cluster("1x8xh100-sxm"), load_cluster("8x8xh100-sxm")


@given(st.integers(1, 600), st.integers(1, 80), st.integers(1, 64))
def test_default_counts_double_and_can_be_had(nodes: int, per_node: int, held: int) -> None:
    cluster = replace(NODE, nodes=nodes, gpus_per_node=per_node)
    counts = doubling(cluster, held)
    assert counts[-1] == cluster.gpus
    assert all(2 * before <= after for before, after in pairwise(counts))
    for n in counts:
        assert cluster_of(cluster, n).gpus == n
        assert n % held == 0 or n == cluster.gpus
    assert counts[0] < 2 * held or per_node % held  # the fewest there are, but where nodes do not hold the ranks


def test_counts_by_hand() -> None:
    assert doubling(EIGHT, 1) == (1, 2, 4, 8, 16, 32, 64)
    assert doubling(EIGHT, 16) == (16, 32, 64)
    assert doubling(replace(NODE, nodes=8, gpus_per_node=72), 1) == (1, 2, 4, 9, 18, 36, 72, 144, 288, 576)
    assert doubling(replace(NODE, nodes=24), 1) == (1, 2, 4, 8, 24, 48, 96, 192)


def test_more_nodes_of_the_same_machine_and_parts_of_one() -> None:
    assert (cluster_of(EIGHT, 1024).nodes, cluster_of(EIGHT, 1024).gpus_per_node) == (128, 8)
    assert (cluster_of(EIGHT, 4).nodes, cluster_of(EIGHT, 4).gpus_per_node) == (1, 4)
    assert cluster_of(EIGHT, 1024).inter_node == EIGHT.inter_node
    with pytest.raises(Refused, match="not whole nodes of 8"):
        cluster_of(EIGHT, 12)


def test_the_axis_that_grows() -> None:
    plain = Structure(zero=0)
    assert Growth.of(Layout(dp_shard=64)).on(128) == Layout(dp_shard=128)
    assert Growth.of(Layout(dp_replicate=8, dp_shard=8)).on(128) == Layout(dp_replicate=16, dp_shard=8)
    assert Growth.of(Layout(structure=plain)).on(16) == Layout(dp_replicate=16, structure=plain)
    assert Growth.of(Layout(dp_shard=4, tp=8, pp=2)).on(48) == Layout(dp_shard=3, tp=8, pp=2)
    with pytest.raises(Refused, match="pp 2 · tp 8 = 16 ranks do not divide"):
        Growth.of(Layout(tp=8, pp=2)).on(24)


def test_the_weak_forms_batch() -> None:
    job = Job(1024, 128)
    assert [job_of(job, EIGHT, n, "weak").global_batch_size for n in (8, 64, 512)] == [16, 128, 1024]
    assert job_of(job, EIGHT, 512, "strong") is job
    with pytest.raises(Refused, match="no whole number"):
        job_of(job, EIGHT, 1, "weak") and job_of(Job(1024, 100), EIGHT, 8, "weak")


# --- where the batch ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        (Layout(dp_shard=4, tp=2, micro_batch_size=2), 16),
        (Layout(dp_replicate=2, dp_shard=4), 16),
        (Layout(dp_shard=8, micro_batch_size=4), 4),
        (Layout(dp_replicate=2, dp_shard=2, tp=2, micro_batch_size=2), 16),
    ],
    ids=str,
)
def test_a_batch_is_divided_among_so_many_gpus_and_no_more(layout: Layout, most: int) -> None:
    found = scale(load_model("gpt2"), Job(1024, 16), load_cluster("4x8xh100-sxm"), layout, gpus=(most, 2 * most))
    document = found.to_dict()
    assert document["most_gpus"] == most
    assert [point["gpus"] for point in document["points"]] == [most]
    assert [(each["gpus"], each["form"]) for each in document["rejected"] if each["form"] == "strong"] == [
        (2 * most, "strong")
    ]
