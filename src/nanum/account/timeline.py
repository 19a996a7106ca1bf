"""When a program's nodes run: one compute stream, and communication streams beside it.

The state is a clock for the compute, one for each stream, and the completion of each ticket. A node maps the old times
to new ones by maxima and sums, so a body of nodes is a (max,+)-linear map, two bodies in turn are a product, and a
repeat is a power. Only entries that are not minus infinity are kept; each is a number, or an array over layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from nanum.account.cost import Cost
from nanum.account.traffic import Key
from nanum.once import Once
from nanum.program import Collective, Compute, Node, Quantity, Repeat, Wait

Clock = tuple[str, ...]  # (), the compute; (stream,); (stream, ticket)
Row = dict[Clock, Quantity]  # the new time is the maximum over old clocks of old time + entry
Map = dict[Clock, Row]  # a clock without a row keeps its time

COMPUTE: Clock = ()


def _row(rows: Map, clock: Clock) -> Row:
    row = rows.get(clock)
    return {clock: 0.0} if row is None else row


def _later(a: Row, b: Row) -> Row:
    """Both have happened."""
    both = dict(a)
    for clock, seconds in b.items():
        both[clock] = np.maximum(both[clock], seconds) if clock in both else seconds
    return both


def _delayed(row: Row, seconds: Quantity) -> Row:
    return {clock: entry + seconds for clock, entry in row.items()}


def _chosen(mask: Quantity, yes: Row, no: Row) -> Row:
    """`yes` in the layouts of the mask, `no` in the others."""
    if yes is no:
        return yes
    return {clock: np.where(mask, yes.get(clock, -np.inf), no.get(clock, -np.inf)) for clock in {**yes, **no}}


def _select(mask: Quantity, yes: Map, no: Map) -> Map:
    """`yes`, which has the clocks of `no` and perhaps more, in the layouts of the mask, and `no` in the others."""
    picked: dict[tuple[int, int], Row] = {}  # a ticket and its stream often share a row
    selected: Map = {}
    for clock, row in yes.items():
        if clock not in no:
            selected[clock] = _chosen(mask, row, {clock: 0.0})
            continue
        pair = id(row), id(no[clock])
        if pair not in picked:
            picked[pair] = _chosen(mask, row, no[clock])
        selected[clock] = picked[pair]
    return selected


def _after(second: Map, first: Map) -> Map:
    """The (max,+) product: first, then second."""
    product = dict(first)
    done: dict[int, Row] = {}  # a ticket and its stream often share a row
    for clock, row in second.items():
        if id(row) not in done:
            total: Row = {}
            for through, seconds in row.items():
                for start, before in _row(first, through).items():
                    entry = before + seconds
                    total[start] = np.maximum(total[start], entry) if start in total else entry
            done[id(row)] = total
        product[clock] = done[id(row)]
    return product


def _power(rows: Map, count: Quantity) -> Map:
    """The map, `count` times over, by repeated squaring; where the count is 0 it changes nothing."""
    if set(rows) <= {COMPUTE} and all(set(row) == {COMPUTE} for row in rows.values()):
        return {clock: {COMPUTE: count * row[COMPUTE]} for clock, row in rows.items()}
    least, most = int(np.min(count)), int(np.max(count))
    if least == most == 1:
        return rows
    powered = _round_and_round(rows, np.maximum(count, 1) - 1) if most > 1 else rows
    return powered if least else _select(np.asarray(count) > 0, powered, {})


def _round_and_round(rows: Map, more: Quantity) -> Map:
    """The map, then `more` rounds of it.

    After a first round, clocks that share a row show the same time, so the further rounds have one state for each row.
    Their map is `cycle`, dense as [to, from, layout]: few states and many layouts make this the quicker form.
    """
    starts = list({clock: None for row in rows.values() for clock in row})
    rows = {
        **{clock: {clock: 0.0} for clock in starts if clock not in rows},
        **rows,
    }  # what is only read stays as it is
    state = {key: i for i, key in enumerate(dict.fromkeys(map(id, rows.values())))}
    shape = np.broadcast_shapes(np.shape(more), *(np.shape(entry) for row in rows.values() for entry in row.values()))
    first = np.full((len(state), len(starts), *(shape or (1,))), -np.inf)
    cycle = np.full((len(state), len(state), *(shape or (1,))), -np.inf)
    for row in {id(row): row for row in rows.values()}.values():
        to = state[id(row)]
        for column, start in enumerate(starts):
            if start in row:
                first[to, column] = row[start]
                source = state[id(rows[start])]
                np.maximum(cycle[to, source], row[start], out=cycle[to, source])
    for bit in range(int(np.max(more)).bit_length()):
        if bit:
            cycle = _product(cycle, cycle)
        mask = np.atleast_1d(more) >> bit & 1 == 1
        if mask.all():
            first = _product(cycle, first)
        elif mask.any():
            first = np.where(mask, _product(cycle, first), first)
    reached = first.max(axis=-1) > -np.inf
    times = first if shape else first[..., 0]
    ends = [
        {start: times[to, column] for column, start in enumerate(starts) if reached[to, column]}
        for to in range(len(state))
    ]
    return {clock: ends[state[id(row)]] for clock, row in rows.items()}


def _product(second: np.ndarray, first: np.ndarray) -> np.ndarray:
    """(max,+) matrices [to, from, layout]."""
    product: np.ndarray = second[:, 0, None] + first[0]
    for through in range(1, len(first)):
        np.maximum(product, second[:, through, None] + first[through], out=product)
    return product


@dataclass(frozen=True, eq=False)
class TimeMap:
    """What nodes do to the clocks, and the seconds that they are busy, whatever waits for whatever."""

    rows: Map = field(default_factory=dict)
    compute_seconds: Quantity = 0.0
    host_seconds: Quantity = 0.0  # of the host, to launch the kernels
    blocking_seconds: Quantity = 0.0  # of exchanges that the compute waits for at once
    stream_seconds: dict[str, Quantity] = field(default_factory=dict)  # of exchanges on each stream

    def then(self, other: TimeMap) -> TimeMap:
        """These nodes, then the other's."""
        streams = dict(self.stream_seconds)
        for stream, seconds in other.stream_seconds.items():
            streams[stream] = streams[stream] + seconds if stream in streams else seconds
        return TimeMap(
            _after(other.rows, self.rows),
            self.compute_seconds + other.compute_seconds,
            self.host_seconds + other.host_seconds,
            self.blocking_seconds + other.blocking_seconds,
            streams,
        )

    def times(self, count: Quantity) -> TimeMap:
        """These nodes `count` times over; counts may be 0, and may differ by layout."""
        return TimeMap(
            _power(self.rows, count),
            count * self.compute_seconds,
            count * self.host_seconds,
            count * self.blocking_seconds,
            {stream: count * seconds for stream, seconds in self.stream_seconds.items()},
        )

    def spread(self, at: np.ndarray) -> TimeMap:
        """From the smaller space of a repeat's body to the layouts of which `at` says the place."""
        spread: dict[int, Row] = {}
        for row in self.rows.values():
            if id(row) not in spread:
                spread[id(row)] = {clock: _taken(seconds, at) for clock, seconds in row.items()}
        return TimeMap(
            {clock: spread[id(row)] for clock, row in self.rows.items()},
            _taken(self.compute_seconds, at),
            _taken(self.host_seconds, at),
            _taken(self.blocking_seconds, at),
            {stream: _taken(seconds, at) for stream, seconds in self.stream_seconds.items()},
        )

    @property
    def total_seconds(self) -> Quantity:
        """From all clocks at 0 until the last of them: what is started and never awaited counts as well."""
        latest: Quantity = 0.0
        for row in self.rows.values():
            for seconds in row.values():
                latest = np.maximum(latest, seconds)
        return latest

    @property
    def exposed_seconds(self) -> Quantity:
        """What the compute waits for streams, or they end after it."""
        return np.maximum(self.total_seconds - self.compute_seconds - self.blocking_seconds, 0.0)


def fold(nodes: Sequence[Node], cost: Cost, known: Once[TimeMap] | None = None, bodies: Cost | None = None) -> TimeMap:
    """What the nodes do to the clocks.

    `known` remembers bodies, which programs of one cost share. `bodies` is the cost inside repeats whose body is in a
    space of its own; where it is not given it is worked out for each.

    An exchange of no seconds takes no part: who waits for its ticket waits for what was started with it before.

    Raises:
        ValueError: an exchange or a kernel cannot be costed (`Cost`).
    """
    return _fold(tuple(nodes), cost, Once() if known is None else known, bodies)


def _fold(nodes: tuple[Node, ...], cost: Cost, known: Once[TimeMap], bodies: Cost | None) -> TimeMap:
    return known((nodes, cost), partial(_folded, nodes, cost, known, bodies))


def _folded(nodes: tuple[Node, ...], cost: Cost, known: Once[TimeMap], bodies: Cost | None) -> TimeMap:
    whole = TimeMap()
    run = _Run()
    for node in nodes:
        if isinstance(node, Compute):
            run.compute(cost.compute_seconds(node), cost.host_seconds(node))
        elif isinstance(node, Collective):
            run.exchange(node, cost)
        elif isinstance(node, Wait):
            run.wait(node)
        elif isinstance(node, Repeat) and np.max(node.count) > 0:
            whole = whole.then(run.map()).then(_repeated(node, cost, known, bodies))
            run = _Run()
    return whole.then(run.map())


def _repeated(node: Repeat, cost: Cost, known: Once[TimeMap], bodies: Cost | None) -> TimeMap:
    """All rounds of a repeat, in the space of `cost`."""
    if node.at is None:
        return _fold(node.body, cost, known, bodies).times(node.count)
    body = _fold(node.body, bodies or _seen_by(node, cost), known, bodies)
    if np.ndim(node.count):
        return _spread_times(body, node.count, node.at)
    return known((body, node.at), partial(body.spread, node.at)).times(node.count)


def _spread_times(body: TimeMap, count: Quantity, at: np.ndarray) -> TimeMap:
    """The body `count` times over, for the layouts of which `at` says the place; each pair is worked out once."""
    pairs = at * (int(np.max(count)) + 1) + count
    _, one, every = np.unique(pairs, return_index=True, return_inverse=True)
    return body.spread(at[one]).times(count[one]).spread(every)


def _seen_by(node: Repeat, cost: Cost) -> Cost:
    """The cost in the space of the repeat's body."""
    if node.at is None:
        return cost
    return cost.over(node.at, max(_places(node.body), int(node.at.max(initial=-1)) + 1))


def _places(nodes: Iterable[Node]) -> int:
    """How many places the arrays of these nodes have; 0 where none is an array."""
    for node in nodes:
        if isinstance(node, Compute):
            quantities: tuple[Quantity, ...] = (node.flops, node.bytes_moved, *node.shape)
        elif isinstance(node, Collective):
            quantities = (node.payload_bytes, node.calls, node.group_size)
        elif isinstance(node, Repeat):
            quantities = (node.count, *(() if node.at is None else (node.at,)))
            if node.at is None and (inner := _places(node.body)):
                return inner
        else:
            continue
        for quantity in quantities:
            if np.ndim(quantity):
                return int(np.shape(quantity)[-1])
    return 0


class _Run:
    """Nodes without repeats, one after the other. Seconds of the compute add up until a stream has to do with them."""

    def __init__(self) -> None:
        self.rows: Map = {}
        self.pending: Quantity = 0.0
        self.total = TimeMap()
        self.computed: Quantity = 0.0
        self.hosted: Quantity = 0.0
        self.blocked: Quantity = 0.0
        self.streams: dict[str, Quantity] = {}

    def compute(self, seconds: Quantity, host_seconds: Quantity) -> None:
        self.pending = self.pending + seconds
        self.computed = self.computed + seconds
        self.hosted = self.hosted + host_seconds

    def exchange(self, node: Collective, cost: Cost) -> None:
        name = cost.stream(node)
        if name is None:
            seconds = cost.blocking_seconds(node)
            self.pending = self.pending + seconds
            self.blocked = self.blocked + seconds
            return
        seconds = cost.streamed_seconds(node)
        now = self._now()
        self.streams[name] = self.streams.get(name, 0.0) + seconds
        self.pending = self.pending + cost.stolen_seconds(node)  # of what is computed beside it
        stream, ticket = (name,), (name, node.ticket)
        takes_part = np.asarray(seconds) > 0
        if takes_part.all():
            self.rows[stream] = self.rows[ticket] = _delayed(_later(_row(self.rows, stream), now), seconds)
        elif takes_part.any():
            before = _row(self.rows, stream)
            end = _delayed(_later(before, now), seconds)
            self.rows[ticket] = _chosen(takes_part, end, _row(self.rows, ticket))
            self.rows[stream] = _chosen(takes_part, end, before)

    def wait(self, node: Wait) -> None:
        self.rows[COMPUTE] = _later(self._now(), _row(self.rows, (node.stream, node.ticket)))

    def map(self) -> TimeMap:
        self._now()
        return TimeMap(self.rows, self.computed, self.hosted, self.blocked, self.streams)

    def _now(self) -> Row:
        """The compute's clock, up to date."""
        row = _row(self.rows, COMPUTE)
        if isinstance(self.pending, float) and self.pending == 0.0:
            return row
        self.rows[COMPUTE] = row = _delayed(row, self.pending)
        self.pending = 0.0
        return row


class Busy(NamedTuple):
    """Seconds of one row's exchanges, and of those among them that the compute waits for at once."""

    seconds: Quantity
    blocking_seconds: Quantity


def busy(nodes: Sequence[Node], cost: Cost) -> dict[Key, Busy]:
    """Seconds of the exchanges by row of the ledger, repeats counted.

    Raises:
        ValueError: an exchange cannot be costed (`Cost`).
    """
    rows: dict[Key, Busy] = {}

    def add(key: Key, seconds: Quantity, blocking_seconds: Quantity) -> None:
        old = rows.get(key, Busy(0.0, 0.0))
        rows[key] = Busy(old.seconds + seconds, old.blocking_seconds + blocking_seconds)

    for node in nodes:
        if isinstance(node, Collective):
            seconds = cost.collective_seconds(node)
            key = Key(node.axes, node.kind, node.phase, node.what, node.dtype)
            add(key, seconds, cost.blocking_seconds(node) if cost.stream(node) is None else 0.0)
        elif isinstance(node, Repeat):
            for key, each in busy(node.body, _seen_by(node, cost)).items():
                if node.at is not None:
                    each = Busy(*(_taken(seconds, node.at) for seconds in each))
                add(key, *(node.count * seconds for seconds in each))
    return rows


def exposed(rows: dict[Key, Busy], exposed_seconds: Quantity) -> dict[Key, Quantity]:
    """Seconds that each row holds the compute up: its blocking ones, and its share of what the streams expose."""
    streamed: Quantity = sum((each.seconds - each.blocking_seconds for each in rows.values()), start=0.0)
    share = exposed_seconds / np.where(np.asarray(streamed) > 0, streamed, 1.0)
    return {key: each.blocking_seconds + share * (each.seconds - each.blocking_seconds) for key, each in rows.items()}


def _taken(seconds: Quantity, at: np.ndarray) -> Quantity:
    return seconds[..., at] if np.ndim(seconds) else seconds
