"""A tape records a forward pass, and replays it backwards.

`move` turns the reshards of `nanum.sharding` into collectives; `grad` adds up what arrives for a tensor; `run_backward`
emits the transpose. Which tensors are held when is not decided here: it is read off what each operation reads and
writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from nanum.arrays import most
from nanum.collectives import wire_bytes
from nanum.conventions import Conventions, has_adapter
from nanum.dtypes import ITEMSIZE, NF4
from nanum.job import ALL, Trained
from nanum.layout import DispatchDtype, Dispatcher
from nanum.program import EXPERTS_STREAM, EXPERTS_TICKET, Collective, Compute, Mark, Node, Operands, Phase, Repeat
from nanum.sharding import Shapes, Split, Tensor, contract, frozen, places, reshard


@dataclass(frozen=True, eq=False, slots=True)
class Op:
    """One operation of one rank: `node` is what the Program says of it (nothing, for a Python frame that lets go)."""

    name: str
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    node: Compute | Collective | Mark | Repeat | None = None
    regions: tuple[str, ...] = ()  # the parts of a layer that a recompute may name, each inside the one before


def collective(
    shapes: Shapes, kind: str, axes: tuple[str, ...], before: Tensor, after: Tensor, phase: Phase, what: str
) -> Collective:
    """The Program's node for one move. Payload: the whole padded buffer of a gather or a scatter, the input of the
    others.
    """
    n = shapes.ranks(axes)
    if kind == "reduce_scatter":
        payload = shapes.first(axes).bytes(after) * n
    elif kind == "all_gather":
        payload = shapes.first(axes).bytes(before) * n
    elif kind == "all_to_all" and shapes.crowded is not None:  # the fullest rank sends or receives the most
        payload = most(shapes.bytes(before), shapes.bytes(after))
    else:
        payload = shapes.bytes(before)
    used = (n > 1) * 1
    dtype = after.dtype
    return Collective(kind, axes, phase, what, dtype, n, used, payload * used, wire_bytes(kind, payload, n))


def _order(a: Tensor, b: Tensor, summed: tuple[str, ...]) -> Operands:
    """How the operands of a product lie in memory, as BLAS says it: n where a's rows, or b's columns, are the result's.

    A linear layer's y = x W^T is nt (PyTorch stores W as [out, in]), its dx = dy W is nn, and its dW = x^T dy is tn.
    """
    first = "n" if a.dims[-1] in summed else "t"
    second = "t" if b.dims[-1] in summed else "n"
    return cast(Operands, first + second)


@dataclass(frozen=True, eq=False)
class Shared:
    """A tensor that parts share beside the stream: one makes it, others read it. `arrives` is the gradient that later
    parts left of it, if any did; it is added to `at_once`, or when this part's own is whole.
    """

    tensor: Tensor
    borrowed: bool
    arrives: Tensor | None
    at_once: bool


@dataclass
class Tape:
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
    weights: list[Tensor] = field(default_factory=list)
    weight_grads: dict[Tensor, Tensor] = field(default_factory=dict)  # as backward leaves them: often a pending sum
    kept: tuple[Tensor, ...] = ()  # what the caller's frame holds to the end of the step: the loss, perhaps the logits
    seed: tuple[Tensor, ...] = ()  # the gradient of the loss itself, which lives to the end of backward
    shared: list[Shared] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)  # of the batch: there meanwhile, and held elsewhere
    _phase: Phase = "forward"
    _transposes: list[Callable[[], None]] = field(default_factory=list)
    _grads: dict[Tensor, list[Tensor]] = field(default_factory=dict)
    _moved: dict[Any, Tensor] = field(default_factory=dict)
    _quantized: dict[Tensor, Tensor] = field(default_factory=dict)
    _regions: tuple[str, ...] = ()
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
            products=products, launches=launches, calls=self.conventions.calls,
            element_bytes=element_bytes or ITEMSIZE[self.dtype],
        )  # fmt: skip
        self._append(Op(name, (*reads, *holds), writes, kernel, self._regions))

    @property
    def phase(self) -> Phase:
        return self._phase

    def loop(self, name: str, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], times: Any, *nodes: Node) -> None:
        """So many rounds of `nodes` as one operation, all of whose tensors are there meanwhile."""
        self._append(Op(name, reads, writes, Repeat(times, nodes), self._regions))

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
        self._append(Op("return", tensors, (), regions=self._regions))

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Operations in it belong to a part of the layer that an engine's recompute may name."""
        before, self._regions = self._regions, (*self._regions, name)
        yield
        self._regions = before

    def mark(self, name: str) -> None:
        """A moment that an engine hangs something on."""
        self._append(Op(name, (), (), Mark(name)))

    def buffer(self, name: str, size: Any, category: str = "activations") -> Tensor:
        return Tensor(name, (), {}, "bool", category=category, size=size)

    # --- the rules --------------------------------------------------------------------------------------------------
    def move(
        self,
        t: Tensor,
        goal: Split,
        *,
        dtype: str | None = None,
        only: tuple[str, ...] | None = None,
        what: str | None = None,
    ) -> Tensor:
        """Reshard `t`, emitting what is exchanged; what has been moved already is used again. `what` names it for the
        ledger, where it is not told by the tensor's category.
        """
        key = t, frozen(goal), dtype, only
        if key in self._moved:
            return self._moved[key]
        new, moves = reshard(t, goal, dtype=dtype, only=only)
        source = t
        for m in moves:
            self._exchange(m.kind, m.axes, source, m.before, m.after, what)
            source = m.after
        if new is not source:
            self.emit("slice", (source,), (new,))
        if not t.partial:
            self._moved[key] = new
        return new

    def resharded(self, t: Tensor, goal: Split) -> Tensor:
        """`t` as a later operation reads it; what gradients arrive go back to the split of `t` at once."""
        y = self.move(t, goal)
        if y is t:
            return y

        def transpose() -> None:
            for g in self._grads.pop(y):
                self.add_grad(t, self.move(g, t.split))

        return self.then(y, transpose)

    def apart(self, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        """`block(x)` beside others that read `x`, or whose results' gradients are one tensor: each moves these, and
        carries out the sums of its part of the gradient, for itself.
        """
        before = dict(self._moved)

        def ends() -> None:
            self._grads[x] = [self.grad(x)]
            self._moved = self._outlives_forward(before)

        self.then(x, ends)
        y = block(x)
        own, self._moved = self._moved, before

        def begins() -> None:
            self._moved = self._outlives_forward(own)

        return self.then(y, begins)

    def exchange(
        self,
        kind: str,
        axes: tuple[str, ...],
        source: Tensor,
        after: Tensor,
        *,
        what: str = "activations",
        times: Any = 1,
    ) -> None:
        """Exchanges of buffers as they lie, `times` one after the other."""
        node = collective(self.shapes, kind, axes, source, after, self._phase, what)
        self._send(kind, (source,), (after, *self._scratch(node)), node.times(times))

    def _exchange(
        self, kind: str, axes: tuple[str, ...], source: Tensor, before: Tensor, after: Tensor, what: str | None
    ) -> None:
        what = what or (source.category if source.category in ("params", "grads") else "activations")
        node = collective(self.shapes, kind, axes, before, after, self._phase, what)
        scratch = self._scratch(node)
        of_experts = "E" in source.dims and "N" in source.dims  # slots lie as they are sent
        if not self.conventions.dtensor or kind == "all_reduce" or what in ("params", "grads") or of_experts:
            self._send(kind, (source,), (after, *scratch), node)
            return
        if kind == "all_to_all":  # the pieces for each rank lie one after the other
            self.emit("copy", (source,), (packed := source.like(),))
            self._send(kind, (packed,), (arrived := after.like(),), node)
            self.emit("copy", (arrived,), (after,))
            return
        if kind == "reduce_scatter":  # DTensor chunks a dim other than 0 into a copy
            self.emit("copy", (source,), (copy := source.like(),))
            self._send(kind, (source, copy), (after, *scratch), node)
            return
        dim = source.dims.index(places(source.split)[axes[0]])
        outer = self.shapes.elements(source.dims[:dim], source.split)
        raw = after.like(factor=(outer > 1) * 1)
        self._send(kind, (source,), (raw, *scratch), node)
        self.emit("copy", (raw,), (after,))

    def _send(self, kind: str, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], node: Collective) -> None:
        if self.conventions.tp_behind and node.axes == ("tp",) and kind in ("all_gather", "reduce_scatter"):
            node = replace(node, behind="product")
        elif self.conventions.ep_behind and kind == "all_to_all" and "ep" in node.axes:
            node = node.started(node.phase, EXPERTS_STREAM, EXPERTS_TICKET)
        self._append(Op(kind, reads, writes, node, self._regions))

    def _scratch(self, node: Collective) -> tuple[Tensor, ...]:
        """What the library that exchanges takes of its own meanwhile."""
        c = self.conventions
        if (node.kind == "all_gather" and c.gather_copies) or (node.kind == "reduce_scatter" and c.reduce_copies):
            return (self.buffer("the library's copy", node.payload_bytes),)
        return ()

    def product(
        self,
        name: str,
        a: Tensor,
        b: Tensor,
        dims: tuple[str, ...],
        want: Split,
        *,
        category: str = "activations",
        size: Any = None,
        fp8: bool = False,
    ) -> Tensor:
        """`a . b` as the rules lay it; the result may be a pending sum. A dim of both that is kept is a batch. Of `fp8`
        both are quantized first.
        """
        rule = contract(a, b, dims, want)
        a, b = self.move(a, rule.left), self.move(b, rule.right)
        out = Tensor(name, dims, rule.split, self.dtype, rule.partial, category, size=size)
        if a.dtype == "onehot":  # a look-up, not a matmul: it touches as many rows as it writes
            moved = 2 * self.shapes.bytes(out)
            self._append(Op(name, (a, b), (out,), Compute(name, self._phase, 0.0, moved, self.dtype), self._regions))
            return out
        kept_a = tuple(d for d in a.dims if d in dims)
        kept_b = tuple(d for d in b.dims if d in dims and d not in a.dims)
        summed = tuple(d for d in a.dims if d not in dims)
        split = {**b.split, **a.split}
        fp8 = fp8 and self.conventions.fp8 != "none"
        if fp8:
            a, b = self.quantized(a), self.quantized(b)
        m, n, k = (self.shapes.elements(d, split) for d in (kept_a, kept_b, summed))
        batch = tuple(d for d in kept_a if d in b.dims)
        products = self.shapes.elements(batch, split)
        c = self.conventions  # a product that adds to what is resident reads and writes it
        of_buffer = ITEMSIZE[self.dtype] if c.adds_apart else 2 * ITEMSIZE[c.numerics.grad_dtype]
        element_bytes = ITEMSIZE[self.dtype] if size is None else of_buffer
        self.emit(
            name, (a, b), (out,), 2.0 * m * n * k, (m, n, k), operands=_order(a, b, summed),
            dtype="fp8" if fp8 else None, products=products,
            launches=products if c.experts_apart and batch == ("E",) else 1, element_bytes=element_bytes,
            besides=0 if size is None else self.shapes.elements(dims, rule.split) * element_bytes,
        )  # fmt: skip
        return out

    def quantized(self, t: Tensor) -> Tensor:
        """In fp8, as each side of a product reads it. Weights are quantized wherever they are used, unless they were
        before they were gathered: then backward, where nothing was kept for it, lays them the other way round for its
        product (torchao, float8_ops.py: `preprocess_addmm`; Transformer Engine does once, when they are gathered).
        The scale of what is `remade` (torchao's dynamic scaling, float8_scaling_utils.py) is of the whole tensor.
        Where inputs are `kept` (Transformer Engine), weights are quantized once, in the first micro-batch, which is not
        counted, and activations by rows and by columns: by the norm that makes them, or by a kernel of their own.
        """
        if t.category == "params" and t.dtype == "fp8":
            turned = self._phase == "backward" and self.conventions.fp8 == "remade"
            return self.kernel("transpose", (t,), t.like(size=None), "fp8") if turned else t
        if t.dtype in ("fp8", "mxfp8"):
            return t
        if t not in self._quantized or t.category == "params":
            out = self._quantized[t] = t.like(name="quantize", size=None, dtype="fp8")
            moved: Any = self.shapes.bytes(out)
            if self.conventions.fp8 == "remade":  # read for its largest value, and again to be scaled by that
                moved = moved + 2 * self.shapes.bytes(t)
            elif t.category == "params":
                moved = 0 * moved
            else:  # by rows and by columns
                moved = 2 * moved + self.shapes.bytes(t) * (not self._of_norm(t))
            self._append(
                Op("quantize", (t,), (out,), Compute("quantize", self._phase, 0.0, moved, self.dtype), self._regions)
            )
        return self._quantized[t]

    def _of_norm(self, t: Tensor) -> bool:
        """Has a norm made it, whatever it was exchanged since?"""
        made = next((op for op in reversed(self.forward) if t in op.writes), None)
        if made is not None and isinstance(made.node, Collective):
            return self._of_norm(made.reads[0])
        return made is not None and "norm" in made.name

    # --- the transpose ----------------------------------------------------------------------------------------------
    def then(self, y: Tensor, transpose: Callable[[], None]) -> Tensor:
        """What makes `y`'s gradient that of what `y` was made from; none of it where nothing of that is trained."""
        if self.requires_grad(y):
            self._transposes.append(transpose)
        return y

    def until_backward_has_passed(self, t: Tensor) -> None:
        self._transposes.append(lambda: self.frame(t))

    def add_grad(self, t: Tensor, g: Tensor) -> None:
        """Autograd adds gradients as they arrive; pending sums of another kind wait for `grad`."""
        if not self.requires_grad(t):
            return
        arrived = self._grads.setdefault(t, [])
        for i, h in enumerate(arrived):
            if (h.split, h.partial) == (g.split, g.partial):
                arrived[i] = self._add(h, g)
                return
        arrived.append(g)

    def grad(self, t: Tensor) -> Tensor:
        """The gradient of `t`, in t's own layout. Sums are linear: pending ones were added first, and are carried out
        once.
        """
        moved = [self.move(g, t.split) for g in self._grads.pop(t)]
        total = moved[0]
        for g in moved[1:]:
            total = self._add(total, g)
        return total

    def share(self, t: Tensor, arrives: Tensor | None, *, borrowed: bool, at_once: bool = True) -> Tensor:
        """`t` is made here for later parts too or, `borrowed`, was made by an earlier one."""
        self.shared.append(Shared(t, borrowed, arrives, at_once))
        if borrowed:
            self.require_grad(t)
        return t

    def begin_shared(self) -> None:
        """Before backward: what has arrived of gradients, where this part's own are added to it."""
        for s in self.shared:
            if s.arrives is not None and s.at_once:
                self.add_grad(s.tensor, s.arrives)

    def end_shared(self) -> tuple[Tensor, ...]:
        """After backward: the gradients of what was borrowed, as they are handed on."""
        found = []
        for s in self.shared:
            if s.borrowed:
                g = self.grad(s.tensor) if "B" in s.tensor.dims else self.pending(s.tensor)
                found.append(g if s.arrives is None or s.at_once else self._add(s.arrives, g))
        return tuple(found)

    def pending(self, t: Tensor) -> Tensor:
        """The gradient that has arrived for `t`, as it is: perhaps a sum not yet carried out."""
        (g,) = self._grads.pop(t)
        return g

    def _add(self, g: Tensor, h: Tensor) -> Tensor:
        self.emit("add", (g, h), (out := g.like(),))
        return out

    def set_weight_grad(self, w: Tensor, dw: Tensor) -> None:
        """Sums over tp (of norm weights under sequence parallelism) are carried out now, or left pending, as the engine
        does.
        """
        if not self.requires_grad(w):
            return
        if self.conventions.tp_grads_at_once:
            dw = self.move(dw, dw.split, only=("tp",))
        if w in self.weight_grads:  # of a weight that is used again, they are added up
            self.emit("add", (self.weight_grads[w], dw), ())
        else:
            self.weight_grads[w] = dw

    def run_backward(self) -> None:
        """Emit the transpose."""
        self._phase = "backward"
        if self.conventions.fp8 != "kept":
            self._quantized.clear()
        self._moved = self._outlives_forward(self._moved)
        for transpose in reversed(self._transposes):
            transpose()

    def _outlives_forward(self, moved: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """What forward gathered is used again, unless the engine keeps only the shard (of all but the slots of
        experts).
        """
        if not self.conventions.regather:
            return moved
        return {
            k: new
            for k, new in moved.items()
            if "N" in k[0].dims or not places(k[0].split).keys() - places(new.split).keys()
        }

    # --- weights ----------------------------------------------------------------------------------------------------
    def weight(
        self,
        name: str,
        dims: tuple[str, ...],
        split: Split | None = None,
        stays: tuple[str, ...] | None = None,
        *,
        dtype: str | None = None,
        trained: bool | None = None,
    ) -> Tensor:
        """A parameter as it is computed with: split over its model axes only, or whole in a module that they divide. It
        is `trained` as the model's own weights are, unless that is said.
        """
        split = split or {}
        axes = tuple(places(split)) if stays is None else stays
        w = Tensor(name, dims, split, dtype or self.dtype, category="params", stays=axes)
        self.weights.append(w)
        if self.own_trained if trained is None else trained:
            self.require_grad(w)
        return w

    def grad_of_weight(self, w: Tensor, over: Tensor, dims: tuple[str, ...] = ("B", "S")) -> Tensor:
        """An unreduced gradient of a weight that every token used and no matmul made: a pending sum over the axes that
        split `over`'s tokens, or the dims named.
        """
        axes = tuple(a for d in dims for a in over.split.get(d, ()) if a not in places(w.split))
        return Tensor("d_" + w.name, w.dims, w.split, self.dtype, axes, "grads")

    @property
    def accumulated(self) -> Any:
        """Where matmuls add into a resident gradient buffer, a weight's gradient takes no bytes of its own."""
        return 0 if self.conventions.grads_resident else None
