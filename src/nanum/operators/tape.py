"""A tape records a forward pass, and replays it backwards.

`move` turns the reshards of `nanum.sharding` into collectives; `grad` adds up what arrives for a tensor; `run_backward`
emits the transpose. Which tensors are held when is not decided here: it is read off what each operation reads and
writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from nanum.dtypes import ITEMSIZE
from nanum.operators.exchange import carry_out
from nanum.operators.fp8 import for_other_product, quantized, sent_quantized, turned_round
from nanum.operators.recorder import Hosted, Recorder
from nanum.program import Compute, Operands
from nanum.sharding import Split, Tensor, contract, frozen, places, reshard


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
class Tape(Recorder):
    weights: list[Tensor] = field(default_factory=list)
    weight_grads: dict[Tensor, Tensor] = field(default_factory=dict)  # as backward leaves them: often a pending sum
    kept: tuple[Tensor, ...] = ()  # what the caller's frame holds to the end of the step: the loss, perhaps the logits
    seed: tuple[Tensor, ...] = ()  # the gradient of the loss itself, which lives to the end of backward
    shared: list[Shared] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)  # of the batch: there meanwhile, and held elsewhere
    _transposes: list[tuple[Callable[[], None], Hosted]] = field(default_factory=list)
    _grads: dict[Tensor, list[Tensor]] = field(default_factory=dict)
    _moved: dict[Any, Tensor] = field(default_factory=dict)
    _quantized: dict[Tensor, Tensor] = field(default_factory=dict)
    _sent_quantized: dict[Tensor, Tensor] = field(default_factory=dict)

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
            carry_out(self, m, source, what)
            source = m.after
        if new is not source:
            self.emit("slice", (source,), (new,))
        if not t.partial:
            self._moved[key] = new
        return new

    def gathered(self, t: Tensor, goal: Split) -> Tensor:
        """`t` as products of this block have read it."""
        return self.move(self._sent_quantized.get(t, t), goal)

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
        fp8 = fp8 and self.conventions.fp8 != "none"
        if fp8:
            a = sent_quantized(self, a, rule.left, self._sent_quantized)
            b = sent_quantized(self, b, rule.right, self._sent_quantized)
        a, b = self.move(a, rule.left), self.move(b, rule.right)
        out = Tensor(name, dims, rule.split, self.dtype, rule.partial, category, size=size)
        if a.dtype == "onehot":  # a look-up, not a matmul: it touches as many rows as it writes
            moved = 2 * self.shapes.bytes(out)
            self.record(name, (a, b), (out,), Compute(name, self._phase, 0.0, moved, self.dtype, calls=self.calls))
            return out
        kept_a = tuple(d for d in a.dims if d in dims)
        kept_b = tuple(d for d in b.dims if d in dims and d not in a.dims)
        summed = tuple(d for d in a.dims if d not in dims)
        split = {**b.split, **a.split}
        if fp8:
            gradient = b
            came, (a, b) = a.dtype == "fp8", (quantized(self, each, self._quantized) for each in (a, b))
            if category == "grads" and self.conventions.fp8 == "remade":
                a, b = turned_round(self, a) if came else a, for_other_product(self, b, gradient)
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

    # --- the transpose ----------------------------------------------------------------------------------------------
    def then(self, y: Tensor, transpose: Callable[[], None]) -> Tensor:
        """What makes `y`'s gradient that of what `y` was made from; none of it where nothing of that is trained."""
        if self.requires_grad(y):
            self._transposes.append((transpose, self._hosted))
        return y

    def until_backward_has_passed(self, t: Tensor) -> None:
        self._transposes.append((lambda: self.frame(t), Hosted()))

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
        for transpose, hosted in reversed(self._transposes):
            self._hosted = hosted  # a graph of the forward pass has its twin of the backward
            transpose()
        self._hosted = Hosted()

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
