"""Weights that every data rank has whole, and whose gradients nobody exchanges: one data rank, under plain PyTorch.

A gradient is what backward leaves: the first micro-batch's is kept as `.grad`, later ones are added into it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nanum.conventions import ITEMSIZE, Conventions
from nanum.parallel.chain import Chain, Half, Place, copy
from nanum.parallel.units import Unit, roots_bytes
from nanum.program import Compute, Held, Node, Repeat


@dataclass(frozen=True, eq=False)
class Replicated:
    chain: Chain
    conventions: Conventions
    embedding: Unit
    layer: Unit
    head: Unit

    def _total(self, field: str) -> Any:
        return self.chain.total(field, self.embedding, self.layer, self.head)

    def resident(self) -> list[Node]:
        n, elements = self.conventions.numerics, self._total("elements")
        states = elements * n.state_bytes + self._total("tensors") * n.state_bytes_per_tensor
        return [
            Held("params", elements * ITEMSIZE[n.param_dtype], "parameters"),
            Held("optimizer_states", states, "optimizer states"),
        ]

    def forward(self, *, gathers: bool, first: bool) -> list[Node]:
        return self.chain.forward(lambda place: ([], []), [])

    def backward(self, *, gathers: bool, first: bool, last: bool, half: Half = "whole") -> list[Node]:
        def around(place: Place) -> tuple[list[Node], list[Node]]:
            size = {"embedding": self.embedding, "head": self.head}.get(place, self.layer).grads_bytes
            if first or half == "input":
                return [], []
            added = copy("accumulate", "backward", size, self.conventions.numerics.compute_dtype)
            if half == "whole" and self.chain.adds_at_once(place):
                return [], [added]
            return [], [added, Held("grads", -size)]

        return self.chain.backward([], around, half, adds=not first)

    def optimizer(self) -> list[Node]:
        n, elements = self.conventions.numerics, self._total("elements")
        grads = self._total("grads_bytes")
        largest = self.chain.largest("largest_elements", self.embedding, self.layer, self.head)
        copies = roots_bytes(self.conventions, elements, largest)
        sums = [
            Repeat(count * self.conventions.optimizer_sums, (replace(u.tp_sum, phase="optimizer"),))
            for u, count in ((self.embedding, 1), (self.layer, self.chain.stage.layers), (self.head, 1))
            if u.tp_sum is not None
        ]
        moved = 2 * elements * (ITEMSIZE[n.param_dtype] + n.state_bytes) + grads
        return [
            *sums,
            Held("buffers", copies, "the optimizer's roots"),
            Compute("optimizer", "optimizer", 0.0, moved, n.param_dtype),
            Held("buffers", -copies),
            Held("grads", -grads),
        ]

    def same_forward(self, *, gathers: bool, first: bool) -> tuple[Any, ...]:
        return ("F",)

    def same_backward(self, *, gathers: bool, first: bool, last: bool) -> tuple[Any, ...]:
        return ("B", first)
