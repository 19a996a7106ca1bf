"""What kernels, exchanges and whole steps cost on a cluster with measured grids."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum import engines
from nanum.account.cost import Cost
from nanum.account.grids import KERNELS, OTHER, Surface
from nanum.account.timeline import fold
from nanum.account.totals import totals
from nanum.cluster import Quantity, load
from nanum.cluster.measured import Beside, Exchange, Framework, Grid, Measured, Together
from nanum.collectives import wire_bytes
from nanum.job import Job
from nanum.layout import Layout
from nanum.model import Attention, Mlp, Model
from nanum.once import Once
from nanum.prediction import predict
from nanum.program import DATA_STREAM, PIPELINE_STREAM, REDUCER_STREAM, Collective, Compute, Wait
from nanum.search.candidates import candidates
from nanum.search.rank import Question, exact_times, read

ALONE = replace(load("1x8xh100-sxm"), gpus_per_node=1)
NODE = load("1x8xh100-sxm")


def known(value):
    return Quantity(value, "measured", "a test")


def grid(axes, sizes, seconds):
    seconds = tuple(float(s) for s in seconds)
    sizes = tuple(tuple(map(float, several)) for several in sizes)
    return Grid(tuple(axes), sizes, seconds, seconds, seconds, 5, "measured", "a test")


def cost(cluster=ALONE, layout=None, **measured):
    return Cost(replace(cluster, measured=Measured(**measured)), layout or Layout())


# Between points and beyond them.

sizes = st.lists(st.integers(1, 2**30), min_size=1, max_size=4, unique=True).map(sorted)


@given(sizes, sizes, st.data())
def test_a_grid_is_met_at_its_points(rows, columns, data):
    seconds = data.draw(
        st.lists(st.floats(1e-9, 1e3), min_size=len(rows) * len(columns), max_size=len(rows) * len(columns))
    )
    surface = Surface(grid(("m", "n"), (rows, columns), seconds))
    found = [float(surface.seconds((m, n))) for m in rows for n in columns]
    assert found == pytest.approx(seconds)


@given(st.floats(0.1, 2), st.floats(0.1, 2), st.floats(1e-9, 1), st.integers(8, 4096), st.integers(16, 512))
def test_a_power_law_is_met_between_the_points(a, b, c, m, n):
    rows, columns = (8, 64, 4096), (16, 512)
    seconds = [c * x**a * y**b for x in rows for y in columns]
    assert float(Surface(grid(("m", "n"), (rows, columns), seconds)).seconds((m, n))) == pytest.approx(c * m**a * n**b)


def test_beyond_the_largest_the_rate_holds_and_below_the_smallest_the_seconds():
    surface = Surface(grid(("rows", "seq_len"), ((2, 8), (128, 512)), (1.0, 10.0, 4.0, 40.0)))
    assert float(surface.seconds((80, 512))) == pytest.approx(400)  # ten times the rows of the largest
    assert float(surface.seconds((8, 1024))) == pytest.approx(160)  # twice the sequence, so four times the scores
    assert float(surface.seconds((1, 128))) == float(surface.seconds((2, 64))) == pytest.approx(1)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=6))
def test_arrays_read_what_each_number_does(points):
    surface = Surface(grid(("m", "n"), ((8, 64, 4096), (16, 512)), (1, 2, 3, 7, 20, 90)))
    together = surface.seconds(tuple(np.array(column) for column in zip(*points, strict=True)))
    assert together == pytest.approx([float(surface.seconds(point)) for point in points])


# Kernels.


def matmul(m, n, k, dtype="bf16", operands="nt"):
    return Compute("linear", "forward", 2.0 * m * n * k, 2 * (m * n + n * k + m * k), dtype, (m, n, k), False, operands)


CUBE = ((64,), (64,), (64,))


def test_a_matmul_is_read_by_dtype_and_order_of_its_operands():
    grids = {("bf16", order): grid("mnk", CUBE, [s]) for order, s in (("nt", 1.0), ("nn", 2.0), ("tn", 3.0))}
    asked = cost(matmul=grids)
    assert [asked.compute_seconds(matmul(64, 64, 64, operands=o)) for o in ("nt", "nn", "tn")] == pytest.approx(
        [1, 2, 3]
    )
    assert asked.compute_seconds(matmul(64, 64, 64, "fp32")) == cost().compute_seconds(matmul(64, 64, 64, "fp32"))


def test_a_kernel_is_read_by_its_name_or_as_any_other():
    grids = {("fp32", name): grid(["bytes"], [[100]], [s]) for name, s in (("mul", 1.0), ("add", 2.0), (OTHER, 9.0))}
    asked = cost(kernel=grids)

    def seconds(name, dtype="fp32"):
        return float(asked.compute_seconds(Compute(name, "forward", 0.0, 100, dtype)))

    assert [seconds(name) for name in ("mul", "add", "residual", "unheard_of")] == pytest.approx([1, 2, 2, 9])
    assert seconds("mul", "bf16") == float(cost().compute_seconds(Compute("mul", "forward", 0.0, 100, "bf16")))


def test_attention_is_read_by_direction_and_the_optimizer_by_its_bytes():
    one = ((4,), (128,), (64,))
    axes = ("rows", "seq_len", "head_dim")
    grids = {("bf16", d): grid(axes, one, [s]) for d, s in (("forward", 1.0), ("backward", 3.0))}
    asked = cost(attention=grids, optimizer={"fp32": grid(["bytes"], [[100]], [5.0])})

    def attention(phase):
        return Compute("attention", phase, 1e9, 1000, "bf16", (4, 128, 64), attention="flash")

    phases = ("forward", "backward", "recompute")
    assert [float(asked.compute_seconds(attention(p))) for p in phases] == pytest.approx([1, 3, 1])
    assert asked.compute_seconds(Compute("optimizer", "optimizer", 0.0, 200, "fp32")) == pytest.approx(10)


def test_no_operation_is_shorter_than_the_shortest_and_none_is_free_of_work():
    asked = cost(kernel={("fp32", OTHER): grid(["bytes"], [[8]], [1e-9])}, operation_seconds=known(4e-6))
    assert asked.compute_seconds(Compute("mul", "forward", 0.0, 8, "fp32")) == 4e-6
    assert asked.compute_seconds(Compute("mul", "forward", 0.0, 0, "fp32")) == 0


def test_devices_of_a_node_slow_each_other():
    grids = {("bf16", "nt"): grid("mnk", CUBE, [1.0])}
    together = Together(4, {"matmul": known(1.44)})
    found = [
        cost(replace(NODE, gpus_per_node=n), matmul=grids, together=together).compute_seconds(matmul(64, 64, 64))
        for n in (1, 2, 4, 8)
    ]
    assert found == pytest.approx([1, 1.2, 1.44, 1.44])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_kernel_of_pytorch_s_programs_has_a_measured_one(precision):
    """What plain PyTorch does often in a step is measured under its name, not as any other."""
    torch = pytest.importorskip("torch")
    from nanum.live.grids import Plan
    from nanum.live.measure_kernels import DTYPES, kernels

    plan = Plan(torch.device("cpu"), True, 1e9)
    measured = {job.keys["name"] for name in DTYPES for job in kernels(name, plan)}
    rare = {"rope", "rsqrt", "ones_like", "split"}  # of a row or less, or once in a step
    for model in (MODEL, GPT):
        for layout in (Layout(), Layout(dp_replicate=2), Layout(tp=2), Layout(dp_shard=2)):
            sharded = layout.dp_shard > 1
            layout = replace(layout, structure=replace(layout.structure, zero=3 * sharded))
            cluster = replace(NODE, gpus_per_node=layout.world)
            prediction = predict(model, Job(64, 4, precision), cluster, layout, engine="torch")
            for step in prediction.steps:
                for name in names(step.program):
                    assert name in measured | rare or any(name in also for also in KERNELS.values()), name


def names(nodes):
    for node in nodes:
        if isinstance(node, Compute) and not node.shape and node.phase != "optimizer":
            yield node.name
        yield from names(getattr(node, "body", ()))


# Exchanges.


def exchange(kind, size, payload, calls=1, axis="dp_shard", **stream):
    wire = wire_bytes(kind, payload, size)
    return Collective(kind, (axis,), "forward", "params", "bf16", size, calls, payload, wire, **stream)


def measured_exchanges(ranks, seconds, kind="all_reduce", nodes=1):
    return Exchange(kind, ranks, nodes, grid(["bytes"], [[1e3, 1e6, 1e9]], seconds))


TWO, EIGHT = measured_exchanges(2, (1e-5, 1e-4, 1e-2)), measured_exchanges(8, (3e-5, 4e-4, 5e-2))


def seconds_of(kind, size, payload, calls=1, exchanges=(TWO, EIGHT)):
    asked = cost(NODE, Layout(dp_shard=size), exchanges=exchanges)
    return float(asked.collective_seconds(exchange(kind, size, payload, calls)))


def test_measured_exchanges_are_met_at_their_points():
    for one in (TWO, EIGHT):
        for payload, seconds in zip(one.grid.sizes[0], one.grid.seconds, strict=True):
            assert seconds_of("all_reduce", one.ranks, payload) == pytest.approx(seconds)
            assert seconds_of("all_reduce", one.ranks, 7 * payload, calls=7) == pytest.approx(7 * seconds)


def test_between_and_beyond_them_the_model_is_put_right_by_the_nearest():
    plain = [
        float(Cost(NODE, Layout(dp_shard=n)).collective_seconds(exchange("all_reduce", n, 1e6))) for n in (2, 4, 8)
    ]
    factors = [seconds_of("all_reduce", n, 1e6) / p for n, p in zip((2, 4, 8), plain, strict=True)]
    assert factors[1] == pytest.approx((factors[0] * factors[2]) ** 0.5)
    larger = Cost(NODE, Layout(dp_shard=8)).collective_seconds(exchange("all_reduce", 8, 1e11))
    at_the_edge = Cost(NODE, Layout(dp_shard=8)).collective_seconds(exchange("all_reduce", 8, 1e9))
    assert seconds_of("all_reduce", 8, 1e11) == pytest.approx(float(larger / at_the_edge) * 5e-2)


def test_kinds_that_were_not_measured_are_as_modelled_and_a_permute_is_a_send():
    assert seconds_of("all_gather", 8, 1e6) == float(
        Cost(NODE, Layout(dp_shard=8)).collective_seconds(exchange("all_gather", 8, 1e6))
    )
    sends = (measured_exchanges(2, (1.0, 2.0, 3.0), "send"),)
    assert seconds_of("permute", 2, 1e6, exchanges=sends) == pytest.approx(2.0)


def test_what_was_measured_across_nodes_says_nothing_of_one_node():
    far = measured_exchanges(16, (1.0, 2.0, 3.0), nodes=2)
    assert seconds_of("all_reduce", 8, 1e6, exchanges=(far,)) == seconds_of("all_reduce", 8, 1e6, exchanges=())
    two = replace(NODE, nodes=2)
    asked = cost(two, Layout(dp_shard=16), exchanges=(far, EIGHT))
    assert asked.collective_seconds(exchange("all_reduce", 16, 1e6)) == pytest.approx(2.0)


@given(st.lists(st.tuples(st.sampled_from((1, 2, 4, 8)), st.integers(0, 2**34)), min_size=1, max_size=5))
def test_arrays_of_groups_cost_what_each_group_does(groups):
    size, payload = (np.array(column) for column in zip(*groups, strict=True))
    together = cost(NODE, Layout(dp_shard=size, tp=8 // size), exchanges=(TWO, EIGHT))
    found = together.collective_seconds(exchange("all_reduce", size, payload, (size > 1) * 1))
    for i, (n, bytes_) in enumerate(groups):
        alone = cost(NODE, Layout(dp_shard=n, tp=8 // n), exchanges=(TWO, EIGHT))
        assert found[i] == pytest.approx(
            float(alone.collective_seconds(exchange("all_reduce", n, bytes_, (n > 1) * 1)))
        )


# Compute and exchanges beside each other.

WORK = Compute("mul", "forward", 0.0, 100, "fp32")


def beside(streams=True, compute=1.0, exchange=1.0, work=1.0):
    ratios = Beside(8, known(compute), known(exchange))
    return cost(
        NODE,
        Layout(dp_shard=8),
        kernel={("fp32", OTHER): grid(["bytes"], [[100]], [work])},
        exchanges=(measured_exchanges(8, (1.0, 1.0, 1.0)),),
        beside=ratios,
        streams=streams,
    )


def started(stream=DATA_STREAM):
    return exchange("all_reduce", 8, 1e6, stream=stream, ticket="t")


def span(asked, stream=DATA_STREAM):
    """Seconds of an exchange of one second started beside a kernel, and awaited after it."""
    return float(fold([started(stream), WORK, Wait(stream, "t")], asked).total_seconds)


def test_what_runs_beside_an_exchange_loses_what_was_measured():
    assert span(beside()) == pytest.approx(1)
    assert span(beside(work=5.0)) == pytest.approx(5)
    # In the 1.5 s of the exchange, compute that takes twice as long does the work of 0.75 s: it loses 0.75 s.
    assert span(beside(compute=2.0, exchange=1.5, work=5.0)) == pytest.approx(5.75)
    assert span(beside(compute=2.0, exchange=1.5, work=0.1)) == pytest.approx(1.5)


def test_a_device_without_streams_waits_for_what_an_engine_puts_on_one():
    assert span(beside(streams=False)) == pytest.approx(2)
    assert span(beside(streams=False), REDUCER_STREAM) == pytest.approx(1)  # threads of the host carry it out
    assert span(beside(streams=False), PIPELINE_STREAM) == pytest.approx(1)


def test_the_host_s_own_work_is_waited_for_where_the_host_is_the_device():
    framework = Framework(*map(known, (1.0, 2.0, 10.0, 20.0, 30.0)))
    for streams in (False, True):
        asked = cost(NODE, Layout(dp_shard=8), framework=framework, streams=streams)
        plain = cost(NODE, Layout(dp_shard=8))
        for sharded, each in ((False, 1.0), (True, 2.0)):
            update = Compute("optimizer", "optimizer", 0.0, 100, "fp32", tensors=7, sharded=sharded)
            added = float(asked.compute_seconds(update) - plain.compute_seconds(update))
            assert added == pytest.approx(0 if streams else 7 * each)
        by_stream = ((DATA_STREAM, 10.0), (REDUCER_STREAM, 20.0), (None, 0.0), (PIPELINE_STREAM, 0.0))
        for axis, stream, each in (("tp", None, 30.0), *(("dp_shard", *entry) for entry in by_stream)):
            node = exchange("all_reduce", 8, 3e6, calls=3, axis=axis, stream=stream)
            added = float(asked.collective_seconds(node) - plain.collective_seconds(node))
            assert added == pytest.approx(0 if streams else 3 * each)


@pytest.mark.parametrize("stream", [DATA_STREAM, REDUCER_STREAM])
@pytest.mark.parametrize("streams", [True, False])
def test_sums_never_exceed_the_fold(streams, stream):
    for work in (0.1, 1.0, 5.0):
        asked = beside(streams, compute=1.7, exchange=1.3, work=work)
        nodes = (started(stream), WORK, started(stream), WORK, Wait(stream, "t"))
        assert float(totals(nodes, asked, asked, Once()).bound) <= float(fold(nodes, asked).total_seconds) * (1 + 1e-12)


# Whole plans.

MODEL = Model(
    "small", 512, 4000, 6, 4096, Attention(8, 8, 64), Mlp(1376, True, "silu"), "rms_norm", "rotary", False
)  # fmt: skip
GPT = replace(
    MODEL, name="gpt", attention=Attention(8, 8, 64, True, True), mlp=Mlp(2048, False, "gelu", True),
    norm="layer_norm", position="learned", tie_word_embeddings=True,
)  # fmt: skip


def measured_node():
    """A node of eight, measured in every subject with odd numbers."""
    rng = np.random.default_rng(0)

    def some(axes, *sizes):
        work = np.ones(())
        for several in sizes:
            work = np.multiply.outer(work, np.array(several, dtype=float))
        return grid(axes, sizes, (work * 1e-12 * rng.uniform(1, 2, work.shape)).ravel())

    sides = (64, 1024)
    attention = {
        ("bf16", d): some(("rows", "seq_len", "head_dim"), (2, 64), (128, 2048), (64,)) for d in ("forward", "backward")
    }
    found = Measured(
        matmul={("bf16", order): some("mnk", sides, sides, sides) for order in ("nt", "nn", "tn")},
        kernel={("bf16", OTHER): some(["bytes"], (1e4, 1e8)), ("bf16", "mul"): some(["bytes"], (1e4, 1e8))},
        attention=attention,
        optimizer={"fp32": some(["bytes"], (1e5, 1e9))},
        exchanges=(TWO, EIGHT, measured_exchanges(8, (1e-4, 1e-3, 1e-1), "all_gather")),
        operation_seconds=known(3e-6),
        beside=Beside(8, known(1.2), known(1.4)),
        together=Together(8, {"matmul": known(1.05), "kernel": known(1.3)}),
    )
    return replace(NODE, measured=found)


@pytest.mark.parametrize("engine", ["torchtitan", "megatron"])
def test_a_plan_of_a_measured_cluster_is_bounded_exact_and_what_predict_says(engine):
    question = Question(MODEL, Job(512, 32), measured_node(), engines.load(engine))
    ranked, _ = read(question, candidates(question.model, question.job, question.cluster, question.engine).groups)
    for i, r in enumerate(ranked):
        if not len(r.group):
            continue
        exact = exact_times(question, r, np.arange(len(r.group)))
        assert np.all(r.bound_seconds <= np.array([c.step_seconds for c in exact]) * (1 + 1e-12))
        if i % 5 == 0:
            again = predict(MODEL, question.job, question.cluster, exact[0].layout, engine)
            assert again.time.step_seconds == pytest.approx(exact[0].step_seconds, rel=1e-9)


def test_a_prediction_lists_the_grids_it_rests_on_and_no_coefficient_that_none_needed():
    asked = predict(MODEL, Job(512, 32), measured_node(), Layout(dp_shard=8), "torchtitan")
    asked.communication  # noqa: B018 - costed, and so listed
    listed = {entry["what"]: entry for entry in asked.assumptions}
    assert listed["matmul, bf16 nt"]["tag"] == "measured"
    assert listed["matmul, bf16 nt"]["source"] == "8 points, 5 samples each: a test"
    assert listed["all_gather, 8 ranks on 1 nodes"]["source"].endswith("a test")
    assert listed["compute beside an exchange, over alone"]["value"] == 1.2
    assert not [what for what in listed if what.startswith(("matmul result", "attention forward over"))]
