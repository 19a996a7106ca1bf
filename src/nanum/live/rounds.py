"""Times ways of training beside each other: `python -m nanum.live.rounds` reads them on stdin, for the lesson.

`{"questions": [...], "least_rounds", "most_rounds", "seconds", "all_reduce_bytes"}` in (`live.question`: plain data
parallelism on any number of ranks, or one rank alone), in the protocol of `nanum.processes`. All of them live in the
same ranks at once, and take one step each in every round: whatever a machine does meanwhile, it does to all alike.
A round also times an all-reduce of `all_reduce_bytes` in fp32 by itself, on all ranks.

It imports torch, so nobody imports it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import torch
    import torch._dynamo
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(3)

from nanum.errors import Refused
from nanum.live import launch
from nanum.live.bench import describe
from nanum.live.counting import Ledger
from nanum.live.pulse import Pulse
from nanum.live.question import Question, read
from nanum.live.supervisor import run_ranks
from nanum.live.training import Trainer, trainer
from nanum.processes import answering

WARM_UP = 2  # steps: DDP rebuilds its buckets in the second
AXIS = "dp_replicate"


class Rounds:
    """What one rank does: its part in every question that has a place for it, in rounds."""

    def __init__(self, asked: dict[str, Any], questions: Sequence[Question], rank: int, pulse: Pulse) -> None:
        self.asked, self.questions, self.rank, self.pulse = asked, questions, rank, pulse
        self.ranks = max(question.layout.world for question in questions)

    def run(self) -> dict[str, Any]:
        self.message = torch.zeros(self.asked["all_reduce_bytes"] // 4)
        meshes = {size: self.mesh(size) for size in sorted({question.layout.world for question in self.questions})}
        trainers = [self.trainer(question, meshes[question.layout.world]) for question in self.questions]
        for _ in range(WARM_UP):
            self.round(trainers, 0)
        begin = time.perf_counter()
        samples: list[tuple[list[dict[str, float] | None], float]] = []
        while self.another(len(samples), time.perf_counter() - begin):
            samples.append(self.round(trainers, len(samples)))
        return {"steps": [each[0] for each in samples], "all_reduce_seconds": [each[1] for each in samples]}

    def mesh(self, size: int) -> DeviceMesh | None:
        """The first `size` ranks as an axis, for those who are among them. All ranks take part in making it."""
        if size == 1:
            return None
        group = dist.new_group(list(range(size)))
        if self.rank >= size:
            return None
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(AXIS,))

    def trainer(self, question: Question, mesh: DeviceMesh | None) -> Trainer | None:
        self.pulse.beat(f"{question.name}: made")
        if self.rank >= question.layout.world:
            return None
        ledger = Ledger(question.mesh, lambda text, group: None)
        return trainer(question, question.layout.place(self.rank), mesh, ledger)

    def another(self, done: int, seconds: float) -> bool:
        """Whether there is time for one more round, by the first rank's clock: it tells the others."""
        least, most, budget_seconds = (self.asked[name] for name in ("least_rounds", "most_rounds", "seconds"))
        fits = seconds * (done + 1) / max(done, 1) <= budget_seconds
        told = torch.tensor(done < least or (done < most and fits))
        dist.broadcast(told, 0)
        if self.rank == 0:
            total = most if done < 2 else min(most, max(least, int(budget_seconds * done / seconds)))
            self.pulse.progress(done, max(done, total))
        return bool(told)

    def round(self, trainers: Sequence[Trainer | None], turn: int) -> tuple[list[dict[str, float] | None], float]:
        """One step of each, from a different one on in each round; of those that this rank is not in, None."""
        steps: list[dict[str, float] | None] = [None] * len(trainers)
        for i in range(len(trainers)):
            place = (turn + i) % len(trainers)
            made = trainers[place]
            self.pulse.beat(f"{self.questions[place].name}: round {turn}")
            dist.barrier()
            steps[place] = None if made is None else timed_step(made)
        self.pulse.beat(f"an all-reduce: round {turn}")
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(self.message)
        return steps, time.perf_counter() - begin


def timed_step(made: Trainer) -> dict[str, float]:
    """Seconds of a step's parts on this rank. Waiting for an exchange is in the part in which it is waited for; the
    forward pass waits for nobody, and `forward_cpu_seconds` is how long of it this rank had a core.
    """
    forward_ends = cpu_ends = 0.0

    def mark() -> None:
        nonlocal forward_ends, cpu_ends
        forward_ends, cpu_ends = time.perf_counter(), time.thread_time()

    made.after_forward = mark
    begin, cpu_begin = time.perf_counter(), time.thread_time()
    made.backward_all()
    backward_ends = time.perf_counter()
    made.optimize()
    made.forget_gradients()
    end = time.perf_counter()
    return {
        "forward_seconds": forward_ends - begin,
        "backward_seconds": backward_ends - forward_ends,
        "optimizer_seconds": end - backward_ends,
        "forward_cpu_seconds": cpu_ends - cpu_begin,
    }


def run_here(asked: dict[str, Any]) -> dict[str, Any]:
    """All questions, in rounds: by question, the steps of each round, and of a round those of each rank."""
    questions = [read(question) for question in asked["questions"]]
    for question in questions:
        if question.mesh and tuple(question.mesh) != (AXIS,):
            raise Refused(f"{question.name}: rounds are of plain data parallelism, on {AXIS} alone")
    ranks = max(question.layout.world for question in questions)

    def entry(rank: int, pulse: Pulse, folder: Path) -> dict[str, Any]:
        torch.set_num_threads(1)
        launch.join(rank, ranks, folder)
        try:
            return Rounds(asked, questions, rank, pulse).run()
        finally:
            dist.destroy_process_group()

    found = run_ranks(entry, ranks)
    rounds = range(len(found[0]["steps"]))
    steps = {
        question.name: [[each["steps"][i][place] for each in found[: question.layout.world]] for i in rounds]
        for place, question in enumerate(questions)
    }
    alone = [[each["all_reduce_seconds"][i] for each in found] for i in rounds]
    device = describe(torch.device("cpu")) | {"threads": 1}
    return {"device": device, "backend": "gloo", "rounds": len(rounds), "steps": steps, "all_reduce_seconds": alone}


def main() -> None:
    with answering():
        json.dump(run_here(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
