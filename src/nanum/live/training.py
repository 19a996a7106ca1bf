"""Training steps of one rank, as PyTorch does them: micro-batches in turn, or a pipeline's schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from nanum.live.adapters import train
from nanum.live.counting import Ledger
from nanum.live.decoder import named_parameters, seed_weights
from nanum.live.parallelize import DTYPES, parallelize
from nanum.live.question import Question
from nanum.live.stage import new_stage
from nanum.schedule import stage_of

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zb-h1": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
LEARNING_RATE = 1e-3


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """In fp32, the mean over this rank's tokens, or pictures."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def pipelined_loss(asked: Question) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    share = loss_share(asked)
    return cross_entropy if share == 1 else lambda logits, targets: cross_entropy(logits, targets) / share


def loss_share(asked: Question) -> int:
    """By what a rank's loss is divided before its gradients are added up, and not averaged, over the data ranks."""
    return int(asked.layout.data_ranks) if asked.layout.structure.own_experts else 1


def batch(asked: Question) -> tuple[torch.Tensor, torch.Tensor]:
    """What every step is given, and its targets: the same on every rank, by the seed. Token ids [global_batch_size,
    seq_len] are their own targets; of pictures [global_batch_size, patches, numbers] each has a class. What is checked
    is arithmetic, not what is learnt.
    """
    generator = torch.Generator().manual_seed(asked.seed + 1)
    m, sequences = asked.model, asked.job.global_batch_size
    if m.patches is None:
        ids = torch.randint(0, m.vocab_size, (sequences, asked.job.seq_len), generator=generator)
        return ids, ids
    pictures = torch.randn(sequences, m.patches.count, m.patches.numbers, generator=generator)
    classes = torch.randint(0, m.vocab_size or m.hidden_size, (sequences,), generator=generator)
    return pictures.to(DTYPES[asked.job.precision]), classes


def share(asked: Question, place: dict[str, int], whole: torch.Tensor) -> torch.Tensor:
    """This rank's sequences, and of each, of token ids, the block that is its own under context parallelism."""
    index = place["dp_replicate"] * asked.layout.dp_shard + place["dp_shard"]
    rows = asked.job.global_batch_size // asked.layout.data_ranks
    mine = whole[index * rows : (index + 1) * rows]
    if asked.model.patches is None:
        columns = asked.job.seq_len // asked.layout.cp
        mine = mine[:, place["cp"] * columns : (place["cp"] + 1) * columns]
    return mine.clone()  # a view would hold the whole


def stage_indices(asked: Question, pp_rank: int) -> list[int]:
    """The pipeline stages of a rank."""
    structure = asked.layout.structure
    chunks = structure.virtual_stages if structure.pipelined else 1
    return [stage_of(structure.schedule, asked.layout.pp, pp_rank, chunk) for chunk in range(chunks)]


class Recorded(PipelineStage):
    """A stage that writes down what it does, and tells which way a tensor is sent."""

    def __init__(self, ledger: Ledger, did: list[str], *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._ledger, self._did = ledger, did

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        self._did.append(f"{self.stage_index}F{fwd_chunk_id}")
        with self._ledger.during("forward"):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, full_backward: bool = True, **named: Any) -> Any:
        self._did.append(f"{self.stage_index}{'B' if full_backward else 'I'}{bwd_chunk_id}")
        with self._ledger.during("backward"):
            return super().backward_one_chunk(bwd_chunk_id, *arguments, full_backward=full_backward, **named)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        self._did.append(f"{self.stage_index}W{bwd_chunk_id}")
        with self._ledger.during("backward"):
            return super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **named)

    def get_fwd_send_ops(self, *arguments: Any) -> Any:
        return self._towards("forward", super().get_fwd_send_ops(*arguments))

    def get_bwd_send_ops(self, *arguments: Any) -> Any:
        return self._towards("backward", super().get_bwd_send_ops(*arguments))

    def _towards(self, phase: str, operations: Any) -> Any:
        for operation in operations:
            self._ledger.directions[operation.tensor.data_ptr()] = phase
        return operations


@dataclass
class Trainer:
    """What one rank trains. `parts` are its pipeline stages: (index, divided module)."""

    asked: Question
    ledger: Ledger
    parts: list[tuple[int, nn.Module]]
    optimizer: torch.optim.Optimizer
    inputs: torch.Tensor
    targets: torch.Tensor  # of token ids the same tensor
    named: list[tuple[str, nn.Parameter]]  # as they were before the first step: DDP's hooks replace what is split
    schedule: Any = None
    did: list[str] = field(default_factory=list)
    kept: tuple[Any, ...] = ()  # the last logits and loss, as the frame of a training loop holds them
    after_forward: Callable[[], None] = lambda: None  # called once a step, after the first micro-batch's forward

    @property
    def params(self) -> list[nn.Parameter]:
        """Each once, though two stages may share one."""
        return list({id(p): p for _, p in self.named}.values())

    def backward_all(self) -> list[float]:
        """Forward and backward of every micro-batch: the losses that this rank sees (a last stage's, else none)."""
        return self._pipelined() if self.schedule is not None else self._in_turn()

    def optimize(self) -> None:
        with self.ledger.during("optimizer"):
            self.optimizer.step()

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad()
        self.kept = ()
        for p in self.params:  # a ZeroRedundancyOptimizer forgets only its own
            p.grad = None

    def _in_turn(self) -> list[float]:
        (_, model), losses = self.parts[0], []
        m, size = self.asked.num_microbatches, self.asked.layout.micro_batch_size
        logits = loss = None
        for i in range(m):
            given, target = (whole[i * size : (i + 1) * size] for whole in (self.inputs, self.targets))
            with self._synchronising(model, i == m - 1):
                with self.ledger.during("forward"):
                    logits = model(given)
                    loss = cross_entropy(logits, target)
                if i == 0:
                    self.after_forward()
                with self.ledger.during("backward"):
                    share = m * loss_share(self.asked)
                    (loss if share == 1 else loss / share).backward()
            losses.append(loss.detach())
        self.kept = logits, loss
        return [float(value) for value in losses]

    @contextlib.contextmanager
    def _synchronising(self, model: nn.Module, last: bool) -> Iterator[None]:
        """Gradients are reduced in this micro-batch, unless only the last one's are to be."""
        if self.asked.layout.structure.grad_sync == "each":
            yield
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            with contextlib.nullcontext() if last else model.no_sync():
                yield
        else:
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            yield

    def _pipelined(self) -> list[float]:
        indices = [index for index, _ in self.parts]
        last = self.asked.layout.pp * len(self.parts) - 1
        losses: list[torch.Tensor] = []
        self.did.clear()
        inputs = (self.inputs,) if 0 in indices else ()
        ends = {"target": self.targets, "losses": losses} if last in indices else {}
        with self.ledger.during("backward"):  # gradients are reduced between the passes
            self.schedule.step(*inputs, **ends, return_outputs=False)
        return [float(loss) * loss_share(self.asked) for loss in losses]


def trainer(asked: Question, place: dict[str, int], mesh: DeviceMesh | None, ledger: Ledger) -> Trainer:
    """The rank at `place` of the mesh, ready for its first step."""
    layout, structure = asked.layout, asked.layout.structure
    indices = stage_indices(asked, place["pp"])
    stages = layout.pp * len(indices)
    parts = []
    for index in indices:
        model = new_stage(
            asked.model,
            asked.layers(index),
            embeds=index == 0,
            heads=index == stages - 1,
            positions=positions(asked, place),
        )
        train(model, asked.job.trained)
        seed_weights(model, asked.seed)
        parts.append((index, parallelize(model, asked, mesh, ledger)))
        tell_gathers_ahead(parts[-1][1], ledger)
    whole, answers = batch(asked)
    inputs = share(asked, place, whole if answers is whole or 0 in indices else whole[:0])
    targets = inputs if answers is whole else share(asked, place, answers)
    did: list[str] = []
    schedule = None
    if structure.pipelined and mesh is not None:
        group, device = mesh["pp"].get_group(), torch.device("cpu")
        held = [Recorded(ledger, did, part, index, stages, device, group=group) for index, part in parts]
        kind = get_schedule_class(SCHEDULES[structure.schedule])
        given: Any = held[0] if issubclass(kind, PipelineScheduleSingle) else held
        schedule = kind(given, asked.num_microbatches, loss_fn=pipelined_loss(asked))
    named = [pair for _, part in parts for pair in named_parameters(part)]
    optimizer = new_optimizer(asked, list({id(p): p for _, p in named if p.requires_grad}.values()), mesh)
    return Trainer(asked, ledger, parts, optimizer, inputs, targets, named, schedule, did)


def tell_gathers_ahead(part: nn.Module, ledger: Ledger) -> None:
    """A schedule of several stages a rank gathers a stage's weights between passes, for a forward pass to come."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            setattr(module, "unshard", ledger.during("forward")(module.unshard))  # noqa: B010 - on this module alone


def new_optimizer(asked: Question, params: list[nn.Parameter], mesh: DeviceMesh | None) -> Any:
    kind: Any = torch.optim.AdamW if asked.job.optimizer == "adamw" else torch.optim.SGD
    how: dict[str, Any] = {"lr": LEARNING_RATE} | ({} if asked.job.optimizer == "adamw" else {"momentum": 0.9})
    if asked.layout.structure.zero == 1 and mesh is not None and "dp_shard" in asked.mesh:
        return ZeroRedundancyOptimizer(params, kind, process_group=mesh["dp_shard"].get_group(), **how)
    return kind(params, **how)


def positions(asked: Question, place: dict[str, int]) -> torch.Tensor:
    """Places in the sequence of the tokens that this rank's attention sees, or whose learned rows it looks up."""
    layout = asked.layout
    per = asked.job.seq_len // layout.cp
    mine = torch.arange(place["cp"] * per, (place["cp"] + 1) * per)
    if asked.model.position == "learned" and layout.structure.tensor == "sequence":
        mine = mine.chunk(layout.tp)[place["tp"]]
    return mine
