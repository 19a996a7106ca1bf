"""Who does which forward and backward, and when: the order of a pipeline schedule, written once.

Memory reads from that order what is in flight, traffic what is gathered and sent when; time is the exact (max,+)
recurrence over it.
"""

from __future__ import annotations

from nanum.layout import SPLITS_BACKWARD
from nanum.schedule.actions import KINDS, NAMES, SPLIT, Action, ActionKind, Order, names, placed
from nanum.schedule.ahead import AT_ONCE, Ahead, ahead
from nanum.schedule.clocks import finish_clocks
from nanum.schedule.finish import Finish, finish_times, lower_bound
from nanum.schedule.graph import graph_of_turns
from nanum.schedule.orders import (
    in_flight,
    order,
    overlapped,
    rank_of,
    rounds,
    stage_of,
    stages_of,
    why_not,
)
from nanum.schedule.runs import WARMUP, Runs, runs, warmup
from nanum.schedule.turns import Turn, Weights, turns

__all__ = [
    "AT_ONCE",
    "KINDS",
    "NAMES",
    "SPLIT",
    "SPLITS_BACKWARD",
    "WARMUP",
    "Action",
    "ActionKind",
    "Ahead",
    "Finish",
    "Order",
    "Runs",
    "Turn",
    "Weights",
    "ahead",
    "finish_clocks",
    "finish_times",
    "graph_of_turns",
    "in_flight",
    "lower_bound",
    "names",
    "order",
    "overlapped",
    "placed",
    "rank_of",
    "rounds",
    "runs",
    "stage_of",
    "stages_of",
    "turns",
    "warmup",
    "why_not",
]
