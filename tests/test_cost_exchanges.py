"""What exchanges cost: placements by counting, times by hand or as published, and many layouts at once."""

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cost import LAYOUT, alone, chip, cluster, exchange, known, matmul

from nanum.account.cost import Cost, place
from nanum.account.timeline import fold
from nanum.cluster import Cluster, Link
from nanum.cluster import load as load_cluster
from nanum.collectives import KINDS, node_steps, ring_steps, wire_bytes
from nanum.layout import AXES, Layout
from nanum.program import Collective, Compute, Repeat


@pytest.mark.parametrize("kind", KINDS)
def test_wire_bytes_of_ints_and_arrays(kind):
    payload, size = np.array([0, 64, 1000, 2**40]), np.array([1, 2, 7, 1024])
    expected = {
        "all_reduce": lambda s, n: 2 * s * (n - 1) // n,
        "all_gather": lambda s, n: s * (n - 1) // n,
        "reduce_scatter": lambda s, n: s * (n - 1) // n,
        "all_to_all": lambda s, n: s * (n - 1) // n,
    }.get(kind, lambda s, n: s if n > 1 else 0)
    each = [wire_bytes(kind, int(s), int(n)) for s, n in zip(payload, size, strict=True)]
    assert all(type(b) is int for b in each)
    assert wire_bytes(kind, payload, size).tolist() == each
    assert each == [expected(int(s), int(n)) for s, n in zip(payload, size, strict=True)]
    assert wire_bytes(kind, 10**9, 1) == ring_steps(kind, 1) == 0
    assert ring_steps(kind, size).tolist() == [ring_steps(kind, int(n)) for n in size]


def test_unknown_kinds_are_refused():
    for asked in (wire_bytes, ring_steps):
        with pytest.raises(ValueError, match="gossip is not a collective"):
            asked("gossip", *([8] * (2 if asked is wire_bytes else 1)))


def groups(sizes, axes):
    """All groups of these axes, each a list of ranks, the last mesh axis varying fastest."""
    strides = {axis: prod(sizes[inner] for inner in AXES[i + 1 :]) for i, axis in enumerate(AXES)}

    def ranks(some):
        spans = [range(0, sizes[axis] * strides[axis], strides[axis]) for axis in some]
        return [sum(offsets) for offsets in itertools.product(*spans)]

    return [[base + offset for offset in ranks(axes)] for base in ranks([axis for axis in AXES if axis not in axes])]


axis_sizes = st.fixed_dictionaries({axis: st.sampled_from((1, 2, 3, 4, 5)) for axis in AXES})
some_axes = st.sets(st.sampled_from(AXES), min_size=1).map(lambda chosen: tuple(a for a in AXES if a in chosen))


@given(axis_sizes, some_axes, st.sampled_from((1, 2, 3, 4, 6, 8, 16, 72)))
def test_placement_is_that_of_counted_ranks(sizes, axes, gpus_per_node):
    where = Cost(cluster(1, gpus_per_node), Layout(**sizes)).placement(axes)
    spans = [{rank // gpus_per_node for rank in group} for group in groups(sizes, axes)]
    first = [rank // gpus_per_node for rank in groups(sizes, axes)[0]]
    if len(spans[0]) == 1 and len(first) > 1:
        if any(len(span) > 1 for span in spans):  # some group straddles two nodes
            assert (where.members, where.nodes) == (1, 2)
        elif where.nodes > 1:  # taken to straddle, and may in a larger world
            assert gpus_per_node % prod(sizes.values())
        else:
            assert where.members == len(first)
    else:
        assert where.members == first.count(0)
        assert where.nodes == -(-len(first) // first.count(0)) <= len(spans[0])


powers = st.fixed_dictionaries({axis: st.sampled_from((1, 2, 4)) for axis in AXES})


@given(st.lists(powers, min_size=1, max_size=5), some_axes, st.sampled_from((1, 2, 4, 8, 16)))
def test_placement_of_powers_of_two_is_exact_for_every_group_and_as_arrays(layouts, axes, gpus_per_node):
    arrays = {axis: np.array([sizes[axis] for sizes in layouts]) for axis in AXES}
    cost = Cost(cluster(1, gpus_per_node), Layout(**arrays))
    where = cost.placement(axes)
    for i, sizes in enumerate(layouts):
        for group in groups(sizes, axes)[:50]:
            nodes = [rank // gpus_per_node for rank in group]
            assert len(set(nodes)) == where.nodes[i]
            assert {nodes.count(node) for node in nodes} == {where.members[i]}
        assert cost.link(axes)[i] == ("InfiniBand" if where.nodes[i] > 1 else "NVLink")


def test_a_single_run_reads_as_its_stride():
    assert (place([(1, 16)], 8, 64).members, place([(1, 16)], 8, 64).nodes) == (8, 2)
    assert (place([(4, 4)], 8, 64).members, place([(4, 4)], 8, 64).nodes) == (2, 2)
    assert (place([(8, 4)], 8, 64).members, place([(8, 4)], 8, 64).nodes) == (1, 4)


def test_an_exchange_within_the_node():
    seconds = alone(cluster(), LAYOUT).collective_seconds(exchange("all_reduce", ("tp",), 4, 8e9))
    assert seconds == pytest.approx(6 * 2e-6 + 2 * 8e9 * 3 / 4 / (300e9 * 0.8))


@pytest.mark.parametrize(("kind", "passes"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_an_exchange_across_nodes_shares_the_node_s_way_out(kind, passes):
    """2 ranks on each of 2 nodes. In one ring of all ranks each link passes on all but one rank's part (nccl-tests,
    PERFORMANCE.md: the bus bandwidth is that of the slowest link, whatever the number of ranks).
    """
    cost = alone(cluster(), LAYOUT)
    assert cost.link(("dp_shard",)) == "InfiniBand"
    seconds = cost.collective_seconds(exchange(kind, ("dp_shard",), 4, 8e9))
    latency = passes * ((4 - 2) * 2e-6 + (2 - 1) * 10e-6)
    assert seconds == pytest.approx(latency + passes * 8e9 * (4 - 1) / 4 / 2 / (25e9 * 0.5))


@pytest.mark.parametrize("line", [53.95e9, 57.06e9])
def test_an_all_reduce_of_two_nodes_goes_through_a_tree(line):
    """Of 16 A100 on 2 nodes with 50 GB/s each, a ring's bus bandwidth would be less than a node's line, and these two
    releases of NCCL have more (github.com/NVIDIA/nccl/issues/837).
    """
    nvlink = Link("NVLink 3", known(300e9), known(0.783), known(3e-6), 8)
    network = Link("InfiniBand", known(6.25e9), known(0.955), known(14e-6), 16)
    two = alone(Cluster("two nodes", 2, 8, chip(), nvlink, network), Layout(dp_shard=16))
    bus = 2**30 * 2 * 15 / 16 / two.collective_seconds(exchange("all_reduce", ("dp_shard",), 16, 2**30))
    assert bus == pytest.approx(line, rel=0.05)
    assert bus > 50e9
    gathered = 2**30 * 15 / 16 / two.collective_seconds(exchange("all_gather", ("dp_shard",), 16, 2**30))
    assert gathered < 50e9


def test_what_a_tree_reaches_is_told_where_nodes_are_crossed():
    for name, layout, there in (("2x8xh100-sxm", Layout(dp_shard=16), True), ("1x8xh100-sxm", Layout(tp=8), False)):
        cost = Cost(load_cluster(name), layout)
        cost.collective_seconds(exchange("all_reduce", ("dp_shard",) if there else ("tp",), layout.world, 2**20))
        told = [entry for entry in cost.assumptions() if entry["what"].endswith("tree of nodes over a ring's")]
        assert len(told) == there
        assert all("issues/837" in entry["source"] for entry in told)


def test_many_nodes_all_reduce_small_messages_through_a_tree_and_large_ones_around_a_ring():
    """DGX A100 with 8 x 25 GB/s have a bus bandwidth of 192 GB/s (github.com/NVIDIA/nccl/issues/812)."""
    eight = load_cluster("dgx-a100-64")
    cost, hop = alone(eight, Layout(dp_shard=64)), eight.inter_node.latency_seconds.value
    small, large = (
        float(cost.collective_seconds(exchange("all_reduce", ("dp_shard",), 64, size))) for size in (1024, 2**34)
    )
    assert 2 * 3 * hop < small < 2 * 7 * hop
    assert 2**34 * 2 * 63 / 64 / large == pytest.approx(192e9, rel=0.02)


def test_an_all_to_all_sends_each_piece_to_its_rank():
    seconds = alone(cluster(), LAYOUT).collective_seconds(exchange("all_to_all", ("dp_shard",), 4, 8e9))
    assert seconds == pytest.approx(2e-6 + 10e-6 + 8e9 * 2 / 4 / (25e9 * 0.5))


def test_a_send_takes_the_link_to_the_next_stage():
    near, far = Layout(pp=2, tp=4), Layout(pp=4, tp=8)
    send = exchange("send", ("pp",), 2, 1e9)
    assert alone(cluster(1), near).collective_seconds(send) == pytest.approx(2e-6 + 1e9 / 240e9)
    assert alone(cluster(), far).collective_seconds(exchange("send", ("pp",), 4, 1e9)) == pytest.approx(
        10e-6 + 1e9 / 12.5e9
    )


def test_the_two_ends_of_a_pipeline_are_a_group_of_two():
    tied = exchange("all_reduce", ("pp",), 2, 1e9)
    assert alone(cluster(), Layout(pp=4, tp=8)).collective_seconds(tied) == pytest.approx(2 * 10e-6 + 1e9 / 12.5e9)


def test_calls_share_the_payload_and_each_pays_the_latency():
    cost = alone(cluster(), LAYOUT)
    none, one, ten = (cost.collective_seconds(exchange("all_gather", ("tp",), 4, 8e9, calls)) for calls in (0, 1, 10))
    assert none == pytest.approx(8e9 * 3 / 4 / (300e9 * 0.8))  # bytes that ride along in another's call
    assert [one - none, ten - none] == pytest.approx([3 * 2e-6, 10 * 3 * 2e-6])


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_exchanges_nothing(kind):
    assert alone(cluster(), LAYOUT).collective_seconds(exchange(kind, ("cp",), 1, 8e9)) == 0


def test_the_published_bus_bandwidth_of_four_b200_nodes():
    """ml-engineering, network/README.md: 16 GiB over 32 ranks reach a busbw of 381.8 GB/s over NICs of 50."""
    nvlink = Link("NVLink 5", known(900e9), known(0.75), known(0.0), 8)
    network = Link("EFA v4", known(50e9), known(0.955), known(0.0), 32)
    b200 = Cluster("four nodes", 4, 8, chip(name="b200"), nvlink, network)
    payload = 17_179_869_184
    seconds = alone(b200, Layout(dp_shard=32)).collective_seconds(exchange("all_reduce", ("dp_shard",), 32, payload))
    assert payload / seconds * 2 * 31 / 32 == pytest.approx(381.8e9, rel=0.001)


SWEEPS = {  # ml-engineering, network/README.md: microseconds, or GB/s of bus bandwidth, by MiB
    "a100-sxm-80gb": {0.03125: 43.83e-6, 16384: 127_997e-6},
    "h200-sxm": {1: 39.93e9, 16: 219.89e9, 64: 346.51e9, 8192: 477.45e9},
    "b200": {4: 76.48e9, 64: 400.6e9, 8192: 839.07e9},
}


@pytest.mark.parametrize(
    ("name", "mib", "published"), [(name, mib, value) for name, sweep in SWEEPS.items() for mib, value in sweep.items()]
)
def test_an_all_reduce_of_eight_in_a_node_takes_what_was_published(name, mib, published):
    payload = int(mib * 2**20)
    seconds = published if published < 1 else payload * 2 * 7 / 8 / published
    node = alone(load_cluster(f"1x8x{name}"), Layout(dp_shard=8))
    assert node.collective_seconds(exchange("all_reduce", ("dp_shard",), 8, payload)) == pytest.approx(
        seconds, rel=0.04
    )


@pytest.mark.parametrize(
    ("ranks", "microseconds"),
    [
        (2, {1: 45.10, 24: 174.4, 256: 1454, 1024: 5454}),
        (4, {1: 52.74, 24: 217.8, 256: 1928, 1024: 7276}),
        (8, {1: 92.15, 24: 262.6, 256: 2158, 1024: 8196}),
    ],
)
def test_all_reduces_of_fewer_than_eight_take_what_was_published(ranks, microseconds):
    """vTrain, trace/a100/AR_GPU*_1M_1024M_LUT: in place, by MiB."""
    node = alone(load_cluster("1x8xa100-sxm-80gb"), Layout(tp=ranks))
    for mib, each in microseconds.items():
        found = node.collective_seconds(exchange("all_reduce", ("tp",), ranks, mib * 2**20))
        assert found == pytest.approx(each * 1e-6, rel=0.01), mib


@pytest.mark.parametrize(("gpus", "bus"), [(4, 363.3e9), (6, 435.6e9), (8, 473.1e9)])
def test_a_switch_adds_up_an_all_reduce_of_more_than_four(gpus, bus):
    """The same, of 8 GiB on H200 GPUs with NVLS; without it 363 to 366 GB/s, whatever their number."""
    node = alone(load_cluster(f"1x{gpus}xh200-sxm"), Layout(dp_shard=gpus))
    seconds = node.collective_seconds(exchange("all_reduce", ("dp_shard",), gpus, 2**33))
    assert 2**33 * 2 * (gpus - 1) / gpus / seconds == pytest.approx(bus, rel=0.04)
    gathered = node.collective_seconds(exchange("all_gather", ("dp_shard",), gpus, 2**33))
    assert 2**33 * (gpus - 1) / gpus / gathered == pytest.approx(363e9, rel=0.02)


def test_an_axis_outside_the_mesh_is_refused():
    with pytest.raises(ValueError, match="no mesh axis ring among pp, dp_replicate, dp_shard, cp, tp"):
        alone(cluster(), LAYOUT).link(("ring",))


# Many layouts at once.


@given(st.lists(st.tuples(powers, st.integers(0, 2**34), st.integers(1, 4096)), min_size=1, max_size=5), some_axes)
def test_arrays_cost_what_each_layout_does(layouts, axes):
    sizes = {axis: np.array([each[axis] for each, _, _ in layouts]) for axis in AXES}
    payload, m = (np.array([layout[i] for layout in layouts]) for i in (1, 2))
    together = Cost(cluster(), Layout(**sizes))
    size = prod(sizes[axis] for axis in axes)
    nodes = [matmul(m, 512, 256), Compute("norm", "forward", 0.0, payload, "bf16")]
    exchanges = [exchange(kind, axes, size, payload, (size > 1) * 1) for kind in KINDS]
    for i, (each, _, _) in enumerate(layouts):
        alone, n = Cost(cluster(), Layout(**each)), int(size[i])
        assert together.compute_seconds(nodes[0])[i] == pytest.approx(
            alone.compute_seconds(matmul(int(m[i]), 512, 256))
        )
        same = Compute("norm", "forward", 0.0, int(payload[i]), "bf16")
        assert together.compute_seconds(nodes[1])[i] == pytest.approx(alone.compute_seconds(same))
        for node in exchanges:
            single = exchange(node.kind, axes, n, int(payload[i]), (n > 1) * 1)
            assert together.collective_seconds(node)[i] == pytest.approx(alone.collective_seconds(single))


def test_a_repeat_s_body_is_costed_in_its_smaller_space():
    tp = np.array([2, 8, 2, 16, 8])
    layout = Layout(tp=tp, dp_shard=32 // tp)
    small, at = np.array([2, 8, 16]), np.array([0, 1, 0, 2, 1])
    body = (exchange("all_reduce", ("tp",), small, 10**8 * small),)
    together = fold([Repeat(3, body, at)], Cost(cluster(), layout)).total_seconds
    for i in range(5):
        alone = Cost(cluster(), Layout(tp=int(tp[i]), dp_shard=int(32 // tp[i])))
        node = exchange("all_reduce", ("tp",), int(tp[i]), 10**8 * int(tp[i]))
        assert together[i] == pytest.approx(3 * alone.collective_seconds(node))


def test_a_repeat_may_not_hide_where_a_group_sits():
    """The same group of two, within a node in one layout and across nodes in the other, is no one place."""
    layout = Layout(dp_shard=2, tp=np.array([4, 8]))
    body = (exchange("all_reduce", ("dp_shard",), np.array([2]), np.array([10**8])),)
    with pytest.raises(ValueError, match="place the groups of dp_shard differently"):
        fold([Repeat(3, body, np.array([0, 0]))], Cost(cluster(), layout))


def test_a_links_latency_reproduces_what_it_was_derived_from():
    """ml-engineering, network/README.md: 512 KiB over the 32 B200 of four nodes take 357.7 us at best."""
    four = load_cluster("aws-p6-b200-32")
    cost = alone(four, Layout(dp_shard=32))
    small = Collective("all_reduce", ("dp_shard",), "backward", "grads", "fp32", 32, 1, 512 * 1024, 0)
    assert cost.collective_seconds(small) == pytest.approx(357.7e-6, rel=0.005)


@given(st.sampled_from(KINDS), st.integers(1, 4096))
def test_a_tree_is_no_deeper_than_a_ring_is_long(kind, ranks):
    assert 0 <= node_steps(kind, ranks) <= ring_steps(kind, ranks)
    assert node_steps(kind, np.array([ranks]))[0] == node_steps(kind, ranks)
