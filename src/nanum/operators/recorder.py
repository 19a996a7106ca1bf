"""What one rank does, operation by operation: what each reads and writes, and what the Program says of it.

A `Recorder` is of one part of a model. It knows which tensors need a gradient, as autograd knows it, and nothing of how
one is made: that is the tape's (`operators.tape`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanum.conventions import ROUTER, SLOTS, Conventions, has_adapter
from nanum.dtypes import ITEMSIZE, NF4
from nanum.job import ALL, Trained
from nanum.layout import DispatchDtype, Dispatcher
from nanum.program import Collective, Compute, Mark, Node, Operands, Phase, Repeat
from nanum.sharding import Shapes, Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Op:
    """One operation of one rank: `node` is what the Program says of it (nothing, for a Python frame that lets go)."""

    name: str
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    node: Compute | Collective | Mark | Repeat | None = None
    regions: tuple[str, ...] = ()  # the parts of a layer that a recompute may name, each inside the one before


class Hosted(NamedTuple):
    """What the host has to do with an operation: does a CUDA graph have it, and is it of the slots of experts?"""

    in_graph: bool = False
    of_slots: bool = False


@dataclass
class Recorder:
    """The settings of a part, and its operations so far, forward and backward."""

    shapes: Shapes
    conventions: Conventions
    tp: tuple[str, ...]  # ("tp",) where tp > 1
    sequence_parallel: bool
    flash: bool = True
    own_experts: bool = False  # do experts have a mesh of their own?
    trained: Trained = ALL  # of the job
    own_trained: bool = True  # are the model's own weights in this part trained?
    adapters: bool = False  # may linear layers in this part have adapters?
    context: str = "none"  # how attention meets the keys of other context-parallel ranks; none where cp = 1
    dispatcher: Dispatcher = "alltoall"  # of tokens to experts on a mesh of their own
    dispatch_dtype: DispatchDtype = "bf16"
    forward: list[Op] = field(default_factory=list)
    backward: list[Op] = field(default_factory=list)
    _phase: Phase = "forward"
    _regions: tuple[str, ...] = ()
    _hosted: Hosted = field(default_factory=Hosted)  # of what is emitted
    _requires: set[Tensor] = field(default_factory=set)  # tensors whose gradient is needed

    # --- what is trained --------------------------------------------------------------------------------------------
    def requires_grad(self, t: Tensor) -> bool:
        """Is its gradient needed: is it a trained weight, or made from one? As in autograd, nothing else has one."""
        return t in self._requires

    def require_grad(self, t: Tensor) -> None:
        self._requires.add(t)

    def adapts(self, name: str) -> bool:
        """Has the linear layer of this name an adapter?"""
        return self.adapters and has_adapter(self.trained, name)

    def quantizes(self, *, trained: bool) -> bool:
        """Are weights of linear layers in this part stored quantized?"""
        return self.adapters and self.trained.quantize == NF4 and not trained

    # --- emitting ---------------------------------------------------------------------------------------------------
    @property
    def ops(self) -> list[Op]:
        return self.forward if self._phase == "forward" else self.backward

    @property
    def dtype(self) -> str:
        return self.conventions.numerics.compute_dtype

    @property
    def half(self) -> bool:
        """Do activations have fewer than four bytes, so that fp32 kernels need copies?"""
        return ITEMSIZE[self.dtype] < 4

    @property
    def calls(self) -> int:
        """Kernels that the host launches for an operation."""
        if self._hosted.in_graph:
            return 0
        return min(1, self.conventions.calls) if self._expert_by_expert else self.conventions.calls

    @property
    def _expert_by_expert(self) -> bool:
        return self._hosted.of_slots and self.conventions.experts_apart

    @property
    def phase(self) -> Phase:
        return self._phase

    def record(
        self,
        name: str,
        reads: tuple[Tensor, ...],
        writes: tuple[Tensor, ...],
        node: Compute | Collective | Repeat | None = None,
    ) -> None:
        """One operation of the part of the layer that is being emitted."""
        self._append(Op(name, reads, writes, node, self._regions))

    def _append(self, op: Op) -> None:
        self.ops.append(op)
        if self._phase == "forward" and not self._requires.isdisjoint(op.reads):
            self._requires.update(op.writes)

    def emit(
        self,
        name: str,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        flops: Any = 0.0,
        shape: tuple[Any, ...] = (),
        *,
        attention: bool = False,
        operands: Operands = "nt",
        dtype: str | None = None,
        products: Any = 1,
        launches: Any = 1,
        besides: Any = 0,
        element_bytes: int | None = None,
        holds: Iterable[Tensor] = (),
    ) -> None:
        """`holds` are not read, but held until it is done (an autograd node's own, until the node ends). `besides` are
        bytes that it moves of what is there anyway.
        """
        reads, writes = tuple(reads), tuple(writes)
        moved: Any = besides
        for t in (*reads, *writes):
            moved = moved + self.shapes.bytes(t)
        kernel = Compute(
            name, self._phase, flops, moved, dtype or self.dtype, shape,
            self.conventions.attention_library if attention else "", operands,
            products=products, scales=self.conventions.fp8_scales if dtype == "fp8" and shape else "tensor",
            launches=launches, calls=self.calls, expert_by_expert=self._expert_by_expert,
            element_bytes=element_bytes or ITEMSIZE[self.dtype],
        )  # fmt: skip
        self.record(name, (*reads, *holds), writes, kernel)

    def pass_over(self, name: str, *tensors: Tensor) -> None:
        """A kernel that reads such tensors and writes as much: of what is held, and for how long, it has no part."""
        self.emit(name, (), (), besides=2 * sum(self.shapes.bytes(t) for t in tensors))

    def loop(self, name: str, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], times: Any, *nodes: Node) -> None:
        """So many rounds of `nodes` as one operation, all of whose tensors are there meanwhile."""
        self.record(name, reads, writes, Repeat(times, nodes))

    def kernel(
        self,
        name: str,
        reads: Iterable[Tensor],
        like: Tensor,
        dtype: str | None = None,
        *,
        holds: Iterable[Tensor] = (),
    ) -> Tensor:
        """One memory-bound kernel that writes a new tensor shaped as `like`."""
        out = like.like(name=name, dtype=dtype or like.dtype)
        self.emit(name, reads, (out,), holds=holds)
        return out

    def frame(self, *tensors: Tensor) -> None:
        """A Python frame returns: its arguments and locals were held until here, whatever read them last."""
        self.record("return", tensors, ())

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Operations in it belong to a part of the layer that an engine's recompute, or its CUDA graphs, may name."""
        before = self._regions, self._hosted
        self._regions = (*self._regions, name)
        in_graph = self._hosted.in_graph or name in self.conventions.graphed
        self._hosted = Hosted(in_graph, (self._hosted.of_slots or name == SLOTS) and name != ROUTER)
        yield
        self._regions, self._hosted = before

    def mark(self, name: str) -> None:
        """A moment that an engine hangs something on."""
        self._append(Op(name, (), (), Mark(name)))

    def buffer(self, name: str, size: Any, category: str = "activations") -> Tensor:
        return Tensor(name, (), {}, "bool", category=category, size=size)
