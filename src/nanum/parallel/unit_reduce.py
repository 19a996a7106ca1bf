"""What FSDP2 does with a unit's gradients when its backward has ended: they are added up, or reduced, and its gathered
parameters go.

After a unit's backward its parameters go, then the previous reduction's input, then this one's comes, then the
unreduced gradients go (the last of them only after the reduction is issued) and the shard, which is `.grad`, comes
(PyTorch 2.13, `_fsdp_param_group.py`: `post_backward`; `_fsdp_collectives.py`: `foreach_reduce`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanum.conventions import Conventions
from nanum.dtypes import ITEMSIZE
from nanum.layout import Structure
from nanum.once import Once
from nanum.parallel.chain import Half, copy
from nanum.parallel.on_host import shard_grads_down
from nanum.parallel.units import Unit, as_dtype
from nanum.program import DATA_STREAM, Compute, Held, Node, Wait


@dataclass(frozen=True, eq=False)
class UnitReduce:
    """Reductions of units whose shards are on the device or, if one `offloads`, in the host's memory."""

    conventions: Conventions
    structure: Structure
    offloads: bool
    made: Once[tuple[Node, ...]]

    @property
    def defers(self) -> bool:
        """Are gradients reduced in the last backward only, and added up unsharded before it?"""
        return self.structure.pipelined or self.structure.grad_sync == "last" or self.conventions.syncs_last

    @property
    def adds_in_place(self) -> bool:
        """Are later gradients added into unsharded ones by backward itself, both being in the dtype of the reduction?
        (`_fsdp_param.py`: `to_accumulated_grad_if_needed`.)
        """
        n = self.conventions.numerics
        return self.defers and n.compute_dtype == n.grad_dtype

    def after_backward(self, u: Unit, released: Any, *, first: bool, reduces: bool, half: Half) -> list[Node]:
        """A unit's backward has ended. `released` are bytes of the reduction's input before, or None where that is not
        waited for; `first` says that there are no gradients yet, and `half` which half of backward leaves them.
        """
        n = self.conventions.numerics
        grad = ITEMSIZE[n.grad_dtype]
        added = self.adds_in_place and not first
        sums = u.grads_bytes // ITEMSIZE[n.compute_dtype] * grad  # all that gradients are views into is made wider
        nodes: list[Node] = []
        if reduces or not self.structure.pipelined:
            nodes.append(Held("params", -u.weights_bytes))  # resharded
        if not reduces:
            nodes.append(copy("accumulate", "backward", u.elements * grad, n.grad_dtype))
            if self.adds_in_place:
                return [*nodes, Held("grads", -u.grads_bytes)] if added and half == "weight" else nodes
            if first:  # one after the other is made wider: the last one is there beside all of them
                nodes.append(Held("grads", sums + u.last_grad_bytes - u.grads_bytes, "unsharded sums"))
            return [*nodes, Held("grads", -(u.last_grad_bytes if first else u.grads_bytes))]
        if released is not None:
            nodes += [Wait(DATA_STREAM, "reduce"), Held("buffers", -released)]
        gradients, last = u.grads_bytes, u.last_grad_bytes
        if added:
            nodes.append(copy("accumulate", "backward", u.elements * grad, n.grad_dtype))
            nodes += [Held("grads", -gradients)] if half == "weight" else []
        elif self.defers and not first:  # the unsharded sums are what is reduced
            nodes += [copy("accumulate", "backward", u.elements * grad, n.grad_dtype), Held("grads", -gradients)]
            gradients, last = sums, u.last_grad_bytes * 0
        if u.tp_sum is not None:  # of what backward left or, in the dtype of the reduction, of what was added up
            nodes.append(as_dtype(u.tp_sum, n.compute_dtype) if first else u.tp_sum)
        return [*nodes, *self._reduced(u, gradients, last, first=first)]

    def _reduced(self, u: Unit, gradients: Any, last: Any, *, first: bool) -> list[Node]:
        """The reduction of so many bytes of `gradients`, of which the `last` one is held until it is issued."""
        n = self.conventions.numerics
        nodes: list[Node] = [
            Held("buffers", u.reduce_bytes, "input of the reduction"),
            Compute("copy_in", "backward", 0.0, gradients + u.reduce_bytes, n.grad_dtype),
            Held("grads", last - gradients),
            Held("grads", u.shard_bytes, "sharded gradients", apart=True),
        ]
        if self.conventions.reduce_copies:
            nodes.append(Held("buffers", u.reduce_bytes, "gloo's copy"))
        nodes += self.made(("reduce", u), lambda: tuple(c.started("backward", DATA_STREAM, "reduce") for c in u.reduce))
        nodes.append(Held("grads", -last))
        if self.conventions.reduce_copies:
            nodes.append(Held("buffers", -u.reduce_bytes))
        if self.offloads:
            nodes += shard_grads_down(u, self.conventions, adds=not first and not self.defers)
        elif not first and not self.defers:  # added into the shard that is there
            nodes += [
                copy("accumulate", "backward", u.shard_bytes, n.grad_dtype),
                Held("grads", -u.shard_bytes, apart=True),
            ]
        return nodes
