"""The vocabulary of a step: a Program is a tree of operations and repeats, emitted once and read many times.

Quantities are ints, or numpy arrays over many layouts. Bytes are int64, FLOPs float64. A Program is never stored
unrolled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from nanum.dtypes import Scales

Quantity = Any  # int | float | np.ndarray: one number, or one for each of many layouts
Phase = Literal["forward", "recompute", "backward", "optimizer"]
Operands = Literal["nt", "nn", "tn", "tt"]
Library = Literal["", "flash", "cudnn", "triton"]
Behind = Literal["", "product"]
Category = Literal["params", "grads", "optimizer_states", "activations", "buffers"]


DATA_STREAM = "data"
"""Gathers of weights and reductions of gradients: what the compute awaits by a ticket."""
REDUCER_STREAM = "reducer"
"""DDP's buckets: beside the compute also where a device has no streams, since threads of the host carry them out."""
CONTEXT_STREAM = "context"
"""Exchanges beside others' work in one operation: a ring's of keys and values, beside the attention that is at work on
those before; of tokens between nodes, beside those within a node."""
EXPERTS_STREAM = "experts"
"""Exchanges of experts beside compute, as of another micro-batch, which all are awaited when a pass is done."""
EXPERTS_TICKET = "experts"
AWAITED_STREAMS = (DATA_STREAM, REDUCER_STREAM, CONTEXT_STREAM, EXPERTS_STREAM)
HOST_STREAM = "host"
"""Copies to the host's memory that go beside the compute. Those back that a gather needs are before it, on its own."""
PIPELINE_STREAM = "pipeline"
"""Sends between stages: the schedule's recurrence waits for them, not the stage."""


@dataclass(frozen=True, eq=False, slots=True)
class Compute:
    """One kernel, or `launches` of them. `bytes_moved` are read and written. `shape` is (m, n, k) of a matmul, where a
    batch of `products` counts as one that is as many times as tall, (rows, sequence, head) of flash attention, where a
    row is a head of a sequence, and () of anything else.
    """

    name: str
    phase: Phase
    flops: Quantity
    bytes_moved: Quantity
    dtype: str
    shape: tuple[Quantity, ...] = ()
    attention: Library = ""  # whose flash kernel: no matmul of one shape, and not bound by memory
    operands: Operands = "nt"  # of a matmul: how they lie in memory
    tensors: Quantity = 0  # parameters that an optimizer goes over, one by one
    sharded: bool = False  # are they DTensors?
    products: Quantity = 1
    scales: Scales = "tensor"  # of an fp8 matmul's operands
    element_bytes: int = 2  # of a matmul: what is written for each element of its result, and read where it is added to
    launches: Quantity = 1
    calls: int = 1  # of kernels by the host, where an engine's code launches more than this operation counts
    expert_by_expert: bool = False  # of slots that the host goes through by expert, and has to know the number of
    on_host: bool = False  # done by the host's processors, in their memory, while the device waits


@dataclass(frozen=True, eq=False, slots=True)
class Collective:
    """Exchanges of one kind: `calls` of them, which carry `payload_bytes` and `wire_bytes` together.

    `payload_bytes` is by the nccl-tests convention of its kind (the whole padded buffer of a gather or a scatter);
    `wire_bytes` is what one rank sends by a ring. A group of one rank has no calls and no bytes. Bytes without calls go
    along in buckets whose calls are counted elsewhere. `stream` names the communication stream it runs on beside the
    compute (it is then started here, and awaited by a `Wait`); None means that the compute waits at once. Where such an
    exchange is cut into as many pieces as there are ranks, each exchanged while the `product` that it belongs to is at
    work on another, it is `behind` that.
    """

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, permute, send; or a copy over the host's link
    axes: tuple[str, ...]  # mesh axes, outermost first; none of a copy to the host or from it
    phase: Phase
    what: str  # params, grads, activations, loss
    dtype: str
    group_size: Quantity
    calls: Quantity
    payload_bytes: Quantity
    wire_bytes: Quantity
    stream: str | None = None
    ticket: str = ""  # names what a Wait waits for
    behind: Behind = ""

    def times(self, share: Quantity, take: Callable[[Quantity], Quantity] = lambda q: q) -> Collective:
        """That `share` of it (0 or 1, or how often), its quantities taken to another space before."""
        return replace(
            self,
            group_size=take(self.group_size),
            calls=take(self.calls) * share,
            payload_bytes=take(self.payload_bytes) * share,
            wire_bytes=take(self.wire_bytes) * share,
        )

    def beside(self, other: Collective) -> Collective:
        """Both, as exchanges of their own."""
        return replace(
            self,
            calls=self.calls + other.calls,
            payload_bytes=self.payload_bytes + other.payload_bytes,
            wire_bytes=self.wire_bytes + other.wire_bytes,
        )

    def started(self, phase: Phase, stream: str, ticket: str, share: Quantity = 1) -> Collective:
        """The same exchange, or that `share` (0 or 1) of it, on a stream."""
        return Collective(
            self.kind, self.axes, phase, self.what, self.dtype, self.group_size,
            self.calls * share, self.payload_bytes * share, self.wire_bytes * share, stream, ticket, self.behind,
        )  # fmt: skip


TO_HOST, FROM_HOST = "device_to_host", "host_to_device"


def host_copy(
    kind: str, phase: Phase, what: str, dtype: str, calls: Quantity, size: Quantity, stream: str | None = None,
    ticket: str = "",
) -> Collective:  # fmt: skip
    """Copies of `size` bytes together between a device and its host's memory: the compute waits, or they are on a
    stream.
    """
    return Collective(kind, (), phase, what, dtype, 1, calls, size, size, stream, ticket)


@dataclass(frozen=True, eq=False, slots=True)
class Wait:
    """The compute stream waits for the last collective started with this ticket."""

    stream: str
    ticket: str


@dataclass(frozen=True, eq=False, slots=True)
class Held:
    """Bytes that begin to be held (positive) or are released (negative)."""

    category: Category
    bytes: Quantity
    name: str = ""
    apart: bool = False  # in the pool of another stream than the kernels', which no other tensor uses


@dataclass(frozen=True, eq=False, slots=True)
class OnHost:
    """Bytes of the host's memory that begin to be held for a device (positive) or are released (negative)."""

    bytes: Quantity
    name: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Mark:
    """A named moment, so that a peak can say when it was."""

    name: str


@dataclass(frozen=True, eq=False, slots=True)
class Repeat:
    """`count` rounds of `body`. Where `at` is given, the body's quantities are arrays over a smaller space (layouts
    that differ only in what the body cannot see), and `at[i]` is the place of layout i in it.
    """

    count: Quantity
    body: tuple[Node, ...]
    at: np.ndarray | None = None


Node = Compute | Collective | Wait | Held | OnHost | Mark | Repeat
