"""The order of every schedule: what each rank does, one action after another, and which stage each of its chunks is.

Written from the papers, with the choices that torch.distributed.pipelining 2.13 makes where a paper leaves one; the
tests hold them to PyTorch's own tables.

- `gpipe` (arXiv 1811.06965), `1f1b` (PipeDream-Flush, arXiv 2006.09503): one chunk a rank, see `runs`.
- `looped-bfs` (breadth-first, arXiv 2211.05953): a rank takes all micro-batches through a chunk before the next chunk.
  PyTorch's backwards come in reverse, last micro-batch first.
- `interleaved` (arXiv 2104.04473, section 2.2): micro-batches go in rounds through all chunks of a rank, one forward
  and one backward in turn once the warm-up is over.
- `zb-h1` (arXiv 2401.10241, section 3), interleaved: backward is split, and the weights' half trails by as many
  micro-batches as the rank is far from the first. `zb-h2`, of one chunk, does twice the forwards of warm-up, and the
  weights' half trails by twice as many.
- `zbv` (arXiv 2401.10241, section 6) and `dualpipev` (github.com/deepseek-ai/DualPipe): two chunks a rank, laid as a V,
  so that the first rank holds both ends of the model.
- `dualpipe` (arXiv 2412.19437, section 3.2; github.com/deepseek-ai/DualPipe, dualpipe.py): two chunks a rank, of which
  the first are the model down the ranks and the second the model again, up the ranks. Half of the micro-batches enter
  at either end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

from nanum.layout import TWO_WAY, V_SHAPED
from nanum.schedule.actions import Action, Order
from nanum.schedule.runs import WARMUP, runs


def stages_of(schedule: str, pp: Any, chunks: int) -> Any:
    """Stages that a model is cut into: one for each chunk of a rank, but where each is held twice. `pp` is an int or an
    array.
    """
    return pp if schedule in TWO_WAY else pp * chunks


def ranks_of(schedule: str, stages: int, chunks: int) -> int:
    """Ranks of a pipeline of that many stages."""
    return stages if schedule in TWO_WAY else stages // chunks


def stage_of(schedule: str, pp: int, rank: int, chunk: int) -> int:
    """The pipeline stage that chunk `chunk` of rank `rank` is: chunks go round the ranks, or down and up again (V), or
    the second chunks are the same stages, up the ranks.
    """
    up = chunk % 2 and schedule in (*V_SHAPED, *TWO_WAY)
    return (0 if schedule in TWO_WAY else chunk * pp) + (pp - 1 - rank if up else rank)


def rank_of(schedule: str, pp: int, stage: int) -> int:
    """The rank that holds a stage or, where two do, that of the first chunks."""
    chunk, place = divmod(stage, pp)
    return pp - 1 - place if schedule in V_SHAPED and chunk % 2 else place


@dataclass
class _Rank:
    """Actions of one rank as they are added, the micro-batches of each kind and chunk in turn."""

    actions: list[Action] = field(default_factory=list)
    next: dict[tuple[str, int], int] = field(default_factory=dict)
    owed: list[tuple[int, int]] = field(default_factory=list)  # weights' halves: micro-batch and chunk

    def do(self, kind: Literal["F", "B", "I"], chunk: int) -> None:
        """The next forward, or the next backward, of a chunk."""
        direction = "F" if kind == "F" else "B"
        micro_batch = self.next.get((direction, chunk), 0)
        self.next[direction, chunk] = micro_batch + 1
        self.actions.append(Action(kind, micro_batch, chunk))
        if kind == "I":
            self.owed.append((micro_batch, chunk))

    def weights(self, chunk: int | None = None) -> None:
        """The oldest half that is owed (of a chunk)."""
        i = next(i for i, (_, of) in enumerate(self.owed) if chunk is None or of == chunk)
        micro_batch, of = self.owed.pop(i)
        self.actions.append(Action("W", micro_batch, of))

    def halves(self, chunk: int) -> None:
        self.do("I", chunk)
        self.weights(chunk)


def _one_chunk(schedule: str) -> Callable[[int, int, int, int], list[Action]]:
    def actions(pp: int, rank: int, chunks: int, num_microbatches: int) -> list[Action]:
        count, r = runs(schedule, pp, rank, num_microbatches), _Rank()
        for kinds, times in (("F", count.warmup), ("FB", count.steady), ("B", count.cooldown)):
            for kind in kinds * times:
                r.do(kind, 0)
        return r.actions

    return actions


def _looped_bfs(pp: int, rank: int, chunks: int, num_microbatches: int) -> list[Action]:
    forward = [Action("F", i, c) for c in range(chunks) for i in range(num_microbatches)]
    return [*forward, *(Action("B", i, c) for _, i, c in reversed(forward))]


def rounds(pp: int, num_microbatches: int) -> int:
    """The rounds in which an interleaved schedule takes micro-batches through the chunks: of pp, or a few more each."""
    return max(1, num_microbatches // pp)


def _interleaved(hop: int, *, trail: int | None = None) -> Callable[[int, int, int, int], list[Action]]:
    """`hop`: forwards of warm-up for each rank that follows. Where there is a `trail` backward is split, and weights'
    halves trail by that many for each rank before.
    """

    def actions(pp: int, rank: int, chunks: int, num_microbatches: int) -> list[Action]:
        together = num_microbatches // rounds(pp, num_microbatches)
        total = chunks * num_microbatches
        warmup = min((chunks - 1) * together + hop * (pp - 1 - rank), total)
        split, owed = trail is not None, (trail or 0) * rank

        def visit(i: int) -> tuple[int, int]:
            """Chunk and micro-batch of a rank's i-th forward."""
            lap, place = divmod(i, chunks * together)
            chunk, within = divmod(place, together)
            return chunk, lap * together + within

        def back(kind: Literal["B", "I", "W"], i: int) -> Action:
            chunk, micro_batch = visit(i)
            return Action(kind, micro_batch, chunks - 1 - chunk)

        done = []
        for i in range(total + warmup):
            if i < total:
                chunk, micro_batch = visit(i)
                done.append(Action("F", micro_batch, chunk))
            backward = i - warmup
            if backward >= 0:
                done.append(back("I" if split else "B", backward))
            if split and backward >= owed:
                done.append(back("W", backward - owed))
        if split:
            done += [back("W", i) for i in range(max(total - owed, 0), total)]
        return done

    return actions


def _zbv(pp: int, rank: int, chunks: int, num_microbatches: int) -> list[Action]:
    """Planned for enough micro-batches to fill the pipeline; what there are none for is left out."""
    planned, later, r = max(num_microbatches, 2 * pp - 1), pp - rank, _Rank()
    for _ in range(2 * later - 1):
        r.do("F", 0)
    for _ in range(rank):
        r.do("F", 1)
        r.do("F", 0)
    for _ in range(later):
        r.do("F", 1)
        r.halves(1)
    for _ in range(planned - pp):
        if r.next["F", 0] < planned:
            r.do("F", 0)
        r.halves(0)
        r.do("F", 1)
        r.halves(1)
    for _ in range(rank):
        r.do("I", 0)
        r.do("I", 1)
    for _ in range(later):
        r.do("I", 0)
        r.weights(0)
    for chunk in (1, 0):
        while any(of == chunk for _, of in r.owed):
            r.weights(chunk)
    return [action for action in r.actions if action.micro_batch < num_microbatches]


def _dualpipev(pp: int, rank: int, chunks: int, num_microbatches: int) -> list[Action]:
    """A forward and the backward beside it are one on the device (`overlapped`); in order, the forward comes first."""
    later, r = pp - 1 - rank, _Rank()
    for _ in range(2 * later):
        r.do("F", 0)
    for _ in range(rank + 1):
        r.do("F", 0)
        r.do("F", 1)
    for _ in range(later):
        r.halves(1)
        r.do("F", 1)
    for _ in range(num_microbatches - pp - later):
        r.do("F", 0)
        r.do("B", 1)
        r.do("F", 1)
        r.do("B", 0)
    for _ in range(later):
        r.do("B", 1)
        r.do("F", 1)
        r.do("B", 0)
    for i in range(2 * (rank + 1)):  # the second half leaves its weights' part for the bubble at the end
        r.do("B" if i <= rank else "I", 1 - i % 2)
    for _ in range(later):
        r.weights()
        r.do("I", 0)
    while r.owed:
        r.weights()
    return r.actions


def _dualpipe(pp: int, rank: int, chunks: int, num_microbatches: int) -> list[Action]:
    """What a V of half the ranks does: a rank begins with the chunk whose first stage is at the nearer end."""
    near, half = (0, rank) if rank < pp // 2 else (1, pp - 1 - rank)
    each_way = num_microbatches // 2
    of_v = _dualpipev(pp // 2, half, chunks, each_way)
    chunk = {0: near, 1: 1 - near}
    return [Action(a.kind, a.micro_batch + chunk[a.chunk] * each_way, chunk[a.chunk]) for a in of_v]


_OF_RANK: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    **{name: _one_chunk(name) for name in WARMUP},
    "interleaved": _interleaved(2),
    "looped-bfs": _looped_bfs,
    "zb-h1": _interleaved(1, trail=1),
    "zb-h2": _interleaved(2, trail=2),
    "zbv": _zbv,
    "dualpipe": _dualpipe,
    "dualpipev": _dualpipev,
}


def why_not(schedule: str, pp: int, chunks: int, num_microbatches: int) -> str | None:
    """Why a schedule has no order for these sizes, whole numbers of at least 1; None where it has."""
    if schedule in WARMUP:
        return None if chunks == 1 else f"{schedule} has one chunk a rank, not {chunks}"
    if schedule == "zb-h2":
        return None if chunks == 1 else f"zb-h2 has one chunk a rank, not {chunks}"
    if schedule in (*V_SHAPED, *TWO_WAY):
        if chunks != 2:
            return f"{schedule} has two chunks a rank, not {chunks}"
        if schedule in TWO_WAY and (pp % 2 or num_microbatches % 2):
            return f"{schedule} halves ranks and micro-batches, and of {pp} and {num_microbatches} not both are even"
        if schedule in ("dualpipe", "dualpipev") and num_microbatches < 2 * pp:
            return f"{schedule} needs {2 * pp} micro-batches, two for each rank, and there are {num_microbatches}"
        return None
    many = rounds(pp, num_microbatches)
    if schedule != "looped-bfs" and num_microbatches % many:
        return f"{schedule} takes micro-batches in {many} rounds, which do not divide {num_microbatches}"
    return None


@lru_cache(maxsize=1024)
def order(schedule: str, pp: int, num_microbatches: int, chunks: int = 1) -> Order:
    """What every rank does, in order.

    Raises:
        ValueError: the schedule is unknown, a size is not positive, or the schedule has no order for them.
    """
    if schedule not in _OF_RANK:
        raise ValueError(f"{schedule} is not a schedule: {', '.join(_OF_RANK)}")
    if pp < 1 or num_microbatches < 1 or chunks < 1:
        sizes = f"pp={pp}, num_microbatches={num_microbatches}, chunks={chunks}"
        raise ValueError(f"a pipeline needs a stage and a micro-batch: {sizes}")
    if reason := why_not(schedule, pp, chunks, num_microbatches):
        raise ValueError(reason)
    return tuple(tuple(_OF_RANK[schedule](pp, rank, chunks, num_microbatches)) for rank in range(pp))


def overlapped(schedule: str, pp: int, rank: int, actions: Sequence[Action]) -> frozenset[int]:
    """The places of a rank's forwards that are computed together with the backward that follows: both have their
    results when both are done. DualPipe and its V leave the first such pair of the ranks at the turn apart, "to further
    reduce bubble size".
    """
    if schedule not in ("dualpipe", "dualpipev"):
        return frozenset()
    pairs = [i for i, (a, b) in enumerate(pairwise(actions)) if (a.kind, b.kind) == ("F", "B")]
    turns = rank == pp - 1 if schedule in V_SHAPED else rank in (pp // 2 - 1, pp // 2)
    return frozenset(pairs[1:] if turns else pairs)


@lru_cache(maxsize=1024)
def in_flight(schedule: str, pp: int, num_microbatches: int, chunks: int = 1) -> tuple[int, ...]:
    """The most micro-batches that each rank holds a chunk's activations of at once, read off its order: from forward
    to the end of backward, its weights' half included.

    Raises:
        ValueError: as `order`.
    """
    most = []
    for actions in order(schedule, pp, num_microbatches, chunks):
        held = peak = 0
        for action in actions:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            peak = max(peak, held)
        most.append(peak)
    return tuple(most)
