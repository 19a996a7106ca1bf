"""Orders of the schedules, their exact time, and the bound below it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanum.schedule import KINDS, NAMES, WARMUP, Action, finish_times, in_flight, lower_bound, names, order, runs

schedules = st.sampled_from(sorted(WARMUP))
stages = st.integers(1, 7)
micro_batches = st.integers(1, 17)
seeds = st.integers(0, 2**32 - 1)


def simulate(stage_orders, forward, backward, send):
    """End of each stage, by playing whatever can be played until all is done."""
    pp, done, free = len(stage_orders), {}, [0.0] * len(stage_orders)
    left = [list(actions) for actions in stage_orders]
    while any(left):
        played = False
        for i, actions in enumerate(left):
            if not actions:
                continue
            kind, micro_batch, _ = actions[0]
            source = i - 1 if kind == "F" else i + 1
            if 0 <= source < pp:
                if (kind, micro_batch, source) not in done:
                    continue
                arrives = done[kind, micro_batch, source] + send
            else:
                arrives = 0.0
            free[i] = max(free[i], arrives) + (forward if kind == "F" else backward)[i][micro_batch]
            done[kind, micro_batch, i] = free[i]
            actions.pop(0)
            played = True
        assert played, "deadlock"
    return free


@given(schedules, stages, micro_batches)
def test_order_does_everything_once_and_never_deadlocks(schedule, pp, m):
    table = order(schedule, pp, m)
    everything = {Action(kind, i) for kind in "FB" for i in range(m)}
    for stage, actions in enumerate(table):
        assert len(actions) == 2 * m
        assert set(actions) == everything
        place = {action: i for i, action in enumerate(actions)}
        assert all(place["F", i, 0] < place["B", i, 0] for i in range(m))
        count = runs(schedule, pp, stage, m)
        kinds = "".join(action.kind for action in actions)
        assert kinds == "F" * count.warmup + "FB" * count.steady + "B" * count.cooldown
    simulate(table, np.ones((pp, m)), np.ones((pp, m)), 0.0)


@given(schedules, stages, micro_batches)
def test_in_flight_is_the_published_count(schedule, pp, m):
    expected = {"gpipe": [m] * pp, "1f1b": [min(pp - i, m) for i in range(pp)]}[schedule]
    assert list(in_flight(schedule, pp, m)) == expected


@given(schedules, st.lists(st.tuples(stages, micro_batches), min_size=1, max_size=9))
def test_runs_of_many_layouts_are_those_of_each(schedule, sizes):
    pp, m = np.array(sizes).T
    for stage in range(pp.min()):
        together = np.array(runs(schedule, pp, stage, m)).T
        assert [tuple(row) for row in together] == [runs(schedule, int(p), stage, int(k)) for p, k in sizes]


def by_name(random, pp, n, draw="random"):
    """Seconds of the actions of each name, [pp, n]."""
    return {name: getattr(random, draw)(size=(pp, n)) for name in NAMES}


def as_played(schedule, pp, m, durations, n):
    """[stage][micro-batch] seconds of forwards and of backwards, each by its name."""
    forward, backward = np.empty((2, pp, m))
    for stage, actions in enumerate(order(schedule, pp, m)):
        for action, name in zip(actions, names(actions), strict=True):
            table = forward if action.kind == "F" else backward
            table[stage, action.micro_batch] = durations[name][stage, n]
    return forward, backward


def bounds(schedule, pp, m, durations, send):
    """The bound's arguments, from what is really played."""
    n = len(next(iter(durations.values()))[0])
    played = [as_played(schedule, pp, m, durations, i) for i in range(n)]
    f, b = (np.stack([p[i] for p in played], axis=-1) for i in (0, 1))  # [pp, m, n]
    return {
        "busy": f.sum(1) + b.sum(1),
        "first_forward": f[:, 0],
        "last_backward": b[:, -1],
        "least_forward": f.min(1),
        "least_backward": b.min(1),
        "send_seconds": send,
    }


@given(schedules, stages, micro_batches, seeds)
def test_finish_times_are_those_of_a_simulation(schedule, pp, m, seed):
    random = np.random.default_rng(seed)
    durations = by_name(random, pp, 2)
    send = random.random(2) * random.integers(0, 2)
    got = finish_times(schedule, m, durations, send)
    for n in range(2):
        f, b = as_played(schedule, pp, m, durations, n)
        ends = simulate(order(schedule, pp, m), f, b, send[n])
        assert np.allclose(got.stage_seconds[:, n], ends, rtol=1e-12)
        assert got.total_seconds[n] == pytest.approx(max(ends))
        assert np.allclose(got.bubble_seconds[:, n], max(ends) - f.sum(axis=1) - b.sum(axis=1))


@given(schedules, stages, micro_batches, seeds, st.booleans())
def test_bound_never_exceeds_the_exact_time(schedule, pp, m, seed, sends):
    random = np.random.default_rng(seed)
    durations = by_name(random, pp, 5, "exponential")
    send = random.exponential(size=5) * sends
    after = random.exponential(size=(pp, 5))
    exact = (finish_times(schedule, m, durations, send).stage_seconds + after).max(axis=0)
    bound = lower_bound(schedule, m, **bounds(schedule, pp, m, durations, send), after=after)
    assert np.all(bound <= exact * (1 + 1e-12))
    assert np.all(bound > 0.2 * exact)


@given(schedules, st.lists(st.tuples(stages, micro_batches), min_size=1, max_size=6), seeds)
def test_bound_of_layouts_of_several_sizes_is_that_of_each(schedule, sizes, seed):
    pp, m = np.array(sizes).T
    random = np.random.default_rng(seed)
    names = ("busy", "first_forward", "last_backward", "least_forward", "least_backward", "after")
    most = {name: random.random((pp.max(), len(sizes))) for name in names}
    send = random.random(len(sizes))
    together = lower_bound(schedule, m, **most, send_seconds=send, pp=pp)
    for n, (p, k) in enumerate(sizes):
        alone = lower_bound(schedule, k, **{key: q[:p, n, None] for key, q in most.items()}, send_seconds=send[n])
        assert together[n] == pytest.approx(alone[0])


@given(schedules, stages, micro_batches, st.floats(0.1, 10), st.floats(0.1, 10))
def test_alike_stages_idle_p_minus_1_over_m(schedule, pp, m, forward, backward):
    """GPipe's and PipeDream-Flush's bubble, over the time worked; the bound then is the exact time."""
    shape = np.ones((pp, 1))
    durations = {"forward": forward * shape, "backward": backward * shape}
    got = finish_times(schedule, m, durations)
    assert got.bubble_seconds / (m * (forward + backward)) == pytest.approx((pp - 1) / m, rel=1e-9, abs=1e-9)
    alike = bounds(schedule, pp, m, {name: durations[kind.direction] for name, kind in KINDS.items()}, 0.0)
    assert lower_bound(schedule, m, **alike) == pytest.approx(got.total_seconds)


def test_a_long_pipeline_in_blocks_of_layouts():
    """More layouts than one table holds: each has the time that it has alone."""
    durations = by_name(np.random.default_rng(0), 16, 600)
    many = finish_times("1f1b", 256, durations, 0.1).total_seconds
    for n in (0, 299, 599):
        alone = finish_times("1f1b", 256, {name: q[:, [n]] for name, q in durations.items()}, 0.1).total_seconds
        assert many[n] == pytest.approx(alone[0], rel=1e-12)


def test_refusals():
    with pytest.raises(ValueError, match="zigzag is not a schedule: gpipe, 1f1b"):
        order("zigzag", 2, 2)
    with pytest.raises(ValueError, match="num_microbatches=0"):
        order("1f1b", 2, 0)
