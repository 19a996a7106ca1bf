"""The fold over a program against a plain simulation of its unrolled events."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum.account.timeline import Busy, TimeMap, busy, exposed, fold
from nanum.account.traffic import Key
from nanum.program import Collective, Compute, Held, Mark, Repeat, Wait

LAYOUTS = 3
STREAMS = ("gather", "reduce")
TICKETS = ("a", "b")


@dataclass(frozen=True, eq=False)
class Told:
    """Costs that the nodes themselves tell: a kernel's FLOPs and an exchange's payload are its seconds."""

    def compute_seconds(self, node):
        return node.flops

    def collective_seconds(self, node):
        return node.payload_bytes * (node.calls > 0)

    def host_seconds(self, node):
        return 0.0

    def stream(self, node):
        return node.stream

    streamed_seconds = blocking_seconds = collective_seconds

    def stolen_seconds(self, node):
        return 0.0

    def over(self, at, size):
        return self


def compute(seconds):
    return Compute("kernel", "forward", seconds, 0, "bf16")


def exchange(seconds, stream=None, ticket="", calls=1, what="params"):
    return Collective("all_gather", ("dp_shard",), "forward", what, "bf16", 2, calls, seconds, 0, stream, ticket)


def simulate(nodes, layout):
    """(total, compute, blocking) seconds of one layout, event by event."""
    clock = {"now": 0.0, "compute": 0.0, "blocking": 0.0}
    streams, tickets = {}, {}

    def value(quantity, place):
        return quantity[place] if np.ndim(quantity) else quantity

    def play(body, place):
        for node in body:
            if isinstance(node, Compute):
                clock["now"] += value(node.flops, place)
                clock["compute"] += value(node.flops, place)
            elif isinstance(node, Collective):
                seconds = value(node.payload_bytes, place) * (value(node.calls, place) > 0)
                if node.stream is None:
                    clock["now"] += seconds
                    clock["blocking"] += seconds
                elif seconds > 0:
                    end = max(clock["now"], streams.get(node.stream, 0.0)) + seconds
                    streams[node.stream] = tickets[node.stream, node.ticket] = end
            elif isinstance(node, Wait):
                clock["now"] = max(clock["now"], tickets.get((node.stream, node.ticket), 0.0))
            elif isinstance(node, Repeat):
                for _ in range(int(value(node.count, place))):
                    play(node.body, place if node.at is None else node.at[place])

    play(nodes, layout)
    return max(clock["now"], *streams.values(), 0.0), clock["compute"], clock["blocking"]


def quantities(size, numbers):
    """A number, or one for each place."""
    return st.one_of(numbers, st.lists(numbers, min_size=size, max_size=size).map(np.array))


@st.composite
def programs(draw, size=LAYOUTS, depth=3):
    seconds = st.integers(0, 8)
    leaves = st.one_of(
        st.builds(compute, quantities(size, seconds)),
        st.builds(
            exchange,
            quantities(size, seconds),
            st.sampled_from((None, *STREAMS)),
            st.sampled_from(TICKETS),
            quantities(size, st.integers(0, 2)),
        ),
        st.builds(Wait, st.sampled_from(STREAMS), st.sampled_from(TICKETS)),
        st.sampled_from((Mark("here"), Held("buffers", 1))),
    )
    nodes = draw(st.lists(leaves, max_size=6))
    for _ in range(draw(st.integers(0, 2)) if depth else 0):
        count = draw(quantities(size, st.integers(0, 6)))
        smaller = draw(st.none() | st.integers(1, size))
        at = None
        if smaller is not None:
            at = np.array(draw(st.lists(st.integers(0, smaller - 1), min_size=size, max_size=size)))
        body = draw(programs(size=smaller or size, depth=depth - 1))
        nodes.insert(draw(st.integers(0, len(nodes))), Repeat(count, tuple(body), at))
    return nodes


def same(a, b):
    return np.array_equal(np.broadcast_to(a, LAYOUTS), np.broadcast_to(b, LAYOUTS))


def at_layout(quantity, layout):
    return np.broadcast_to(quantity, LAYOUTS)[layout]


@given(programs())
def test_fold_is_the_unrolled_simulation(nodes):
    time = fold(nodes, Told())
    for layout in range(LAYOUTS):
        total, computed, blocked = simulate(nodes, layout)
        assert at_layout(time.total_seconds, layout) == total
        assert at_layout(time.compute_seconds, layout) == computed
        assert at_layout(time.blocking_seconds, layout) == blocked
        assert at_layout(time.exposed_seconds, layout) == total - computed - blocked


@given(programs(), st.integers(0, 5))
def test_a_map_may_be_cut_and_repeated(nodes, count):
    cut = len(nodes) // 2
    halves = fold(nodes[:cut], Told()).then(fold(nodes[cut:], Told()))
    whole = fold(nodes, Told())
    assert same(halves.total_seconds, whole.total_seconds)
    unrolled = TimeMap()
    for _ in range(count):
        unrolled = unrolled.then(whole)
    assert same(whole.times(count).total_seconds, unrolled.total_seconds)


@given(programs())
def test_busy_adds_up(nodes):
    time, rows = fold(nodes, Told()), busy(nodes, Told())
    blocking = sum((row.blocking_seconds for row in rows.values()), start=0.0)
    streamed = sum((row.seconds - row.blocking_seconds for row in rows.values()), start=0.0)
    assert same(blocking, time.blocking_seconds)
    assert same(streamed, sum(time.stream_seconds.values(), start=0.0))
    held_up = sum(exposed(rows, time.exposed_seconds).values(), start=0.0)
    assert np.allclose(held_up, time.blocking_seconds + time.exposed_seconds)


def test_prefetch_hides_all_but_the_first_gather():
    """Ten layers of 3 s whose 2 s gathers are started one layer ahead: only the first is waited for."""
    layer = (Wait("gather", "next"), exchange(2, "gather", "next"), compute(3))
    time = fold([exchange(2, "gather", "next"), Repeat(10, layer), Wait("gather", "next")], Told())
    assert time.total_seconds == 2 + 10 * 3
    assert time.exposed_seconds == 2
    slow = (Wait("gather", "next"), exchange(5, "gather", "next"), compute(3))
    time = fold([exchange(5, "gather", "next"), Repeat(10, slow), Wait("gather", "next")], Told())
    assert time.total_seconds == 11 * 5


def test_an_exchange_that_is_never_awaited_still_counts():
    time = fold([compute(1), exchange(4, "reduce", "a")], Told())
    assert time.total_seconds == 5
    assert time.exposed_seconds == 4


def test_rows_of_the_ledger_are_told_apart():
    nodes = [Repeat(3, (exchange(2, "gather", "a"), exchange(1, what="loss"))), exchange(4, "gather", "b")]
    params, loss = (Key(("dp_shard",), "all_gather", "forward", what, "bf16") for what in ("params", "loss"))
    rows = busy(nodes, Told())
    assert rows == {params: Busy(10, 0), loss: Busy(3, 3)}
    assert exposed(rows, 5.0) == {params: pytest.approx(5), loss: pytest.approx(3)}


@pytest.mark.parametrize("count", [0, 1, np.array([0, 1, 2]), np.array([4, 4, 4])])
def test_no_rounds_change_nothing(count):
    body = fold([exchange(2, "gather", "a"), compute(1)], Told())
    assert same(body.times(count).total_seconds, 2 * np.asarray(count))


def test_an_exchange_of_no_seconds_hides_none():
    """Where one axis has one rank, its all-reduce follows the reduce-scatter of the other under the same ticket."""
    none = np.array([0, 0, 3])
    nodes = [exchange(5, "reduce", "a"), exchange(none, "reduce", "a"), Wait("reduce", "a"), compute(1)]
    assert same(fold(nodes, Told()).total_seconds, np.array([6, 6, 9]))
    assert same(fold([*nodes[:1], exchange(0, "reduce", "a"), *nodes[2:]], Told()).total_seconds, 6)
