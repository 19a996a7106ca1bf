"""The ledger: each exchange of a pipeline rank in a step, its bytes, its seconds and how many of these are exposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nanum.account.cost import Cost
from nanum.account.step_time import StageTime
from nanum.account.timeline import Busy, busy, exposed
from nanum.account.traffic import Key, Total, traffic
from nanum.layout import Layout
from nanum.parallel.chunks import RankStep
from nanum.parallel.pipeline import Step


@dataclass(frozen=True)
class Row:
    """One line of the ledger: what the first device of a pipeline rank exchanges in a step."""

    stage: int
    axis: str
    kind: str
    phase: str
    what: str
    dtype: str
    group_size: int
    link: str
    calls: int
    payload_bytes: int
    wire_bytes: int
    seconds: float
    exposed_seconds: float


def rows_of_rank(
    rank: int, step: Step | RankStep, layout: Layout, cost: Cost, time: StageTime | float, *, sends_seconds: float
) -> list[Row]:
    """What streams expose is shared among their rows by their seconds; what the pipeline's sends add to the step
    (`sends_seconds`), among a stage's sends, each at the most its own seconds. `time` is that of a rank's only stage,
    or what a rank of several waits for its own streams.
    """
    rows = []
    seconds = busy(step.counted, cost)
    sends = {key for key in seconds if key.kind == "send"}
    streamed = _streamed_seconds(time, seconds) if isinstance(time, StageTime) else time
    waits = exposed({key: each for key, each in seconds.items() if key not in sends}, streamed)
    share = sends_seconds / max(len(sends), 1)
    for key, total in traffic(step.counted).items():
        its_seconds = float(seconds[key].seconds)
        exposed_seconds = min(share, its_seconds) if key in sends else float(waits[key])
        rows.append(_row(rank, key, total, layout, cost, its_seconds, exposed_seconds))
    return rows


def _streamed_seconds(t: StageTime, rows: Mapping[Key, Busy]) -> float:
    """What exchanges beside the compute add to the work of a rank: all that is neither kernels (nor their launches,
    where these take longer) nor an exchange that is waited for at once.
    """
    added = t.busy_seconds + t.optimizer_seconds - t.compute_seconds - t.update_seconds
    blocked = sum(each.blocking_seconds for each in rows.values())
    return max(float(np.ravel(added)[0]) - float(blocked), 0.0)


def _row(stage: int, key: Key, total: Total, layout: Layout, cost: Cost, seconds: float, exposed_seconds: float) -> Row:
    return Row(
        stage=stage,
        axis=layout.named(key.axes),
        kind=key.kind,
        phase=key.phase,
        what=key.what,
        dtype=key.dtype,
        group_size=int(total.group_size),
        link=cost.link(key.axes),
        calls=int(total.calls),
        payload_bytes=int(total.payload_bytes),
        wire_bytes=int(total.wire_bytes),
        seconds=seconds,
        exposed_seconds=exposed_seconds,
    )
