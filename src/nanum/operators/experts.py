"""A mixture of experts: each token is sent to a few of them, and what they make of it is brought back.

Token slots are [E, N, D]: of each expert, as many rows as tokens chose it, evenly. Before they are sent, a rank's slots
are its own tokens' (N is split as tokens are); afterwards they are its own experts' (E is split over `ep`). An axis
that changes dim is an all-to-all, so that dispatch, its way back and their transposes follow from the rules (GShard,
arXiv 2006.16668); so do the gather and the reduce-scatter of experts that are split over `etp`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from nanum.conventions import EXPERT_ACTIVATION
from nanum.operators.elementwise import pointwise
from nanum.operators.matmul import linear
from nanum.operators.tape import Tape
from nanum.sharding import Split, Tensor

OWN_AXES = ("dp_replicate", "edp", "ep", "etp")
"""The ranks that have tokens, as experts see them; `edp`, `ep` and `etp` together are dp_shard, cp and tp."""
COPIES = ("dp_replicate", "edp")
"""Those that have the same experts."""


@dataclass(frozen=True, eq=False)
class Choice:
    """Which experts each token is sent to, and by what their answers are scaled."""

    tokens: Tensor
    weights: Tensor  # fp32, of each choice of a token
    chosen: Tensor  # int64


@dataclass(frozen=True, eq=False)
class Slots:
    """The choices of tokens, put in the order of their experts."""

    choice: Choice
    order: Tensor  # int64 [E, N]: the choice that each slot is
    rows: Tensor  # int64 [E, N]: its token
    split: Split

    @property
    def tokens(self) -> Tensor:
        return self.choice.tokens

    @property
    def weights(self) -> Tensor:
        return self.choice.weights


def slots_split(h: Tensor, *, own: bool) -> Split:
    """How the slots of a rank's own tokens lie; `own` where experts have a mesh of their own."""
    axes = (*h.split.get("B", ()), *h.split.get("S", ()))
    return {"N": OWN_AXES if own else axes}


def route(t: Tape, h: Tensor, *, bias: bool = False) -> Choice:
    """A router [E, D] scores every token: fp32 softmax (or sigmoid), the largest of it, and their sum to 1. Saves the
    scores and the choice.
    """
    logits = linear(t, h, "router", ("E", "D"), {}, ("B", "S", "E"), h.split, bias=bias)
    scores = t.kernel("router_softmax", (logits,), logits, "fp32")
    chosen = Tensor("chosen", ("B", "S", "choices"), h.split, "int64")
    t.emit("topk", (scores,), (chosen,))
    weights = Tensor("router_weights", ("B", "S", "choices"), h.split, "fp32")
    t.emit("gather", (scores, chosen), (weights,))

    def transpose() -> None:
        d = t.kernel("scatter", (t.grad(weights), chosen), scores)
        t.add_grad(logits, t.kernel("d_router_softmax", (d, scores), logits))

    t.then(weights, transpose)
    return Choice(h, weights, chosen)


def in_order(t: Tape, choice: Choice, split: Split) -> Slots:
    """The slots of these tokens' choices, as `split` lays them."""
    order = Tensor("order", ("E", "N"), split, "int64")
    t.emit("sort", (choice.chosen,), (order,))
    return Slots(choice, order, t.kernel("rows", (order,), order), split)


def spread(t: Tape, choice: Slots) -> Tensor:
    """A row for each slot: the tokens, each as often as it chose an expert."""
    h = choice.tokens
    slots = Tensor("slots", ("E", "N", "D"), choice.split, h.dtype)
    t.emit("spread", (h, choice.rows), (slots,))

    def transpose() -> None:
        t.emit("d_spread", (t.grad(slots), choice.rows), (dh := h.like(name="d_tokens"),))
        t.add_grad(h, dh)

    return t.then(slots, transpose)


def slot_weights(t: Tape, choice: Slots) -> Tensor:
    """Of each slot the weight of the choice that it is, where the tokens are."""
    by = Tensor("slot_weights", ("E", "N"), choice.split, "fp32")
    t.emit("slot_weights", (choice.weights, choice.order), (by,))

    def weights_transpose() -> None:
        t.emit("d_slot_weights", (t.grad(by), choice.order), (dw := choice.weights.like(name="d_router_weights"),))
        t.add_grad(choice.weights, dw)

    return t.then(by, weights_transpose)


def scaled(t: Tape, slots: Tensor, by: Tensor, *, fused: bool = False) -> Tensor:
    """Slots times their weights `by`, wherever they are. Saves both; `fused` into the kernel that made the slots, the
    fp32 weights alone.
    """
    half = by if fused or not t.half else pointwise(t, "to_half", (by,), saves=False, dtype=t.dtype)
    here = t.resharded(half, {d: slots.split[d] for d in ("E", "N") if d in slots.split})
    with t.region(EXPERT_ACTIVATION) if fused else nullcontext():
        t.emit("scale", (slots, here), (y := slots.like(name="scaled"),))

    def transpose() -> None:
        d = t.grad(y)
        if fused:
            new = slots.like(name="d_slots"), here.like(name="d_slot_weights")
            t.emit("d_scale", (d, here), new)
        else:  # what is summed over a slot's entries is made whole before
            ds, product = t.kernel("mul", (d, here), slots), t.kernel("mul", (d, slots), slots)
            new = ds, t.kernel("sum", (product,), here, holds=(ds, d))
        t.add_grad(slots, new[0])
        t.add_grad(here, new[1])

    return t.then(y, transpose)


def combine(t: Tape, slots: Tensor, choice: Slots) -> Tensor:
    """The sum of a token's slots, in the tokens' order."""
    slots = t.resharded(slots, choice.split)
    t.emit("combine", (slots, choice.rows), (y := choice.tokens.like(name="combined"),))

    def transpose() -> None:
        t.emit("d_combine", (t.grad(y), choice.rows), (ds := slots.like(name="d_slots"),))
        t.add_grad(slots, ds)

    return t.then(y, transpose)


def expert_linear(t: Tape, x: Tensor, name: str, out: str, inner: str, split: Split, *, bias: bool = False) -> Tensor:
    """`y[E, N, out] = x[E, N, inner] . W[E, inner, out]`, each expert's rows by its own matrix."""
    w = t.weight(name, ("E", inner, out), split)
    of_bias = {d: axes for d, axes in split.items() if d in ("E", out)}
    b = t.weight(name + "_bias", ("E", out), of_bias, w.stays) if bias else None
    y = t.product(name, x, w, ("E", "N", out), x.split, fp8=True)

    def transpose() -> None:
        dy = t.grad(y)
        dx = t.product("dx_" + name, dy, w, x.dims, x.split, fp8=True)
        dw = t.product("dw_" + name, x, dy, w.dims, w.split, category="grads", size=t.accumulated, fp8=True)
        node = t.backward[-1].reads
        if b:
            pending = tuple(a for a in dy.split.get("N", ()))
            db = Tensor("d_" + b.name, b.dims, b.split, t.dtype, pending, "grads")
            t.emit("db_" + name, (dy,), (db,))
            t.set_weight_grad(b, db)
        t.frame(*node)
        t.add_grad(x, dx)
        t.set_weight_grad(w, dw)

    return t.then(y, transpose)


def bias_apart(t: Tape, y: Tensor, name: str, by: Tensor) -> Tensor:
    """`y[E, N, D] + by[E, N] b[E, D]`: a bias scaled as its slot is, in the weights' fp32, by loops over experts, since
    each has as many rows as it got (Megatron-LM, moe/experts.py: `_apply_bias`). `by` lies as y's rows do. Saves the
    bias and the weights.
    """
    of_bias = {d: y.split[d] for d in ("E",) if d in y.split}
    b = t.weight(name + "_bias", ("E", y.dims[-1]), of_bias)
    whole = y.like(name="with_bias", dtype=by.dtype)
    experts, once = t.shapes.elements(("E",), y.split), t.shapes.bytes(whole)
    t.emit("expert_bias", (y, b, by), (whole,), besides=2 * once, launches=2 * experts)  # their product too
    out = t.kernel("cat", (whole,), whole)
    if t.half:
        out = t.kernel("to_half", (out,), y)

    def transpose() -> None:
        d = t.grad(out)
        narrow, wide = d, d  # as they lie: a gradient of a sum over ranks is whole
        if t.half:
            wide = t.kernel("to_float", (d,), d, by.dtype)
            narrow = t.kernel("to_half", (wide,), d)
        t.add_grad(y, t.kernel("cat", (narrow,), d))
        dby, db = by.like(name="d_slot_weights"), t.grad_of_weight(b, y, ("N",))
        t.emit(
            "d_expert_bias", (wide, b, by), (dby, db), besides=5 * once, launches=4 * experts
        )  # two products, summed
        t.add_grad(by, dby)
        t.set_weight_grad(b, db)

    return t.then(out, transpose)
