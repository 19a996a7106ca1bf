"""Pipeline parallel: which actions a stage does, in runs of like ones, and what crosses its borders.

Whether an action must gather weights depends on the one before it: a forward leaves them resharded (or not), a backward
of a pipeline leaves them gathered. Walking the order with that state yields PyTorch's m + 1 gathers a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from nanum.arrays import most, take
from nanum.conventions import Conventions
from nanum.layout import Layout, Structure
from nanum.parallel.chain import Chain, Half
from nanum.program import EXPERTS_STREAM, EXPERTS_TICKET, PIPELINE_STREAM, Collective, Held, Node, Phase, Repeat, Wait
from nanum.schedule import KINDS, WARMUP, runs

LOSS_BYTES = 4
"""Of one micro-batch, in fp32."""


class DataParallel(Protocol):
    """What a data-parallel engine does around the parts of a stage."""

    def resident(self) -> list[Node]: ...
    def forward(self, *, gathers: bool, first: bool) -> list[Node]: ...
    def backward(self, *, gathers: bool, first: bool, last: bool) -> list[Node]: ...
    def optimizer(self) -> list[Node]: ...
    def same_forward(self, *, gathers: bool, first: bool) -> tuple[Any, ...]:
        """Forwards of equal keys are the same nodes."""

    def same_backward(self, *, gathers: bool, first: bool, last: bool) -> tuple[Any, ...]:
        """Backwards of equal keys are the same nodes."""


class InHalves(Protocol):
    """A data-parallel engine whose backward can be split."""

    def backward(self, *, gathers: bool, first: bool, last: bool, half: Half) -> list[Node]: ...


@runtime_checkable
class Shares(Protocol):
    """One that holds something which a rank's chunks share."""

    def once(self, chunks: Sequence[Any]) -> list[Node]: ...


@runtime_checkable
class OtherStreams(Protocol):
    """One that holds tensors in the pools of other streams (`Held.apart`)."""

    def apart(self) -> tuple[Any, Any]: ...
    def ahead(self) -> Any: ...


Runs = tuple[tuple[Any, tuple[str, ...]], ...]
"""Names of actions in turn, and how often they come."""


@dataclass(frozen=True, eq=False)
class Step:
    """One step of one stage. `actions` are its distinct actions by name, for the timeline; `program` is all of it, in
    order.
    """

    resident: tuple[Node, ...]
    ids: Held  # the tokens of one micro-batch, where they are read; those of all are there from the beginning
    received: Held  # room for what one micro-batch receives, or is handed on its rank, where that is kept
    let_go: tuple[Held, Held]  # what was held to the end of the step: of each micro-batch, and once
    lingers: tuple[Any, Held]  # whether (0 or 1, of all stages) a sent output outlives its backward, and its bytes
    actions: Actions
    runs: Runs | None  # none where the stage is one of several on its rank: `chunks.RankStep` has the order of these
    optimizer: tuple[Node, ...]
    send: Collective  # across a border, one way, of one micro-batch
    position: Position
    layout: Layout  # of each distinct stage
    holds: tuple[Any, ...]  # how often it has each group of layers, and whether the ends: stages of equal ones do alike
    bodies: dict[tuple[str, ...], tuple[Node, ...]] = field(default_factory=dict)  # by the names of actions in turn

    @property
    def at(self) -> np.ndarray | None:
        """From distinct stages, for which actions are emitted, to all stages of all layouts."""
        return self.position.at

    def scheduled(self, structure: Structure) -> Step:
        """The same actions in another schedule's order."""
        return replace(self, runs=order(self.position, structure))

    @property
    def order(self) -> Runs:
        """Runs of like actions. Raises ValueError for one of several stages of a rank, which do not come in runs."""
        if self.runs is None:
            raise ValueError("a stage that shares its rank has no order of its own: build_rank has the rank's")
        return self.runs

    @property
    def rounds(self) -> dict[str, Any]:
        """How often each action is done in a step."""
        rounds: dict[str, Any] = {}
        for count, names in self.order:
            for name in names:
                rounds[name] = rounds.get(name, 0) + count
        return rounds

    @property
    def program(self) -> tuple[Node, ...]:
        """All of it, in order. What a schedule repeats is the same nodes in every schedule's program."""
        return (*self.before_update, *self.released, Repeat(1, self.optimizer, self.at))

    @property
    def counted(self) -> tuple[Node, ...]:
        """All of it, for sums: here in order."""
        return self.program

    @property
    def at_rest(self) -> tuple[Node, ...]:
        """What is held before a step, and after it."""
        batch = Repeat(self.position.num_microbatches, (self.ids, self.received), self.at)
        return Repeat(1, self.resident, self.at), batch

    @property
    def apart_bytes(self) -> Any:
        """The most that pools of other streams have, of all stages."""
        data = self.actions.data
        if not isinstance(data, OtherStreams):
            return 0
        most, added = (take(size, self.at) for size in data.apart())
        return most + added * (self.position.num_microbatches > 1)

    @property
    def released(self) -> tuple[Node, ...]:
        """What a schedule held to its end goes before the optimizer."""
        each, once = self.let_go
        lingers, output = self.lingers
        return (
            Repeat(self.position.num_microbatches, (each,), self.at),
            Repeat(1, (once,), self.at),
            Repeat(lingers, (replace(output, bytes=-output.bytes),), self.at),
        )

    @property
    def before_update(self) -> tuple[Node, ...]:
        """All of it but the optimizer."""
        return (
            *self.at_rest,
            *(node for rounds, names in self.order for node in self._run(rounds, names)),
        )

    def _run(self, rounds: Any, names: tuple[str, ...]) -> tuple[Node, ...]:
        """Actions in turn, and what lingers after the first backward."""
        lingers, output = self.lingers
        after = (Repeat(lingers, (output,), self.at),) if names == ("backward.first",) else ()
        return Repeat(rounds, self._body(names)), *after

    def _body(self, names: tuple[str, ...]) -> tuple[Node, ...]:
        if names not in self.bodies:
            self.bodies[names] = tuple(Repeat(1, self.actions[name], self.at) for name in names)
        return self.bodies[names]


@dataclass(frozen=True, eq=False)
class Actions(Mapping[str, tuple[Node, ...]]):
    """The actions of a stage by name, emitted when first asked for; alike ones are the same nodes."""

    chain: Chain
    data: DataParallel
    structure: Structure
    conventions: Conventions
    _made: dict[Any, tuple[Node, ...]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)

    def __getitem__(self, name: str) -> tuple[Node, ...]:
        kind = KINDS[name]
        if kind.direction == "forward":
            # The weights are there after a pipeline's backward, and after a forward that did not reshard.
            reshards = self.structure.reshard
            kept = kind.after_other and not (reshards and self.conventions.backward_reshards)
            there = self.structure.pipelined and (kept or not (kind.first or reshards))
            return self.forward(gathers=not there, first=kind.first)
        gathers = kind.after_other or not self.structure.pipelined
        return self.backward(gathers=gathers, first=kind.first, last=kind.last)

    def forward(self, *, gathers: bool, first: bool) -> tuple[Node, ...]:
        """A forward pass. `gathers` where the weights are not there, `first` of the step."""
        key = (*self.data.same_forward(gathers=gathers, first=first), first and self.conventions.step_keeps_logits)
        if key not in self._made:
            nodes = self.data.forward(gathers=gathers, first=first)
            self._made[key] = tuple(_forward(self.chain, nodes, self.conventions, self.structure, first=first))
        return self._made[key]

    def backward(self, *, gathers: bool, first: bool, last: bool, half: Half = "whole") -> tuple[Node, ...]:
        """A backward pass or one half of it. `first` and `last` to leave gradients of weights in the step.

        Raises ValueError for a half where layers are recomputed.
        """
        alike = self.data.same_backward(gathers=gathers, first=first, last=last)
        key = (*alike, half, first and self.conventions.stage_keeps_buffers)
        if key not in self._made:
            if half == "whole":
                nodes = self.data.backward(gathers=gathers, first=first, last=last)
            elif self.structure.recompute != "none":
                raise ValueError("a backward in halves recomputes a layer many times over, which is not modelled")
            else:
                halved = cast(InHalves, self.data)
                nodes = halved.backward(gathers=gathers, first=first, last=last, half=half)
            self._made[key] = tuple(_backward(self.chain, nodes, self.conventions, self.structure, half, first=first))
        return self._made[key]


def step(
    chain: Chain, data: DataParallel, structure: Structure, conventions: Conventions, position: Position, layout: Layout
) -> Step:
    """The actions of a stage, and how often each occurs. Without a pipeline every forward gathers and every backward
    reduces.
    """
    stage = chain.stage
    end: list[Node] = [*data.optimizer(), *([] if structure.pipelined else [_logits(chain)])]
    send = _send(chain, "forward", (chain.pp > 1) * 1, in_parts=_sends_parts(conventions, structure))
    given = chain.input_bytes * (stage.embeds | stage.heads)
    if chain.target_bytes is not None:
        given = chain.input_bytes * stage.embeds + chain.target_bytes * stage.heads
    ids = Held("buffers", given, "token ids" if chain.target_bytes is None else "pictures")
    tables = Held("buffers", chain.tables_bytes, "tables of positions")
    actions = Actions(chain, data, structure, conventions)
    alone = not structure.pipelined or structure.schedule in WARMUP
    runs = order(position, structure) if alone else None
    ways = (stage.onward + stage.back + stage.hands_on + stage.takes) * conventions.stage_keeps_buffers
    received = Held("buffers", chain.output_bytes * ways, "received")
    ends = _let_go(chain, conventions, structure)
    shared = data.once([data]) if alone and isinstance(data, Shares) else []
    output = Held("activations", chain.output_bytes * stage.onward, "sent output")
    lingers = _lingers(position, conventions, structure), output
    return Step(
        (*data.resident(), *shared, tables), ids, received, ends, lingers, actions, runs, tuple(end), send, position,
        layout, (*(g.count for g in stage.groups), stage.embeds, stage.heads),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Position:
    """Where stages are in their pipelines: index, stages and micro-batches, ints or arrays over all stages of all
    layouts.
    """

    stage: Any
    pp: Any
    num_microbatches: Any
    at: np.ndarray | None = None  # from distinct stages


def order(position: Position, structure: Structure) -> Runs:
    """Runs of like actions, as `schedule.names` names them; those that no stage does are left out."""
    m = position.num_microbatches
    alone = not structure.pipelined  # then each forward is followed by its backward, whatever schedule is named
    run = runs("1f1b" if alone else structure.schedule, position.pp, position.stage, m)
    ahead = run.warmup + (run.steady > 0)  # forwards before the first backward
    pairs = most(run.steady - 1, 0)  # a forward and a backward, after the first backward
    tail = m - 1 - pairs  # backwards on their own
    last_paired = ((tail == 0) & (pairs > 0)) * 1
    counted = [
        (1, ("forward.first",)),
        (ahead - 1, ("forward",)),
        ((m == 1) * 1, ("backward.only",)),
        ((m > 1) * 1, ("backward.first",)),
        (pairs - last_paired, ("forward.paired", "backward.paired")),
        (last_paired, ("forward.paired", "backward.last_paired")),
        (most(tail - 1, 0), ("backward",)),
        ((tail > 0) * 1, ("backward.last",)),
    ]
    return tuple((rounds, names) for rounds, names in counted if np.any(rounds))


def _logits(chain: Chain) -> Held:
    """Those of one micro-batch, and its loss, let go."""
    return Held("activations", -chain.stage.take(chain.head.kept_bytes) * chain.stage.heads)


def _forward(
    chain: Chain, nodes: list[Node], conventions: Conventions, structure: Structure, *, first: bool
) -> list[Node]:
    stage, size = chain.stage, chain.output_bytes
    begin: list[Node] = []
    end: list[Node] = _experts_exchanged(conventions)
    if conventions.stage_keeps_buffers:  # an input is the room that it came in, and no more
        begin.append(Held("activations", -size * (stage.back + stage.takes)))
        end.append(Held("activations", size * (stage.back + stage.takes) * (1 - chain.keeps_input)))
    if conventions.step_keeps_logits and not structure.pipelined and not first:
        end.append(_logits(chain))  # the frame's of the micro-batch before are overwritten
    if conventions.stage_keeps_output:
        end.append(Held("activations", size * stage.onward, "stage output"))
    parts = _sends_parts(conventions, structure)
    gathered = [_gather(chain, "forward", stage.back)] if parts else []
    return [*begin, *gathered, *nodes, *end, _send(chain, "forward", stage.onward, in_parts=parts)]


def _backward(
    chain: Chain, nodes: list[Node], conventions: Conventions, structure: Structure, half: Half, *, first: bool
) -> list[Node]:
    """An output is held until the end of its backward. Under `stage_keeps_buffers` an output's gradient is the room
    that it came in, and what is sent is held until the send is waited for: at the end of the step, or by 1F1B once the
    next is to be sent, one output aside (`_lingers`).
    """
    stage, size = chain.stage, chain.output_bytes
    sends_last = _sends_last(conventions, structure)
    begin: list[Node] = []
    end: list[Node] = _experts_exchanged(conventions)
    if half != "weight":
        if conventions.stage_keeps_output and not sends_last:
            end.append(Held("activations", -size * stage.onward))
        if conventions.stage_keeps_buffers:
            begin.append(Held("activations", -size * (stage.onward + stage.hands_on)))
            if first or sends_last:
                end.append(Held("activations", size * stage.back, "sent back"))
        end.append(Held("activations", -stage.take(chain.head.seed_bytes) * stage.heads))
        if conventions.step_keeps_logits and structure.pipelined:
            end.append(_logits(chain))  # a stage's output, which its backward has from the forward pass
            end.append(Held("activations", LOSS_BYTES * stage.heads, "loss"))
        parts = _sends_parts(conventions, structure)
        if parts:
            begin.append(_gather(chain, "backward", stage.onward))
        end.append(_send(chain, "backward", stage.back, in_parts=parts))
    if half != "input" and conventions.stage_keeps_buffers:
        end.append(Held("activations", size * (stage.onward + stage.hands_on)))
        end.append(Held("activations", size * (stage.back + stage.takes) * chain.keeps_input))
    waits: list[Node] = []
    if not conventions.sends_after_reductions:
        # The gradient of the input is on its way before the stage waits for what it reduces.
        last = len(nodes)
        while last and isinstance(nodes[last - 1], Wait | Held):
            last -= 1
        waits = [node for node in nodes[last:] if isinstance(node, Wait)]
        nodes = [*nodes[:last], *(node for node in nodes[last:] if not isinstance(node, Wait))]
    return [*begin, *nodes, *end, *waits]


def _experts_exchanged(conventions: Conventions) -> list[Node]:
    """A pass is done when its experts' exchanges are, though other compute went on beside them."""
    return [Wait(EXPERTS_STREAM, EXPERTS_TICKET)] if conventions.ep_behind else []


def _sends_last(conventions: Conventions, structure: Structure) -> bool:
    """Is what was sent held to the end of the step? PyTorch's 1F1B alone waits for each send before the next."""
    return conventions.stage_keeps_buffers and structure.schedule != "1f1b"


def _let_go(chain: Chain, conventions: Conventions, structure: Structure) -> tuple[Held, Held]:
    """What goes at the end of a step, of each micro-batch and once: losses, and what sends still hold."""
    stage = chain.stage
    sent_back = chain.output_bytes * stage.back * conventions.stage_keeps_buffers
    sent = sent_back + chain.output_bytes * stage.onward * conventions.stage_keeps_buffers
    lost = LOSS_BYTES * stage.heads * (conventions.step_keeps_logits and structure.pipelined)
    last = _sends_last(conventions, structure)
    return Held("activations", -sent * last - lost), Held("activations", -sent_back * (not last))


def _lingers(position: Position, conventions: Conventions, structure: Structure) -> Any:
    """Whether an output is still held after its backward: PyTorch's 1F1B keeps hold of the last send but one of its
    warm-up, which it has waited for, until it sends a gradient in its cool-down (`Schedule1F1B._step_microbatches`).
    """
    if not (structure.pipelined and conventions.stage_keeps_buffers and structure.schedule == "1f1b"):
        return 0
    m = position.num_microbatches
    run = runs("1f1b", position.pp, position.stage, m)
    ahead = run.warmup + (run.steady > 0)
    return ((ahead >= 2) & (2 * ahead - 2 < m)) * 1


def _sends_parts(conventions: Conventions, structure: Structure) -> bool:
    """Is what tensor-parallel ranks all have sent in parts? Of what is split along the sequence each sends its own."""
    return conventions.sends_parts and structure.tensor == "tensor"


def _send(chain: Chain, phase: Phase, presence: Any, *, in_parts: bool) -> Collective:
    size = chain.output_bytes * presence
    if in_parts:
        size = size // chain.tp
    return Collective(
        "send", ("pp",), phase, "activations", chain.dtype, chain.pp, presence, size, size, PIPELINE_STREAM, "send"
    )


def _gather(chain: Chain, phase: Phase, presence: Any) -> Collective:
    """Of what came in parts, over the ranks that have them (Narayanan et al., arXiv 2104.04473, section 4.1)."""
    size = chain.output_bytes * presence
    wire = size // chain.tp * (chain.tp - 1)
    return Collective("all_gather", ("tp",), phase, "activations", chain.dtype, chain.tp, presence, size, wire)
