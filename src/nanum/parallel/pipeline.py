"""Pipeline parallel: which actions a stage does, in runs of like ones, and what crosses its borders.

Whether an action must gather weights depends on the one before it: a forward leaves them resharded (or not), a backward of a
pipeline leaves them gathered. Walking the order with that state yields PyTorch's m + 1 gathers a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from nanum.conventions import Conventions
from nanum.layout import Structure
from nanum.parallel.chain import Chain, Stage, most, where
from nanum.program import Collective, Held, Node, Repeat
from nanum.schedule import runs


class DataParallel(Protocol):
    """What a data-parallel engine does around the parts of a stage."""

    def resident(self) -> list[Node]: ...
    def forward(self, *, gathers: bool, first: bool) -> list[Node]: ...
    def backward(self, *, gathers: bool, first: bool, last: bool) -> list[Node]: ...
    def optimizer(self) -> list[Node]: ...


@dataclass(frozen=True, eq=False)
class Step:
    """One step of one stage. `actions` are its distinct actions by name, for the timeline; `program` is all of it, in order."""

    resident: tuple[Node, ...]
    actions: dict[str, tuple[Node, ...]]
    order: tuple[tuple[Any, tuple[str, ...]], ...]  # (rounds, names of actions)
    optimizer: tuple[Node, ...]
    send_bytes: Any  # across a border, one way, of one micro-batch

    @property
    def program(self) -> tuple[Node, ...]:
        body = tuple(Repeat(rounds, tuple(node for name in names for node in self.actions[name])) for rounds, names in self.order)
        return (*self.resident, *body, *self.optimizer)


def step(chain: Chain, data: DataParallel, structure: Structure, conventions: Conventions) -> Step:
    """The actions of one stage, and how often each occurs. Without a pipeline every forward gathers and every backward reduces."""
    stage, m = chain.stage, chain.stage.num_microbatches
    actions: dict[str, tuple[Node, ...]] = {}

    def forward(name: str, *, gathers: bool, first: bool = False) -> str:
        if name not in actions:
            actions[name] = tuple(_forward(chain, data.forward(gathers=gathers, first=first), conventions, first=first))
        return name

    def backward(name: str, **how: bool) -> str:
        if name not in actions:
            actions[name] = tuple(_backward(chain, data.backward(**how), conventions))
        return name

    if not structure.pipelined:
        order = [
            (1, (forward("forward.first", gathers=True, first=True),)),
            ((m == 1) * 1, (backward("backward.only", gathers=True, first=True, last=True),)),
            ((m > 1) * 1, (backward("backward.first", gathers=True, first=True, last=False),)),
            (most(m - 2, 0), (forward("forward", gathers=True), backward("backward", gathers=True, first=False, last=False))),
            ((m > 1) * 1, ("forward", backward("backward.last", gathers=True, first=False, last=True))),
        ]
    else:
        order = _pipelined(stage, structure, forward, backward)
    end: list[Node] = [*data.optimizer(), Held("activations", -stage.take(chain.head.kept_bytes) * stage.heads)]
    send = chain.output_bytes * (stage.pp > 1)
    resident = (*data.resident(), Held("buffers", chain.input_bytes * where(stage.embeds + stage.heads > 0, 1, 0), "token ids"))
    return Step(resident, actions, tuple(order), tuple(end), send)


def _pipelined(
    stage: Stage, structure: Structure, forward: Callable[..., str], backward: Callable[..., str]
) -> list[tuple[Any, tuple[str, ...]]]:
    m = stage.num_microbatches
    run = runs(structure.schedule, stage.pp, stage.stage, m)
    reshards = structure.reshard
    ahead = run.warmup + (run.steady > 0)  # forwards before the first backward
    pairs = most(run.steady - 1, 0)  # a forward and a backward, after the first backward
    tail = m - 1 - pairs  # backwards on their own
    last_paired = ((tail == 0) & (pairs > 0)) * 1
    paired = ("forward.paired", "backward.paired")
    forward("forward.first", gathers=True, first=True)
    forward("forward", gathers=reshards)
    forward("forward.paired", gathers=False)
    backward("backward.only", gathers=True, first=True, last=True)
    backward("backward.first", gathers=True, first=True, last=False)
    backward("backward.paired", gathers=True, first=False, last=False)
    backward("backward.last_paired", gathers=True, first=False, last=True)
    backward("backward", gathers=False, first=False, last=False)
    backward("backward.last", gathers=False, first=False, last=True)
    return [
        (1, ("forward.first",)),
        (ahead - 1, ("forward",)),
        ((m == 1) * 1, ("backward.only",)),
        ((m > 1) * 1, ("backward.first",)),
        (pairs - last_paired, paired),
        (last_paired, ("forward.paired", "backward.last_paired")),
        (most(tail - 1, 0), ("backward",)),
        ((tail > 0) * 1, ("backward.last",)),
    ]


def _forward(chain: Chain, nodes: list[Node], conventions: Conventions, *, first: bool) -> list[Node]:
    stage = chain.stage
    out = list(nodes)
    if not first:  # the frame's logits and loss of the micro-batch before are overwritten
        out.append(Held("activations", -stage.take(chain.head.kept_bytes) * stage.heads))
    onward = (1 - stage.heads) * (stage.pp > 1)
    if conventions.stage_keeps_output:
        out.append(Held("activations", chain.output_bytes * onward, "stage output"))
    out.append(_send(chain, "forward", onward))
    return out


def _backward(chain: Chain, nodes: list[Node], conventions: Conventions) -> list[Node]:
    stage = chain.stage
    onward = (1 - stage.heads) * (stage.pp > 1)
    begin: list[Node] = []
    if conventions.stage_keeps_output:
        begin.append(Held("activations", -chain.output_bytes * onward))
    return [*begin, *nodes, _send(chain, "backward", (1 - stage.embeds) * (stage.pp > 1))]


def _send(chain: Chain, phase: Any, presence: Any) -> Collective:
    size = chain.output_bytes * presence
    return Collective("send", ("pp",), phase, "activations", chain.dtype, chain.stage.pp, presence, size, size, "pipeline", "send")
