"""Causal attention over a sequence that is split between the ranks of a group, run for real: Ulysses, gathered keys,
and PyTorch's own ring.

Every kind exchanges what the derivation in `nanum.operators` says, and keeps for backward what it says: the operands of
the kernel with as many key and value heads as the model has, the output, and the log-sum-exp of each row. Kernels are
those of PyTorch's CPU build; nothing here has been run on another device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

Kind = Literal["ulysses", "allgather", "ring", "ring_alltoall"]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

HEADS, ROWS = 1, 2  # dims of [batch, heads, rows of the sequence, head_dim]
ATEN = torch.ops.aten
# Renamed in torch 2.13; the old names then warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def context_attention(kind: Kind, group: dist.ProcessGroup) -> Attention:
    """Attention of one rank of `group`: q [B, H, S/cp, D], k and v [B, G, S/cp, D] to [B, H, S/cp, D].

    Rank r has block r of the sequence. G divides H, and a key-value head serves H/G neighbouring query heads.
    `ring` gathers the keys and values that its steps pass round (PyTorch's default), `ring_alltoall` passes them on.

    Raises:
        ValueError: an unknown kind; from the attention, heads that the ranks do not divide under ulysses.
    """
    if kind == "ulysses":
        return lambda q, k, v: _ulysses(q, k, v, group)
    if kind == "allgather":
        return lambda q, k, v: _gathered(q, k, v, group)
    if kind in ("ring", "ring_alltoall"):
        rotate = "alltoall" if kind == "ring_alltoall" else "allgather"
        return lambda q, k, v: _Ring.apply(q, k, v, group, rotate)
    raise ValueError(f"context parallel kind {kind!r}: must be one of {', '.join(get_args(Kind))}")


def _ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    ranks = group.size()
    for name, t in (("query", q), ("key and value", k)):
        if t.shape[HEADS] % ranks:
            raise ValueError(f"{t.shape[HEADS]} {name} heads do not divide by {ranks} ranks of context parallelism")
    whole = (_AllToAll.apply(t, group, HEADS, ROWS) for t in (q, k, v))
    return _AllToAll.apply(_Causal.apply(*whole, 0), group, ROWS, HEADS)


def _gathered(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _Causal.apply(q, *(_GatherRows.apply(t, group) for t in (k, v)), group.rank() * q.shape[ROWS])


# --- exchanges -------------------------------------------------------------------------------------------------------


class _AllToAll(torch.autograd.Function):
    """Dim `cut` is divided between the ranks, and dim `join` put together from theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, cut: int, join: int) -> torch.Tensor:
        ctx.how = group, cut, join
        return _exchange(x, group, cut, join)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, cut, join = ctx.how
        return _exchange(grad, group, join, cut), None, None, None


def _exchange(x: torch.Tensor, group: dist.ProcessGroup, cut: int, join: int) -> torch.Tensor:
    return torch.cat(exchanged(torch.stack(x.chunk(group.size(), cut)), group).unbind(), join)


def exchanged(pieces: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Piece r goes to rank r of the group, and what is there comes from it."""
    arrived = torch.empty_like(pieces)
    dist.all_to_all_single(arrived, pieces, group=group)
    return arrived


class _GatherRows(torch.autograd.Function):
    """The whole sequence on every rank; its gradient is summed over the ranks, each of which takes its block."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        blocks = x.new_empty(group.size(), *x.shape)
        _all_gather(blocks.flatten(0, 1), x.contiguous(), group=group)
        return torch.cat(blocks.unbind(), ROWS)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        blocks = torch.stack(grad.chunk(ctx.group.size(), ROWS))
        mine = torch.empty_like(blocks[0])
        _reduce_scatter(mine, blocks.flatten(0, 1), group=ctx.group)
        return mine, None


# --- kernels ---------------------------------------------------------------------------------------------------------


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp."""
    kernel = ATEN._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(query, key, value, 0.0, is_causal, attn_mask=mask)
    return out, lse


def _flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kernel = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = kernel(grad_out, query, key, value, out, logsumexp, 0.0, is_causal, attn_mask=mask)
    return dq, dk, dv


class _Causal(torch.autograd.Function):
    """Attention of rows `first`, `first` + 1, … of a sequence to its keys up to each row's own. Where there are more
    keys than rows the kernel needs a mask; it is made for forward and again for backward, and not kept.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int) -> torch.Tensor:
        whole = q.shape[ROWS] == k.shape[ROWS]
        out, lse = _flash(q, k, v, whole, None if whole else _mask(q, k, first))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.first = first
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        whole = q.shape[ROWS] == k.shape[ROWS]
        return *_flash_backward(grad, q, k, v, out, lse, whole, None if whole else _mask(q, k, ctx.first)), None


def _mask(q: torch.Tensor, k: torch.Tensor, first: int) -> torch.Tensor:
    """Added to the scores: -inf from each row's next key on."""
    return q.new_full((q.shape[ROWS], k.shape[ROWS]), -torch.inf).triu_(first + 1)


# --- the ring --------------------------------------------------------------------------------------------------------


class _Ring(torch.autograd.Function):
    """`torch.distributed.tensor.experimental`'s ring around the CPU's kernel, for which it has no entry of its own."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, rotate: str
    ) -> torch.Tensor:
        with _rotating(rotate):
            out, lse = torch_ring._templated_ring_attention(group, ROWS, _flash, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = group, rotate
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, rotate = ctx.how
        q, k, v, out, lse = ctx.saved_tensors
        with _rotating(rotate):
            grads = torch_ring._templated_ring_attention_backward(
                group, ROWS, _flash_backward, grad, "grad_out", q, k, v, out, lse, True
            )
        return *grads, None, None


@contextmanager
def _rotating(method: str) -> Iterator[None]:
    """PyTorch reads both from the process: how keys and values go round, and that block r is rank r's (a balanced ring
    takes two blocks a rank, one from each end).
    """
    options = torch_ring._cp_options
    before = options.rotate_method, options.enable_load_balance
    torch_ring.set_rotate_method(method)
    options.enable_load_balance = False
    try:
        yield
    finally:
        options.rotate_method, options.enable_load_balance = before
