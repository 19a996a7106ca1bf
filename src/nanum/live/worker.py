"""Trains a small model under a layout, and counts: `python -m nanum.live.worker` reads questions on stdin.

`{"questions": [...]}` in (`live.question`), `{"answers": [...]}` out, in the protocol of `nanum.processes`. By itself
it forks the ranks of one machine. Under torchrun (RANK and WORLD_SIZE are set) each process is one rank of the only
question, which `--question` gives since torchrun hands on no stdin, and rank 0 writes the answer to `--answer FILE`.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import torch
    import torch._dynamo
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(3)

from nanum.errors import Refused
from nanum.files import write_whole
from nanum.live import launch
from nanum.live.allocations import Allocations, allocations, own_products, storage_bytes
from nanum.live.counting import Ledger, counted_backend
from nanum.live.pulse import Pulse
from nanum.live.question import Question, read
from nanum.live.reference import Reference, differences, reference
from nanum.live.supervisor import RankFailed, run_ranks
from nanum.live.training import Trainer, trainer
from nanum.live.wire import received_bytes
from nanum.processes import answering

BAR = 100  # of a question, on the progress bar
ALONE_SHARE = 0.4  # of it: one process alone, to compare with
WARM_UP = 2  # DDP rebuilds its buckets in the second step, and a pipeline tells its shapes in the first


@dataclass
class Rank:
    asked: Question
    rank: int
    ledger: Ledger
    pulse: Pulse
    tell: Callable[[float], None] = lambda share: None  # how much of this question is done

    def run(self) -> dict[str, Any]:
        """Train, count, and say what was found."""
        asked, place = self.asked, self.asked.layout.place(self.rank)
        mesh = mesh_of(asked)
        alone = Reference([], {})
        if not any(index for axis, index in place.items() if axis != "pp"):  # the first rank of each stage compares
            with own_products():
                alone = reference(asked, self.pulse.beat)
        self.tell(ALONE_SHARE)
        gc.collect()
        answer: dict[str, Any] = {"rank": self.rank, "place": place, "reference_losses": alone.losses}
        answer["parameters"] = list(alone.gradients)
        self.ledger.settling = True
        with allocations() as held:
            made = trainer(asked, place, mesh, self.ledger)
            gc.collect()
            gc.disable()  # what is held until when must not depend on when cycles are looked for
            losses = []
            for step in range(asked.steps):
                self.pulse.beat(f"step {step}")
                if step == WARM_UP:
                    losses.append(self.counted_step(made, answer))
                elif step == WARM_UP + 1:
                    losses.append(self.watched_step(made, held, answer))
                else:
                    losses.append(made.backward_all())
                    if step == 0:
                        whole = gradients(made)
                        answer["gradients"] = differences(whole, alone.gradients)
                        answer["traces"] = {name: trace(g) for name, g in whole.items()}
                        alone.gradients.clear()
                        del whole
                    made.optimize()
                    made.forget_gradients()
                self.tell(ALONE_SHARE + (1 - ALONE_SHARE) * (step + 1) / asked.steps)
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

    def timed(self) -> dict[str, Any]:
        """Train, and say how long each part of each step took on this rank."""
        asked, place = self.asked, self.asked.layout.place(self.rank)
        mesh = mesh_of(asked)
        made = trainer(asked, place, mesh, self.ledger)
        times: list[dict[str, float]] = []
        for step in range(asked.steps):
            self.pulse.beat(f"step {step}")
            dist.barrier()
            begin = time.perf_counter()
            made.backward_all()
            middle = time.perf_counter()
            made.optimize()
            made.forget_gradients()
            end = time.perf_counter()
            times.append({"backward_seconds": middle - begin, "optimizer_seconds": end - middle})
        return {"rank": self.rank, "place": place, "steps": times}


def mesh_of(asked: Question) -> DeviceMesh | None:
    """The axes of more than one rank."""
    if not asked.mesh:
        return None
    return init_device_mesh("cpu", tuple(asked.mesh.values()), mesh_dim_names=tuple(asked.mesh))


def states_of(made: Trainer) -> list[dict[str, Any]]:
    """The optimizer's states of this rank: of a ZeroRedundancyOptimizer, the ones of its own share."""
    optimizer = getattr(made.optimizer, "optim", made.optimizer)
    return list(optimizer.state.values())


def gradients(made: Trainer) -> dict[str, torch.Tensor]:
    """Whole gradients by parameter, in fp32. Every rank takes part."""
    found = {}
    for name, parameter in made.named:
        if parameter.grad is not None:
            whole = whole_tensor(parameter.grad, getattr(parameter, "_st_info", None))
            found[name] = whole.detach().float().clone()
    return found


def trace(gradient: torch.Tensor) -> tuple[float, float]:
    """Two numbers by which ranks can tell that they have the same gradient: its length, and a sum with weights."""
    flat = gradient.flatten()
    return float(flat.norm()), float(flat @ torch.linspace(0.5, 1.5, len(flat)))


def whole_tensor(tensor: torch.Tensor, split: Any) -> torch.Tensor:
    """A distributed tensor, or one of which DDP was given this rank's part (`split` says how), on every rank."""
    if split is not None:
        shape = {"shape": split.shape, "stride": split.stride}
        tensor = DTensor.from_local(tensor, split.mesh, split.placements, run_check=False, **shape)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def memory_of(held: Allocations) -> dict[str, Any]:
    stages = ("forward", "backward", "optimizer")
    peaks = {name: held.peak_before[name] for name in stages if name in held.peak_before}
    worst = max(peaks, key=lambda name: peaks[name])
    return {
        "before": held.at["before"],
        "after_forward": held.at.get("forward"),
        "peak": peaks[worst],
        "peak_during": held.peak_during[worst],
    }


def run_rank(
    asked: Question, rank: int, pulse: Pulse, folder: Path, at: tuple[int, int] | None = None
) -> list[dict[str, Any]]:
    """One rank of one question: what it lost, exchanged and held. Of a launch, what all ranks did. `at` is the
    question's place among several, of which the first rank then says how far they are.
    """
    torch.set_num_threads(1)

    def progress(share: float) -> None:
        if at is not None and rank == 0:
            place, questions = at
            pulse.progress(round(BAR * (place + share)), BAR * questions, asked.name)

    def tell(text: str, group: Sequence[int]) -> None:
        pulse.beat(text, group)

    ledger = Ledger(asked.mesh, tell)
    backend = counted_backend(ledger, "cpu") if asked.checks else "gloo"
    launch.join(rank, asked.layout.world, folder, backend)
    try:
        one = Rank(asked, rank, ledger, pulse, progress)
        mine = one.run() if asked.checks else one.timed()
        if not launch.launched():
            return [mine]
        found: list[Any] = [None] * asked.layout.world
        dist.all_gather_object(found, mine)
        return found
    finally:
        dist.destroy_process_group()


def run_here(questions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every question on this machine, one after the other."""
    answers = []
    for i, question in enumerate(questions):
        asked = read(question)
        at = i, len(questions)
        print(f"progress {BAR * i} {BAR * len(questions)} {asked.name}", file=sys.stderr, flush=True)

        def entry(
            rank: int, pulse: Pulse, folder: Path, asked: Question = asked, at: tuple[int, int] = at
        ) -> list[dict[str, Any]]:
            return run_rank(asked, rank, pulse, folder, at)

        try:
            ranks = [mine for (mine,) in run_ranks(entry, asked.layout.world)]
        except RankFailed as failed:
            raise RankFailed(f"{asked.name}: {failed}") from None
        answers.append(answer_of(question, ranks))
    return answers


def answer_of(question: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"question": question, "torch": torch.__version__, "backend": "gloo", "ranks": list(ranks)}


def run_launched(question: dict[str, Any], path: Path) -> None:
    """As one rank of a launch; the first writes what all of them found."""
    asked = read(question)
    ranks = launch.launched_ranks()
    if ranks != asked.layout.world:
        raise Refused(f"{ranks} ranks were launched, and the layout has {asked.layout.world}")

    def entry(rank: int, pulse: Pulse, folder: Path) -> list[dict[str, Any]]:
        return run_rank(asked, rank, pulse, folder)

    found = launch.run_launched(entry)
    if launch.is_first():
        write_whole(path, json.dumps({"answers": [answer_of(question, found)]}), force=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nanum.live.worker", description="Train under a layout, and count.")
    parser.add_argument("--question", help="the questions, or a file with them; without it, stdin")
    parser.add_argument("--answer", type=Path, help="under torchrun: where rank 0 writes the answers")
    given = parser.parse_args()
    with answering():
        text = given.question or sys.stdin.read()
        if not text.lstrip().startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        questions = json.loads(text)["questions"]
        if launch.launched():
            if given.answer is None or len(questions) != 1:
                raise Refused("a launch takes one question, and --answer FILE")
            run_launched(questions[0], given.answer)
        else:
            json.dump({"answers": run_here(questions)}, sys.stdout)


if __name__ == "__main__":
    main()
