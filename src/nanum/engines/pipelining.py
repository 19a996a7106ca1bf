"""What torch.distributed.pipelining 2.13 refuses, or does wrongly: rules of the engines that run its schedules.

Read in its schedules.py and stage.py, and run: `tests/data/real_runs_schedules.json` has what it lost.
"""

from __future__ import annotations

from typing import Any

from nanum.cluster import Cluster
from nanum.job import Job
from nanum.layout import ONE_CHUNK, Layout, Schedule
from nanum.model import Model
from nanum.rules import Rule
from nanum.schedule import SPLITS_BACKWARD, rounds


def _micro_batches(job: Job, layout: Layout) -> Any:
    return job.num_microbatches(layout.micro_batch_size, layout.data_ranks)


def _said(job: Job, layout: Layout) -> str:
    return (
        f"there are {_micro_batches(job, layout)}: global_batch_size={job.global_batch_size} over "
        f"{layout.data_ranks} data ranks of micro_batch_size={layout.micro_batch_size}"
    )


def _runs(layout: Layout, *schedules: str) -> Any:
    return (layout.pp > 1) & (layout.structure.schedule in schedules)


def _several_chunks(layout: Layout) -> Any:
    return (layout.pp > 1) & (layout.structure.schedule not in ONE_CHUNK)


def _rounds_left_over(model: Model, job: Job, cluster: Cluster, layout: Layout) -> Any:
    if layout.structure.schedule not in ("interleaved", "zb-h1"):
        return False
    m = _micro_batches(job, layout)
    return (layout.pp > 1) & (m % rounds(layout.pp, m) != 0)


SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zbv", "dualpipev")
"""Those of 2.13."""

RULES_OF_ONE_CHUNK = (
    Rule(
        "1F1B needs as many micro-batches as stages",
        lambda model, job, cluster, layout: _runs(layout, "1f1b") & (_micro_batches(job, layout) < layout.pp),
        lambda model, job, cluster, layout: (
            f"schedule=1f1b with pp={layout.pp} needs at least {layout.pp} micro-batches, and {_said(job, layout)} "
            "(torch.distributed.pipelining)"
        ),
    ),
)
RULES_OF_SEVERAL_CHUNKS = (
    Rule(
        "DualPipeV needs as many micro-batches as stages, two a rank",
        lambda model, job, cluster, layout: _runs(layout, "dualpipev") & (_micro_batches(job, layout) < 2 * layout.pp),
        lambda model, job, cluster, layout: (
            f"schedule=dualpipev with pp={layout.pp} needs at least {2 * layout.pp} micro-batches, and "
            f"{_said(job, layout)} (torch.distributed.pipelining)"
        ),
    ),
    Rule(
        "micro-batches do not divide into an interleaved schedule's rounds",
        _rounds_left_over,
        lambda model, job, cluster, layout: (
            f"schedule={layout.structure.schedule} takes micro-batches in rounds of pp={layout.pp} or a few more each: "
            f"{rounds(layout.pp, _micro_batches(job, layout))} rounds do not divide them, and {_said(job, layout)} "
            "(torch.distributed.pipelining)"
        ),
    ),
    Rule(
        "a backward in halves loses gradients of resharded weights",
        lambda model, job, cluster, layout: (
            _runs(layout, *SPLITS_BACKWARD) & (layout.structure.zero == 3) & layout.structure.reshard
        ),
        lambda model, job, cluster, layout: (
            f"schedule={layout.structure.schedule} splits backward, and PyTorch 2.13 then makes no gradients of "
            "weights that were resharded after forward, without saying so: use --no-reshard"
        ),
    ),
    Rule(
        "a backward in halves recomputes again and again",
        lambda model, job, cluster, layout: _runs(layout, *SPLITS_BACKWARD) & (layout.structure.recompute != "none"),
        lambda model, job, cluster, layout: (
            f"schedule={layout.structure.schedule} splits backward, and PyTorch 2.13 then recomputes a layer for the "
            "input's gradient and again for its weights': use --recompute none"
        ),
    ),
    Rule(
        "a loss that is differentiated at once, and a backward in halves",
        lambda model, job, cluster, layout: _runs(layout, *SPLITS_BACKWARD) & (layout.structure.loss != "full"),
        lambda model, job, cluster, layout: (
            f"--loss {layout.structure.loss} with schedule={layout.structure.schedule}, which splits backward, is not "
            "modelled: the head's gradients are made with the loss"
        ),
    ),
    Rule(
        "DDP fails where a rank has several stages",
        lambda model, job, cluster, layout: (
            _several_chunks(layout) & (layout.structure.zero < 3) & (layout.data_ranks > 1)
        ),
        lambda model, job, cluster, layout: (
            f"schedule={layout.structure.schedule} over {layout.data_ranks} data ranks: PyTorch 2.13's DDP fails in "
            "its reducer where a rank has several stages: use --zero 3"
        ),
    ),
)
RULES = (*RULES_OF_ONE_CHUNK, *RULES_OF_SEVERAL_CHUNKS)
