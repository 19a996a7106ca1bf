"""What kernels cost: coefficients refitted, and times by hand."""

import csv
import dataclasses
import tomllib
from importlib.resources import files

import numpy as np
import pytest
from scipy.optimize import least_squares

from nanum.account.coefficients import most_of
from nanum.account.cost import TILE_AREA, Cost, coefficients
from nanum.cluster import Chip, Cluster, Link, Quantity
from nanum.cluster import load as load_cluster
from nanum.collectives import wire_bytes
from nanum.job import Job
from nanum.layout import Layout, Structure
from nanum.model import load as load_model
from nanum.prediction import consistent, predict
from nanum.program import Collective, Compute

MEASURED = files("nanum") / "data/measured"
WIDTH = {"bf16": 2, "fp32": 4}
LAYOUT = Layout(dp_replicate=2, dp_shard=4, cp=1, tp=4)  # 32 GPUs: two of the four shards on a node


def rows(name):
    return list(csv.DictReader((MEASURED / name).read_text().splitlines()))


def tables():
    return {table["gpu"]: table for table in tomllib.loads((MEASURED / "cost.toml").read_text())["kernel_table"]}


def known(value):
    return Quantity(value, "assumed", "a test")


def chip(**changed):
    stated = {
        "name": "a100-sxm-80gb",
        "peak_flops_per_second": {"bf16": known(312e12), "fp32": known(19.5e12)},
        "best_flops_per_second": {"bf16": known(271.2e12)},
        "memory_bytes": known(80e9),
        "memory_bytes_per_second": known(2e12),
        "multiprocessors": known(108),
    }
    return Chip(**(stated | changed))


def cluster(nodes=4, gpus_per_node=8, its=None):
    nvlink = Link("NVLink", known(300e9), known(0.8), known(2e-6), 8)
    network = Link("InfiniBand", known(25e9), known(0.5), known(10e-6), 16)
    return Cluster("test", nodes, gpus_per_node, its or chip(), nvlink, network)


SLOWEST = coefficients().slowest(cluster().gpus)


def matmul(m, n, k, dtype="bf16"):
    return Compute("linear", "forward", 2.0 * m * n * k, 2 * (m * n + n * k + m * k), dtype, (m, n, k))


def exchange(kind, axes, size, payload, calls=1):
    return Collective(kind, axes, "forward", "params", "bf16", size, calls, payload, wire_bytes(kind, payload, size))


def alone(cluster, layout):
    """Costs of what is done alone, as benchmarks do it, and not in a step."""
    return Cost(cluster, layout, coefficients().alone)


# The coefficients.


def test_matmul_coefficients_are_the_fit_of_the_shipped_rows():
    table = rows("kernels_matmul.csv")
    names = ["A100-PCIe-80GB", "B200"]
    which = np.array([names.index(row["gpu"]) for row in table])
    m, n, k, fraction = (
        np.array([float(row[field]) for row in table]) for field in ("m", "n", "k", "fraction_of_peak")
    )
    written = np.array([WIDTH[row["out_dtype"]] * (1 + (row["accumulate"] == "True")) for row in table]) * m * n
    peak, best, multiprocessors, bandwidth = (
        np.array([tables()[name][field] for name in names])[which]
        for field in ("peak_flops_per_second", "best_flops_per_second", "multiprocessors", "memory_bytes_per_second")
    )
    flops = 2 * m * n * k

    def log_error(logs):
        unhidden, tile, *typical = np.exp(logs)
        products = flops / (np.array(typical)[which] * best) * (1 + tile * multiprocessors * TILE_AREA / (m * n))
        return np.log(flops / (products + unhidden * written / bandwidth) / (fraction * peak))

    fit = least_squares(log_error, np.log([0.5, 0.5, 1, 1]), loss="soft_l1", f_scale=0.1)
    shipped = coefficients()
    typical = [shipped.family("a100-sxm-80gb").matmul.value, shipped.family("b200").matmul.value]
    assert np.exp(fit.x) == pytest.approx(
        [shipped.matmul_unhidden.value, shipped.matmul_tile.value, *typical], rel=2e-3
    )
    error = np.abs(np.exp(log_error(fit.x)) - 1)
    assert [error[which == i].mean() for i in (0, 1)] == pytest.approx([0.044, 0.101], abs=0.003)


@pytest.mark.parametrize(
    ("gpu", "most"),
    [
        ("A100-PCIe-80GB", {"forward": 0.05, "input_gradient": 0.13, "weight_gradient": 0.13}),
        ("B200", {"forward": 0.26, "input_gradient": 0.16, "weight_gradient": 0.21}),
    ],
)
def test_grouped_products_of_experts_take_what_products_launched_apart_do(gpu, most):
    """None of these 120 has a part in a fit: the law of dense products, of each group by itself."""
    table = tables()[gpu]
    family = next(family for family in coefficients().families if family.name == table["family"])
    its = chip(
        name=family.chips[0],
        peak_flops_per_second={"bf16": known(table["peak_flops_per_second"])},
        best_flops_per_second={"bf16": known(table["best_flops_per_second"])},
        memory_bytes_per_second=known(table["memory_bytes_per_second"]),
        multiprocessors=known(table["multiprocessors"]),
    )
    cost = alone(cluster(its=its), Layout())
    errors = {stage: [] for stage in most}
    for row in rows("kernels_grouped.csv"):
        if row["gpu"] != gpu:
            continue
        groups, m, n, k = (int(row[field]) for field in ("groups", "m", "n", "k"))
        width = 2 * WIDTH["fp32"] if row["stage"] == "weight_gradient" else WIDTH["bf16"]
        node = Compute(
            "experts", "forward", 2.0 * groups * m * n * k, 0, "bf16", (groups * m, n, k),
            products=groups, launches=groups, element_bytes=width,
        )  # fmt: skip
        fraction = node.flops / float(cost.compute_seconds(node)) / table["peak_flops_per_second"]
        errors[row["stage"]].append(fraction / float(row["fraction_of_peak"]) - 1)
    assert {stage: np.abs(found).mean() for stage, found in errors.items() if np.abs(found).mean() > most[stage]} == {}


@pytest.mark.parametrize(("gpu", "name"), [("A100-PCIe-80GB", "a100-sxm-80gb"), ("B200", "b200")])
def test_attention_coefficients_are_the_medians_of_the_shipped_rows(gpu, name):
    table = [row for row in rows("kernels_attention.csv") if row["gpu"] == gpu and int(row["heads"]) >= 32]
    family = coefficients().family(name)
    for direction in ("forward", "backward"):
        shipped = family.attention["flash", direction]
        whole = np.median([float(row["fraction_of_peak"]) for row in table if row["direction"] == direction])
        assert shipped.value == pytest.approx(whole / 2, abs=0.0006)  # of the square, the causal half is useful
    assert family.attention["flash", "backward"].value < family.attention["flash", "forward"].value


def test_every_coefficient_has_a_source():
    for entry in Cost(cluster(), Layout()).assumptions():
        assert entry["source"]
        assert entry["tag"] in ("datasheet", "measured", "assumed", "derived")


def test_unlisted_chips_are_of_the_first_family():
    assert coefficients().family("a chip of tomorrow") is coefficients().families[0]


# Kernels.


@pytest.mark.parametrize(("scales", "rate"), [("rows", 0.9), ("blocks", 6.812 / 7.161)])
def test_fp8_with_many_scales_is_slower(scales, rate):
    """FBGEMM's and PyTorch's kernels for rows; for blocks, of 32, Transformer Engine's table of a layer's matmuls."""
    one = dataclasses.replace(matmul(8192, 8192, 8192, "fp8"), element_bytes=0)
    node = Cost(load_cluster("1x8xh100-sxm"), LAYOUT)
    several = node.compute_seconds(dataclasses.replace(one, scales=scales))
    assert node.compute_seconds(one) / several == pytest.approx(rate, abs=1e-3)
    assert any(f"scales of {scales}" in entry["what"] for entry in node.assumptions())


def test_the_most_of_several_is_what_is_drawn():
    rng = np.random.default_rng(0)
    assert most_of(1) == 0
    for n in (2, 8, 64, 1024):
        drawn = rng.standard_normal((4000, n)).max(axis=1).mean()
        assert most_of(n) == pytest.approx(drawn, abs=0.03)


def test_a_step_waits_for_the_slowest_of_all_gpus():
    """Products alone do: copies are as fast on each; and a kernel by itself is that of a usual GPU."""
    sizes = (1, 2, 64, 1024)
    machines = [load_cluster(f"{max(1, n // 8)}x{min(n, 8)}xh100-sxm") for n in sizes]
    product, norm = matmul(2**14, 2**14, 2**14), Compute("norm", "forward", 1e9, 2e9, "bf16")
    seconds = [Cost(machine, LAYOUT).compute_seconds(product) for machine in machines]
    assert [s / seconds[0] for s in seconds] == pytest.approx([coefficients().slowest(n) for n in sizes], rel=1e-3)
    assert len({Cost(machine, LAYOUT).compute_seconds(norm) for machine in machines}) == 1
    alone = [Cost(machine, LAYOUT, coefficients().alone).compute_seconds(product) for machine in machines]
    assert alone == pytest.approx([alone[0]] * len(sizes))


def test_the_least_of_a_step_is_of_equal_gpus():
    """What no machine is faster than: nothing slower in a step than alone, and no GPU slower than another."""
    layout = consistent(Layout(dp_shard=64, structure=Structure(zero=3)))
    p = predict(load_model("llama-3.1-8b"), Job(4096, 64), load_cluster("8x8xh100-sxm"), layout)
    known = p.coefficients
    equal = p.by(dataclasses.replace(known, uneven=dataclasses.replace(known.uneven, value=0.0)))
    uneven = p.by(dataclasses.replace(known, uneven=dataclasses.replace(known.uneven, value=0.1)))
    assert p.least_seconds == equal.least_seconds == uneven.least_seconds
    assert equal.time.step_seconds < p.time.step_seconds < uneven.time.step_seconds


def test_a_large_matmul_runs_at_the_sustained_rate_and_small_ones_slower():
    cost, family = Cost(cluster(), Layout()), coefficients().family("a100-sxm-80gb")
    sustained = 271.2e12 * family.matmul.value * coefficients().fitted.matmul.value / SLOWEST
    rates = [node.flops / cost.compute_seconds(node) for node in (matmul(s, s, s) for s in (2**16, 4096, 1024))]
    assert rates[0] == pytest.approx(sustained, rel=0.01)
    assert rates[0] > rates[1] > rates[2]


def test_a_batch_of_matmuls_fills_the_chip_like_a_taller_one():
    cost = Cost(cluster(), Layout())
    one = matmul(32 * 512, 512, 128)
    batch = Compute("scores", "forward", one.flops, one.bytes_moved, "bf16", (512, 512, 128))
    assert cost.compute_seconds(batch) == pytest.approx(cost.compute_seconds(one))


def test_other_kernels_are_bound_by_memory_or_by_the_launch():
    cost = Cost(cluster(), Layout())
    norm = Compute("norm", "forward", 1e15, 2e9, "bf16")
    assert cost.compute_seconds(norm) == pytest.approx(2e9 / (2e12 * coefficients().fitted.memory.value))
    assert cost.compute_seconds(Compute("norm", "forward", 0.0, 2, "bf16")) == 5e-6
    assert cost.compute_seconds(Compute("norm", "forward", 0.0, 0, "bf16")) == 0
    assert cost.compute_seconds(matmul(1, 4096, 4096)) >= 2 * 4096**2 / 2e12


def test_attention_backward_is_less_efficient():
    cost = Cost(cluster(), Layout())
    forward, backward, again = (
        cost.compute_seconds(Compute("attention", phase, 1e12, 1e6, "bf16", attention="flash"))
        for phase in ("forward", "backward", "recompute")
    )
    assert forward == again == pytest.approx(SLOWEST * 1e12 / (312e12 * 0.548 * coefficients().fitted.attention.value))
    assert backward == pytest.approx(forward * 0.548 / 0.442)


def test_a_dtype_without_a_best_matmul_takes_a_tagged_fraction_of_the_peak():
    cost = Cost(cluster(), Layout())
    node, half = matmul(2**16, 2**16, 2**16, "fp32"), coefficients().matmul_best_fraction
    assert not [entry for entry in cost.assumptions() if "fp32" in entry["what"]]
    seconds = cost.compute_seconds(node)
    assert node.flops / seconds == pytest.approx(
        19.5e12 * half.value * 0.930 * coefficients().fitted.matmul.value / SLOWEST, rel=0.01
    )
    listed = {entry["what"]: entry for entry in cost.assumptions()}
    assert listed["best matmul over peak, fp32"]["tag"] == "assumed"
    with pytest.raises(ValueError, match="a100-sxm-80gb states no FLOPs a second for fp4"):
        cost.compute_seconds(matmul(8, 8, 8, "fp4"))


def test_a_kernel_that_blocks_its_launch_takes_both():
    """CUDA_LAUNCH_BLOCKING=1: the host does not run ahead, so that no launch hides behind a kernel."""
    node = load_cluster("1x8xa100-sxm-80gb")
    blocking = Cost(dataclasses.replace(node, launch_blocking=True), LAYOUT)
    plain = Cost(node, LAYOUT)
    for kernel in (matmul(4096, 4096, 4096), matmul(64, 64, 64)):
        together = plain.compute_seconds(kernel) + plain.host_seconds(kernel)
        assert blocking.compute_seconds(kernel) == pytest.approx(together)
        assert plain.host_seconds(kernel) > 0
