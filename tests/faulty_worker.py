"""A worker that trains nothing and fails as it is asked to: `python -m faulty_worker [SECONDS]`, its question on stdin.

What each fault does, a rank really does. The question: {"ranks", "fault", "at": rank, "patience_seconds", …}.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanum.errors import Refused
from nanum.live import launch
from nanum.live.pulse import Pulse
from nanum.live.supervisor import RankFailed, run_ranks
from nanum.processes import FAILED, REFUSED

STEPS = 3


def fail(fault: str, pulse: Pulse) -> None:
    """What a rank does in its second step, where the others are in an all-reduce."""
    match fault:
        case "raises":
            raise ValueError("a gradient that is no number")
        case "exits":
            os._exit(7)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hangs":
            pulse.beat("loads a batch, step 1")
            time.sleep(1000)
        case "computes":  # for longer than patience lasts, but says so
            for part in range(6):
                pulse.beat(f"computes, part {part}")
                time.sleep(0.5)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "eats":
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
            pulse.beat("allocates activations, step 1")
            torch.empty(16 << 30, dtype=torch.uint8)
        case "eats in python":
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
            bytearray(16 << 30)
        case "refuses":
            raise Refused(["the first reason", "the second reason"])


def entry(rank: int, ranks: int, question: dict[str, Any], pulse: Pulse, folder: Path) -> float:
    launch.join(rank, ranks, folder, patience_seconds=question.get("patience_seconds", 20.0))
    print(f"rank {rank} prints what nobody asked for")
    total = torch.full((1024,), float(rank + 1))
    world = list(range(ranks))
    for step in range(question.get("steps", STEPS)):
        if step == 1 and rank == question.get("at", ranks - 1):
            fail(question.get("fault", ""), pulse)
        pulse.beat(f"all_reduce over dp_shard, 4,096 bytes, step {step}", world)
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if rank == 0:
            pulse.progress(step + 1, STEPS, f"step {step}")
        time.sleep(question.get("step_seconds", 0.0))
    return float(total[0])


def main() -> None:
    question = json.load(sys.stdin)
    torch.set_num_threads(1)
    print("progress 0 1 ranks start", file=sys.stderr, flush=True)
    try:
        if launch.launched():
            ranks = launch.launched_ranks()
            returned = [launch.run_launched(lambda rank, pulse, folder: entry(rank, ranks, question, pulse, folder))]
        else:
            ranks = question["ranks"]
            returned = run_ranks(
                lambda rank, pulse, folder: entry(rank, ranks, question, pulse, folder),
                ranks,
                patience_seconds=question.get("patience_seconds", 20.0),
            )
    except RankFailed as failed:
        print(failed, file=sys.stderr)
        sys.exit(FAILED)
    except Refused as refused:
        print(refused, file=sys.stderr)
        sys.exit(REFUSED)
    print(json.dumps({"returned": returned}))


if __name__ == "__main__":
    main()
