"""Trains a small model under a layout, and counts: `python -m nanum.live.worker` reads a question on stdin.

One JSON document on stdout, `progress DONE TOTAL` on stderr. By itself it forks the ranks of one machine; where RANK and
WORLD_SIZE are set (torchrun) it is one rank of them, and rank 0 answers.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import torch
    import torch._dynamo
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(3)

from nanum.live.allocations import Allocations, allocations, local, storage_bytes
from nanum.live.counting import Ledger, counted_backend
from nanum.live.decoder import named_parameters
from nanum.live.question import Question, read
from nanum.live.reference import differences, reference
from nanum.live.training import Trainer, trainer
from nanum.live.wire import received_bytes

WARM_UP = 2  # DDP rebuilds its buckets in the second step, and a pipeline tells its shapes in the first


@dataclass
class Rank:
    asked: Question
    rank: int
    ledger: Ledger
    pulse: Callable[[str], None]

    def run(self) -> dict[str, Any]:
        """Train, count, and say what was found."""
        asked, place = self.asked, self.asked.coordinates(self.rank)
        mesh = None
        if asked.mesh:
            mesh = init_device_mesh("cpu", tuple(asked.mesh.values()), mesh_dim_names=tuple(asked.mesh))
        self.pulse("the single-process run, to compare with")
        alone = reference(asked)
        if sum(place[axis] for axis in place if axis != "pp"):
            alone.gradients.clear()  # the first rank of each stage compares
        gc.collect()
        answer: dict[str, Any] = {"rank": self.rank, "place": place, "reference_loss": alone.loss}
        self.ledger.settling = True
        with allocations() as held:
            made = trainer(asked, place, mesh, self.ledger)
            gc.collect()
            gc.disable()  # what is held until when must not depend on when cycles are looked for
            losses = []
            for step in range(max(asked.steps, WARM_UP + 2)):
                self.pulse(f"step {step}")
                if step == WARM_UP:
                    losses.append(self.counted_step(made, answer))
                elif step == WARM_UP + 1:
                    losses.append(self.watched_step(made, held, answer))
                else:
                    losses.append(made.backward_all())
                    if step == 0:
                        answer["gradients"] = differences(gradients(made, alone.gradients), alone.gradients)
                        alone.gradients.clear()
                    made.optimize()
                    made.forget_gradients()
            answer["losses"] = losses
        answer["memory"] |= memory_of(held)
        return answer

    def counted_step(self, made: Trainer, answer: dict[str, Any]) -> list[float]:
        """One step with every exchange counted, and the bytes that came through the sockets."""
        dist.barrier()
        before = received_bytes()
        self.ledger.counting = True
        losses = made.backward_all()
        answer["did"] = list(made.did)
        resident = {
            "params": storage_bytes(made.params),
            "grads": storage_bytes(p.grad for p in made.params if p.grad is not None),
        }
        made.optimize()
        self.ledger.counting = False
        after = received_bytes()
        dist.barrier()
        made.forget_gradients()
        states = [value for state in states_of(made) for value in state.values() if isinstance(value, torch.Tensor)]
        answer["memory"] = resident | {"optimizer_states": storage_bytes(states)}
        answer["exchanges"] = [[*key, *totals] for key, totals in self.ledger.rows.items()]
        answer["received_bytes"] = None if before is None or after is None else after - before
        return losses

    def watched_step(self, made: Trainer, held: Allocations, answer: dict[str, Any]) -> list[float]:
        """One step whose allocations are read."""
        held.mark("before")
        made.after_forward = lambda: held.mark("forward")
        losses = made.backward_all()
        made.after_forward = lambda: None
        held.mark("backward")
        made.optimize()
        held.mark("optimizer")
        made.forget_gradients()
        held.mark("after")
        return losses


def states_of(made: Trainer) -> list[dict[str, Any]]:
    """The optimizer's states of this rank: of a ZeroRedundancyOptimizer, the ones of its own share."""
    optimizer = getattr(made.optimizer, "optim", made.optimizer)
    return list(optimizer.state.values())


def gradients(made: Trainer, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole gradients by parameter. Every rank takes part, those that compare nothing too."""
    found = {}
    for _, part in made.parts:
        for name, parameter in named_parameters(part):
            if parameter.grad is None:
                continue
            grad = parameter.grad
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            if name in wanted:
                found[name] = whole.detach().float().clone()
    return found


def memory_of(held: Allocations) -> dict[str, Any]:
    stages = ("forward", "backward", "optimizer")
    peaks = {name: held.peak_before[name] for name in stages if name in held.peak_before}
    worst = max(peaks, key=lambda name: peaks[name])
    return {
        "before": held.at["before"],
        "after_forward": held.at.get("forward"),
        "peak": peaks[worst],
        "peak_during": held.peak_during[worst],
        "peaks": peaks,
        "held_at_peak": held.held_at_peak[worst],
    }


def run_rank(asked: Question, rank: int, pulse: Callable[[str], None], rendezvous: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    ledger = Ledger(asked.mesh, pulse)
    world = asked.layout.world
    dist.init_process_group(counted_backend(ledger, "cpu"), init_method=rendezvous, rank=rank, world_size=world)
    try:
        return Rank(asked, rank, ledger, pulse).run()
    finally:
        dist.destroy_process_group()


def main() -> None:
    given = json.load(sys.stdin)
    answers = []
    for i, question in enumerate(given["questions"]):
        print(f"progress {i} {len(given['questions'])}", file=sys.stderr, flush=True)
        answers.append({"torch": torch.__version__, "backend": "gloo", "ranks": run(read(question))})
    json.dump(answers, sys.stdout)


def run(asked: Question) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:

        def entry(rank: int) -> None:
            answer = run_rank(asked, rank, lambda text: None, f"file://{folder}/store")
            Path(folder, str(rank)).write_text(json.dumps(answer))

        torch.multiprocessing.start_processes(entry, (), nprocs=asked.layout.world, start_method="fork")
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(asked.layout.world)]


if __name__ == "__main__":
    main()
