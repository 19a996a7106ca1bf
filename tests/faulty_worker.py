"""A worker that trains nothing and fails as it is asked to: `python -m faulty_worker [QUESTION]`, or on stdin.

What a fault is called, a rank really does. The question: {"ranks", "patience_seconds", "faults": […]}, one run for each
of these, in one process; what each was told goes into the document. With one fault, what it leads to is how this ends.
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
from nanum.processes import answering

STEPS = 3
GIB = 1 << 30


def fail(fault: str, pulse: Pulse) -> None:
    """What the last rank does in its second step, while the others are in an all-reduce, or soon will be."""
    match fault:
        case "raises":
            raise ValueError("a gradient that is\nno number")
        case "loses a peer":
            raise RuntimeError("Connection closed by peer [127.0.0.1]:4")
        case "refuses":
            raise Refused(["the first reason", "the second reason"])
        case "exits":
            os._exit(7)
        case "exits as if done":
            os._exit(0)
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "aborts":
            os.write(2, b"[Gloo] noise\nterminate called after throwing an instance of 'std::bad_alloc'\n")
            os.abort()
        case "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hangs":
            time.sleep(1000)
        case "spins":
            while True:
                pass
        case "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "leaves":  # returns before the others do
            raise StopIteration
        case "takes long":  # longer than patience, and says so
            for part in range(8):
                pulse.beat(f"computes part {part}")
                time.sleep(0.5)
        case "allocates":
            resource.setrlimit(resource.RLIMIT_AS, (8 * GIB, 8 * GIB))
            pulse.beat("allocates activations")
            torch.empty(16 * GIB, dtype=torch.uint8)
        case "allocates in Python":
            resource.setrlimit(resource.RLIMIT_AS, (8 * GIB, 8 * GIB))
            bytearray(16 * GIB)


def work(rank: int, ranks: int, fault: str, pulse: Pulse, folder: Path, patience_seconds: float) -> float:
    launch.join(rank, ranks, folder, patience_seconds=patience_seconds)
    print("ranks print what nobody asked for", file=sys.stderr)
    total = torch.full((1024,), float(rank + 1))
    for step in range(STEPS):
        pulse.beat(f"forward, step {step}")
        if step == 1 and rank == ranks - 1:
            try:
                fail(fault, pulse)
            except StopIteration:
                break
        pulse.beat(f"all_reduce over dp_shard, 4,096 bytes, step {step}", range(ranks))
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if rank == 0:
            pulse.progress(step + 1, STEPS, f"step {step} ends")
    return float(total[0])


def run(question: dict[str, Any], fault: str) -> list[float]:
    patience_seconds = question["patience_seconds"]
    if launch.launched():
        ranks = launch.launched_ranks()
        return [launch.run_launched(lambda *own: work(own[0], ranks, fault, *own[1:], patience_seconds))]
    ranks = question["ranks"]
    return run_ranks(
        lambda *own: work(own[0], ranks, fault, *own[1:], patience_seconds), ranks, patience_seconds=patience_seconds
    )


def outcome(question: dict[str, Any], fault: str) -> dict[str, Any]:
    start = time.monotonic()
    ended: dict[str, Any] = {"said": "", "returned": None}
    try:
        ended["returned"] = run(question, fault)
    except RankFailed as failed:
        ended["said"] = str(failed)
    except Refused as refused:
        ended["said"] = str(refused)
    left = Path(f"/proc/self/task/{os.getpid()}/children")
    return ended | {
        "seconds": time.monotonic() - start,
        "children": left.read_text().split() if left.exists() else [],
        "files": os.listdir(os.environ["TMPDIR"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def main() -> None:
    question = json.loads(sys.argv[1]) if len(sys.argv) > 1 else json.load(sys.stdin)
    torch.set_num_threads(1)
    if len(question["faults"]) > 1:
        print(json.dumps({fault: outcome(question, fault) for fault in question["faults"]}))
        return
    with answering():
        print(json.dumps({"returned": run(question, question["faults"][0])}))


if __name__ == "__main__":
    main()
