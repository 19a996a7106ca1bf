"""When a step ends where ranks have streams beside their compute: each turn is a (max,+) map of its rank's clocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nanum.schedule.graph import Graph

Seconds = NDArray[np.float64]


def finish_clocks(
    graph: Graph, kinds: Sequence[NDArray[np.int64]], maps: Seconds, send_seconds: NDArray[np.float64]
) -> Seconds:
    """[pp, clocks, n] seconds that each rank's clocks show after its last turn, all having begun at 0.

    Args:
        graph: of the turns.
        kinds: by rank, the place of each of its turns among `maps`.
        maps: [kinds, clocks, clocks, n]: after a turn a clock (second axis) shows the latest of old clocks (third axis)
            plus these seconds. The first clock is the compute's: it waits for what comes from other ranks, which is
            there `send_seconds` after their compute's clock showed that it was made.
        send_seconds: [n]; minus infinity where no rank is to wait for another.
    """
    _, clocks, _, n = maps.shape
    shown = np.empty((graph.rows, clocks, n))
    shown[0], shown[-1] = 0.0, -np.inf
    kind = np.concatenate(kinds)[graph.sequence]
    for level in graph.levels:
        at = shown.take(level.before, axis=0)
        arrived = shown[level.source, 0]
        if level.also is not None:
            np.maximum(arrived, shown[level.also, 0], out=arrived)
        arrived += send_seconds
        np.maximum(at[:, 0], arrived, out=at[:, 0])
        after = maps.take(kind[level.start - 1 : level.stop - 1], axis=0)
        after += at[:, None]
        after.max(axis=2, out=shown[level.start : level.stop])
    return shown[graph.last]
