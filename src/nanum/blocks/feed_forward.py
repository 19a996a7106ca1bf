"""A feed-forward block: one or two column-parallel projections, an activation, and a row-parallel one."""

from __future__ import annotations

from nanum.blocks.body import Streams
from nanum.model import Mlp
from nanum.operators.elementwise import activated, dropout, swiglu
from nanum.operators.matmul import linear
from nanum.operators.tape import Tape
from nanum.sharding import Tensor


def feed_forward(t: Tape, h: Tensor, mlp: Mlp, splits: Streams) -> Tensor:
    """`W_down act(W_up h)`, or with a gate `W_down (act(W_gate h) * W_up h)`, in the residual stream's split."""
    split = {"F": t.tp} if t.tp else {}

    def column(name: str) -> Tensor:
        return linear(t, h, name, ("F", "D"), split, ("B", "S", "F"), {**splits.whole, **split}, bias=mlp.bias)

    inner = swiglu(t, column, mlp.activation) if mlp.gated else activated(t, mlp.activation, column("up"))
    inner = dropout(t, inner, mlp.dropout, "inner_dropout")
    out = linear(t, inner, "down", ("D", "F"), split, ("B", "S", "D"), splits.stream, bias=mlp.bias)
    t.frame(h, t.gathered(h, splits.whole), inner)
    return out
