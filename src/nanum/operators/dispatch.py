"""Tokens to experts by way of nodes: each once to every node that has some of its experts, to the rank that has the
sender's place there, and on to each rank of that node that has some (DeepSeek-V3, arXiv 2412.19437, section 3.2.2;
DeepEP). What experts make goes back the same way, summed at each station.

So an exchange over `ep` is one over its ranks on other nodes (`ep_inter`) and one over those of a node (`ep_intra`).
The first carries as many copies of a token as it reaches nodes, the second as many as it reaches ranks
(`operators.routing`), where an all-to-all of slots carries one for each of its experts.

Read at DeepEP dd758ca (csrc/kernels/legacy/internode.cu: `get_num_bytes_per_token`): beside a token go, of four bytes
each, the index and the weight of every choice, and two numbers that say where it came from; a multiple of 16 bytes in
all. Indices go the first time alone; weights with them, and their gradients on the way back. Copies in transit are in
the library's own buffers, and one kernel forwards them piece by piece: both exchanges run at once.
"""

from __future__ import annotations

from nanum.dtypes import bytes_of
from nanum.operators.exchange import collective
from nanum.operators.experts import COPIES, Choice
from nanum.operators.tape import Tape
from nanum.program import CONTEXT_STREAM, EXPERTS_STREAM, EXPERTS_TICKET, Wait
from nanum.sharding import Split, Tensor

STATIONS: tuple[tuple[str, tuple[str, str], Split, Split], ...] = (
    (
        "ep_inter",
        ("nodes", "C"),
        {"C": (*COPIES, "ep_inter", "ep_intra")},
        {"nodes": ("ep_inter",), "C": (*COPIES, "ep_intra")},
    ),
    (
        "ep_intra",
        ("ranks", "R"),
        {"ranks": ("ep_inter",), "R": (*COPIES, "ep_intra")},
        {"ranks": ("ep_inter", "ep_intra"), "R": COPIES},
    ),
)
"""Of each exchange its axis, the dims of what it carries (places, and the copies of tokens for each), and how they lie
before and after it."""
TICKET = "copies between nodes"
AT_EXPERTS: Split = {"ranks": ("ep",), "R": COPIES}
SLOTS_AT_EXPERTS: Split = {"E": ("ep",), "N": COPIES}


def arrived(t: Tape, choice: Choice) -> Choice:
    """Tokens and their choices on each rank that has experts of theirs, one row a token."""
    h, k = choice.tokens, choice.chosen.dims[-1]
    tokens = Tensor("arrived", ("ranks", "R", "D"), AT_EXPERTS, h.dtype)
    there = Choice(
        tokens,
        Tensor("weights_arrived", ("ranks", "R", k), AT_EXPERTS, "fp32"),
        Tensor("chosen_arrived", ("ranks", "R", k), AT_EXPERTS, "int64"),
    )
    _sent(t, choice, h, (tokens, there.weights, there.chosen), there.weights)
    return there


def arrived_as_slots(t: Tape, choice: Choice) -> tuple[Tensor, Tensor]:
    """A row for each slot of a rank's experts, quantized before they are sent, and the weight of each (NCCL EP, as
    Transformer Engine has it: pytorch/ep.py).
    """
    h = choice.tokens
    small = t.kernel("quantize", (h,), h, "mxfp8")
    slots = Tensor("slots", ("E", "N", "D"), SLOTS_AT_EXPERTS, "mxfp8")
    by = Tensor("slot_weights", ("E", "N"), SLOTS_AT_EXPERTS, "fp32")
    _sent(t, choice, small, (slots, by), by)
    return slots, by


def _sent(t: Tape, choice: Choice, source: Tensor, writes: tuple[Tensor, ...], weights: Tensor) -> None:
    """`source`, which the tokens or a copy of them are, arrives as the first of `writes`."""
    h, first = choice.tokens, writes[0]
    k = t.shapes.dims[choice.chosen.dims[-1]]
    _exchange(t, source, 2 * k, (source, choice.weights, choice.chosen), writes, back=False)

    def transpose() -> None:
        d, dw = t.grad(first), t.grad(weights)
        new = h.like(name="d_tokens"), choice.weights.like(name="d_router_weights")
        _exchange(t, h, k, (d, dw), new, back=True)
        t.add_grad(h, new[0])
        t.add_grad(choice.weights, new[1])

    t.then(first, transpose)


def returned(t: Tape, y: Tensor, h: Tensor) -> Tensor:
    """What a rank's experts made of each token, or of each slot, added up where the token `h` is from."""
    _exchange(t, h, 0, (y,), (out := h.like(name="combined"),), back=True)

    def transpose() -> None:
        d = t.grad(out)
        _exchange(t, h, 0, (d,), (dy := y.like(name="d_answers"),), back=False)
        t.add_grad(y, dy)

    return t.then(out, transpose)


def _exchange(
    t: Tape, token: Tensor, words: int, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], *, back: bool
) -> None:
    """Both exchanges of rows like `token`'s, each with so many `words` of four bytes beside it; the way `back` ends
    between nodes.
    """
    row = bytes_of(t.shapes.dims["D"], token.dtype) + 4 * (words + 2)
    row = -(-row // 16) * 16
    nodes = []
    for axis, dims, near, far in STATIONS:
        before, after = (
            Tensor("copies", dims, split, token.dtype, size=t.shapes.elements(dims, split) * row)
            for split in ((far, near) if back else (near, far))
        )
        nodes.append(collective(t.shapes, "all_to_all", (axis,), before, after, t.phase, "activations"))
    between, within = nodes
    if t.conventions.ep_behind:
        beside = [node.started(t.phase, EXPERTS_STREAM, EXPERTS_TICKET) for node in (between, within)]
        t.loop("dispatch", reads, writes, 1, *beside)
        return
    started = between.started(t.phase, CONTEXT_STREAM, TICKET)
    t.loop("dispatch", reads, writes, 1, started, within, Wait(CONTEXT_STREAM, TICKET))
