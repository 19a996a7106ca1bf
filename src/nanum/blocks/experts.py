"""A layer's experts in place of its feed-forward block: routed ones, and those that every token goes through."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nanum.arrays import ceiling, least
from nanum.blocks.body import Streams
from nanum.conventions import EXPERT_ACTIVATION, SHARED_EXPERTS
from nanum.job import Routing
from nanum.model import Experts, Mlp
from nanum.operators.elementwise import activated, pointwise, residual, swiglu
from nanum.operators.experts import combine, expert_linear, route, scaled, spread
from nanum.operators.matmul import linear
from nanum.operators.tape import Tape
from nanum.sharding import Split, Tensor


def expert_dims(e: Experts, tokens: Any, ranks: Any, routing: Routing) -> dict[str, Any]:
    """Global sizes: each expert has an equal share of the slots that `tokens` need, or as many as it may take from each
    of the `ranks` that have them.
    """
    return {
        "E": e.num_experts,
        "N": _slots(e, tokens, ranks, routing),
        "choices": e.num_experts_per_tok,
        "F": e.expert.intermediate_size,
        "G": e.shared.intermediate_size if e.shared else 0,
        "one": 1,
    }


def _slots(e: Experts, tokens: Any, ranks: Any, routing: Routing) -> Any:
    """Slots of each expert, where tokens choose all alike."""
    even = -(-tokens * e.num_experts_per_tok // e.num_experts)
    if routing.capacity is None:
        return even
    # Rounded up on each rank (Megatron-LM, moe_utils.py: `get_capacity`).
    most = ranks * ceiling(tokens // ranks * e.num_experts_per_tok / e.num_experts * routing.capacity)
    return most if routing.padded else least(even, most)


def mixture(t: Tape, h: Tensor, e: Experts, splits: Streams) -> Tensor:
    """What the experts make of h [B, S, D], in its split: of each token the sum of its few experts' answers, each
    scaled by the router, and the shared experts'.

    Experts are split over `ep`, and each over `etp`; on the mesh of all other weights each is split over `tp`.
    """
    choice = route(t, h, own=t.own_experts, bias=e.router_bias)
    when = t.conventions.expert_weights
    slots = spread(t, choice)
    if when == "before":
        slots = scaled(t, slots, choice)
    sent = slots
    if t.conventions.slots_sorted:
        arrived = t.resharded(slots, _at_experts(t, slots))
        slots = pointwise(t, "sort_slots", (arrived,), saves=False)
    split: Split = {"E": ("ep",), "F": ("etp",)} if t.own_experts else {"F": t.tp} if t.tp else {}
    column = partial(_column, t, slots, split, e.expert)
    inner = _inner(t, e.expert, column, EXPERT_ACTIVATION)
    if when == "inside":
        inner = scaled(t, inner, choice, fused=True)
    out = expert_linear(t, inner, "expert_down", "D", "F", split, bias=e.expert.bias)
    if when == "after":
        out = scaled(t, t.resharded(out, choice.slots), choice)
    if t.conventions.slots_sorted:
        out = pointwise(t, "unsort_slots", (out,), saves=False)
    y = combine(t, out, choice)
    if t.conventions.slots_sorted:
        t.frame(sent, arrived, out)  # names in one frame (core/transformer/moe/moe_layer.py: custom_forward)
    if e.shared is None:
        return y
    with t.region(SHARED_EXPERTS):
        always = _shared(t, h, e, e.shared, splits)
    return residual(t, y, always)


def _at_experts(t: Tape, slots: Tensor) -> Split:
    """How slots lie where their experts are: ranks that share an expert have the same."""
    shared = ("ep", "etp") if t.own_experts else ("tp",)
    rows = tuple(axis for axis in slots.split["N"] if axis not in shared)
    return {"E": ("ep",), "N": rows} if t.own_experts else {"N": rows}


def _column(t: Tape, slots: Tensor, split: Split, expert: Mlp, name: str) -> Tensor:
    return expert_linear(t, slots, f"expert_{name}", "F", "D", split, bias=expert.bias)


def _inner(t: Tape, mlp: Mlp, column: Callable[[str], Tensor], region: str) -> Tensor:
    """What an expert's last matrix reads. Where the activation is one kernel, it is a `region` of its own."""
    if "activation" not in t.conventions.fused:
        return swiglu(t, column, mlp.activation) if mlp.gated else activated(t, mlp.activation, column("up"))
    projected = {name: column(name) for name in (("gate", "up") if mlp.gated else ("up",))}
    with t.region(region):
        if mlp.gated:
            return swiglu(t, projected.__getitem__, mlp.activation)
        return activated(t, mlp.activation, projected["up"])


def _shared(t: Tape, h: Tensor, e: Experts, mlp: Mlp, splits: Streams) -> Tensor:
    """A feed-forward block of its own width, which may be scaled by a sigmoid."""
    split = {"G": t.tp} if t.tp else {}

    def column(name: str) -> Tensor:
        return linear(t, h, f"shared_{name}", ("G", "D"), split, ("B", "S", "G"), {**splits.whole, **split})

    inner = _inner(t, mlp, column, SHARED_EXPERTS)
    out = linear(t, inner, "shared_down", ("D", "G"), split, ("B", "S", "D"), splits.stream)
    if not e.shared_gate:
        return out
    gate = linear(t, h, "shared_scale", ("one", "D"), {}, ("B", "S", "one"), h.split)
    sigmoid = pointwise(t, "sigmoid", (gate,))
    t.emit("scale", (out, sigmoid), (y := out.like(name="shared"),))

    def transpose() -> None:
        d = t.grad(y)
        new = out.like(name="d_shared"), sigmoid.like(name="d_sigmoid")
        t.emit("d_scale", (d, out, sigmoid), new)
        t.add_grad(out, new[0])
        t.add_grad(sigmoid, new[1])

    return t.then(y, transpose)
