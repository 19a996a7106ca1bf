"""A layer's experts in place of its feed-forward block: routed ones, and those that every token goes through."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nanum.arrays import ceiling, least, where
from nanum.blocks.body import Streams
from nanum.conventions import EXPERT_ACTIVATION, ROUTER, SHARED_EXPERTS, SLOTS
from nanum.job import Job, Routing
from nanum.layout import Layout
from nanum.model import Experts, Layer, Mlp
from nanum.operators import dispatch
from nanum.operators.elementwise import activated, pointwise, residual, swiglu
from nanum.operators.experts import (
    Choice,
    bias_apart,
    combine,
    expert_linear,
    in_order,
    route,
    scaled,
    slot_weights,
    slots_split,
    spread,
)
from nanum.operators.matmul import linear
from nanum.operators.routing import places_reached
from nanum.operators.tape import Tape
from nanum.sharding import Split, Tensor


def expert_dims(e: Experts, tokens: Any, layout: Layout, routing: Routing) -> dict[str, Any]:
    """Global sizes: each expert has an equal share of the slots that `tokens` need, or as many as it may take from each
    rank. Where tokens go through nodes, each node and each rank has an equal share of their copies.
    """
    sizes = {
        "E": e.num_experts,
        "N": _slots(e, tokens, layout, routing),
        "choices": e.num_experts_per_tok,
        "F": e.expert.intermediate_size,
        "G": e.shared.intermediate_size if e.shared else 0,
        "one": 1,
    }
    if layout.structure.dispatcher == "flex":
        for places, copies, count in (("nodes", "C", layout.ep_inter), ("ranks", "R", layout.ep)):
            sizes |= {places: count, copies: ceiling(tokens * reached(e, routing, count) / count)}
    return sizes


def reached(e: Experts, routing: Routing, places: Any) -> Any:
    """How many nodes, or ranks, of so many have experts that a token is sent to."""
    groups, group_topk = (routing.groups, routing.group_topk) if routing.groups else (e.groups, e.group_topk)
    return places_reached(e.num_experts, e.num_experts_per_tok, groups, group_topk, places)


def _slots(e: Experts, tokens: Any, layout: Layout, routing: Routing) -> Any:
    """Slots of each expert, where tokens choose all alike."""
    even = -(-tokens * e.num_experts_per_tok // e.num_experts)
    if routing.capacity is None:
        return even
    # Rounded up on each rank (Megatron-LM, moe_utils.py: `get_capacity`).
    ranks = layout.data_ranks * layout.cp * (layout.tp if layout.structure.tensor == "sequence" else 1)
    most = ranks * ceiling(tokens // ranks * e.num_experts_per_tok / e.num_experts * routing.capacity)
    return most if routing.padded else least(even, most)


def crowded(kind: Layer, layout: Layout, job: Job) -> dict[str, tuple[str, Any]] | None:
    """What the fullest rank of `ep` has over its even share: of slots, and of the tokens that arrive (at the most all
    of them); None where experts are not spread, or sent alike.
    """
    uneven = job.routing.share(job.expert_imbalance) / job.routing.share(1.0)
    if uneven == 1 or not layout.structure.own_experts or not isinstance(kind.mlp, Experts):
        return None
    slots = {"N": ("ep", where(layout.ep > 1, uneven, 1.0))}
    if layout.structure.dispatcher != "flex":
        return slots
    every = layout.ep / reached(kind.mlp, job.routing, layout.ep)
    return {**slots, "R": ("ep_intra", least(uneven + 0 * every, every))}


def mixture(t: Tape, h: Tensor, e: Experts, splits: Streams) -> Tensor:
    """What the experts make of h [B, S, D], in its split: of each token the sum of its few experts' answers, each
    scaled by the router, and the shared experts'.

    Experts are split over `ep`, and each over `etp`; on the mesh of all other weights each is split over `tp`.
    """
    with t.region(ROUTER):
        choice = route(t, h, bias=e.router_bias)
    with t.region(SLOTS):
        y = _by_nodes(t, e, choice) if t.own_experts and t.dispatcher == "flex" else _by_slots(t, e, choice)
    if e.shared is None:
        return y
    with t.region(SHARED_EXPERTS):
        always = _shared(t, h, e, e.shared, splits)
    return residual(t, y, always)


def _by_slots(t: Tape, e: Experts, choice: Choice) -> Tensor:
    """Each slot is sent to its expert."""
    with t.region(ROUTER):
        there = in_order(t, choice, slots_split(choice.tokens, own=t.own_experts))
    when = t.conventions.expert_weights
    slots = spread(t, there)
    if when == "before":
        slots = scaled(t, slots, slot_weights(t, there))
    sent = slots
    if t.conventions.slots_sorted:
        arrived = t.resharded(slots, _at_experts(t, slots))
        slots = pointwise(t, "sort_slots", (arrived,), saves=False)
    out = _computed(t, e, slots, (lambda: slot_weights(t, there)) if when == "inside" else None)
    if when == "after":
        out = scaled(t, t.resharded(out, there.split), slot_weights(t, there))
    if t.conventions.slots_sorted:
        out = pointwise(t, "unsort_slots", (out,), saves=False)
    y = combine(t, out, there)
    if t.conventions.slots_sorted:
        t.frame(sent, arrived, out)  # names in one frame (core/transformer/moe/moe_layer.py: custom_forward)
    return y


def _by_nodes(t: Tape, e: Experts, choice: Choice) -> Tensor:
    """Each token is sent to the nodes, and there to the ranks, that have experts of its own; slots are made there."""
    if t.dispatch_dtype == "fp8":
        slots, by = dispatch.arrived_as_slots(t, choice)
        out = _computed(t, e, slots, lambda: by)
        y = dispatch.returned(t, out, choice.tokens)
        t.frame(slots)
        return y
    there = in_order(t, dispatch.arrived(t, choice), dispatch.SLOTS_AT_EXPERTS)
    out = _computed(t, e, spread(t, there), lambda: slot_weights(t, there))
    y = dispatch.returned(t, combine(t, out, there), choice.tokens)
    t.frame(there.tokens)  # dispatched_input, in the same frame
    return y


def _computed(t: Tape, e: Experts, slots: Tensor, weights: Callable[[], Tensor] | None) -> Tensor:
    """The experts' answers to these slots, times `weights` where what their last matrix reads is scaled."""
    split: Split = {"E": ("ep",), "F": ("etp",)} if t.own_experts else {"F": t.tp} if t.tp else {}
    inner = _inner(t, e.expert, partial(_column, t, slots, split, e.expert), EXPERT_ACTIVATION)
    if weights is None:
        return expert_linear(t, inner, "expert_down", "D", "F", split, bias=e.expert.bias)
    by = weights()
    by = t.resharded(by, {d: inner.split[d] for d in by.dims if d in inner.split})
    out = expert_linear(t, scaled(t, inner, by, fused=True), "expert_down", "D", "F", split)
    return bias_apart(t, out, "expert_down", by) if e.expert.bias else out


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
