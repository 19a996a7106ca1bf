"""The tables of torch.distributed.pipelining, as JSON: what each rank does, and what is gathered and sent between.

Run as a process of its own: `python torch_tables.py` reads a list of [class, pp, chunks, micro-batches] from stdin. No
process group is needed, for the tables are made from the sizes that the stages state.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def tables(name: str, pp: int, chunks: int, num_microbatches: int) -> Any:
    """`{"error": …}`, or by rank: `compute`, of an overlapped pair its two passes, `pairs`, the places of the first of
    them, and `all`, with what is between.
    """
    held = generate_rank_to_stage_mapping(pp, pp * chunks, "v" if name in V_SHAPED else "loop")[0]
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=index,
            num_stages=pp * chunks,
            group_size=pp,
            group_rank=0,
            is_first=index == 0,
            is_last=index == pp * chunks - 1,
            submod=torch.nn.Identity(),
        )
        for index in held
    ]
    made = schedules.get_schedule_class(name)
    single = issubclass(made, schedules.PipelineScheduleSingle)
    try:
        schedule: Any = made(stages[0] if single else stages, num_microbatches)  # type: ignore[arg-type]
    except ValueError as error:
        return {"error": str(error)}
    compute = schedule._get_pipeline_order() if single else schedule.pipeline_order
    everything = compute if single else schedule.pipeline_order_with_comms
    return {"compute": _flat(compute), "pairs": _pairs(compute), "all": _flat(everything)}


def _pairs(order: Any) -> list[list[int]]:
    found = []
    for rank in sorted(order):
        place, here = 0, []
        for action in order[rank]:
            if action is not None:
                several = action.sub_actions or (action,)
                here += [place] if len(several) > 1 else []
                place += len(several)
        found.append(here)
    return found


def _flat(order: Any) -> list[list[Any]]:
    def passes(action: Any) -> Any:
        return action.sub_actions or (action,)

    return [
        [
            [a.computation_type.value, a.stage_index, a.microbatch_index]
            for action in order[rank]
            if action is not None
            for a in passes(action)
        ]
        for rank in sorted(order)
    ]


if __name__ == "__main__":
    json.dump([tables(*asked) for asked in json.load(sys.stdin)], sys.stdout)
