"""What an optimizer keeps of each tensor that it updates.

Bytes are of one tensor, or of one rank's shard of it: a factored second moment, or one in blocks, is no number a
parameter. Shapes are ints, or arrays over layouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from nanum.arrays import least, most, where
from nanum.dtypes import ITEMSIZE
from nanum.job import Optimizer
from nanum.program import Compute, Held, Node, Operands

BLOCK = 256
"""Elements of a quantized state that share a scale (bitsandbytes 95f9af3, optim/optimizer.py: `blocksize`)."""
LEAST_QUANTIZED = 4096
"""Elements below which a tensor's states stay fp32 (the same: `min_8bit_size`)."""
NEWTON_SCHULZ_STEPS = 5
COUNTER_BYTES = 4
"""PyTorch's count of steps, a tensor for each parameter (torch/optim/adamw.py, _adafactor.py; SGD and Muon have
none)."""

ELEMENTWISE: tuple[Optimizer, ...] = ("adamw", "adamw-bf16", "sgd", "lion")
"""Optimizers of which a flat buffer may be cut anywhere: an element's states are its own."""
_COUNTED: tuple[Optimizer, ...] = ("adamw", "adamw-bf16", "adafactor")
TABLES = frozenset({"V", "P", "types", "one", "buckets"})
"""Dims whose rows are looked up: tokens and positions, or one row that is learned, or distances."""


def is_hidden_matrix(dims: tuple[str, ...]) -> bool:
    """Is it a matrix between activations? Muon is for these; embeddings, the head, norms and biases have AdamW (Jordan
    et al. 2024, kellerjordan.github.io/posts/muon).
    """
    return len(dims) > 1 and not TABLES & {*dims}


@dataclass(frozen=True)
class States:
    """The states that an engine's optimizer keeps. `dtype` is that of what it updates, in which a state is kept that
    has no dtype of its own; `masters` are fp32 copies of the parameters, and are what is then updated.

    - adamw: two moments (Loshchilov and Hutter 2019); adamw-bf16: the same in bf16;
    - adamw-8bit: two moments of a byte each, with an fp32 scale for each block (Dettmers et al. 2022;
      bitsandbytes.optim.AdamW8bit);
    - sgd: one momentum; lion: one momentum (Chen et al. 2023, algorithm 2);
    - adafactor: of a matrix the second moment's sums over rows and over columns, of a vector all of it, and no first
      moment (Shazeer and Stern 2018; torch.optim.Adafactor);
    - muon: one momentum for a matrix between activations, AdamW's two for the rest (torch.optim.Muon).
    """

    optimizer: Optimizer
    dtype: str
    masters: bool = False
    counters: bool = False

    def bytes(self, dims: tuple[str, ...], shape: Iterable[Any]) -> Any:
        """Of one tensor of these dims, of which this rank updates `shape`; counters aside."""
        shape = tuple(shape)
        elements = prod(shape)
        return self._moments(dims, shape, elements) + (ITEMSIZE["fp32"] * elements if self.masters else 0)

    def _moments(self, dims: tuple[str, ...], shape: tuple[Any, ...], elements: Any) -> Any:
        each = ITEMSIZE["bf16" if self.optimizer == "adamw-bf16" else self.dtype]
        if self.optimizer == "adamw-8bit":
            scales = ITEMSIZE["fp32"] * -(-elements // BLOCK)
            return 2 * where(elements < LEAST_QUANTIZED, ITEMSIZE["fp32"] * elements, elements + scales)
        if self.optimizer == "adafactor" and len(shape) > 1:
            *several, rows, columns = shape
            return each * prod(several) * (rows + columns)
        one = self.optimizer in ("sgd", "lion", "adafactor") or (self.optimizer == "muon" and is_hidden_matrix(dims))
        return each * elements if one else 2 * each * elements

    def each(self) -> int:
        """Bytes for each element of a flat buffer.

        Raises:
            ValueError: an element's states are not its own.
        """
        if self.optimizer not in ELEMENTWISE:
            raise ValueError(f"{self.optimizer} keeps no states that can be cut element by element")
        return int(self.bytes(("flat",), (1,)))

    def of_vectors(self, elements: Any, matrix_elements: Any) -> Any:
        """Of a rank's share of flat weights where the optimizer sees that share as one vector or, with Muon, as one of
        matrices' elements and one of the others'.
        """
        if self.optimizer != "muon":
            return self.bytes(("flat",), (elements,))
        return self.bytes(("F", "D"), (matrix_elements,)) + self.bytes(("flat",), (elements - matrix_elements,))

    def scratch_bytes(self, elements: Any, largest: Any, in_turn: Any, *, fused: bool, at_once: bool) -> Any:
        """What the update makes beside its states, of so many elements and of the largest tensor's: AdamW the roots of
        its second moments, of all tensors at once, or tensor by tensor (`in_turn` elements at the most: twice one's, as
        a root and what is made of it, and once those of the one before, whose name is still bound), and nothing where
        one kernel does it all (torch/optim/adamw.py: `_multi_tensor_adam`, `_single_tensor_adam`); Lion and Adafactor
        an update of one tensor. Muon's is `newton_schulz`'s.
        """
        each = ITEMSIZE["bf16" if self.optimizer == "adamw-bf16" else self.dtype]
        if self.optimizer in ("lion", "adafactor"):
            return each * largest
        if fused or self.optimizer in ("adamw-8bit", "muon"):
            return 0
        return each * (elements if at_once else in_turn)

    def counter_bytes(self, dims: tuple[str, ...]) -> int:
        """Of one tensor's count of steps."""
        has = self.optimizer in _COUNTED or (self.optimizer == "muon" and not is_hidden_matrix(dims))
        return COUNTER_BYTES * (self.counters and has)


def newton_schulz(shape: tuple[Any, Any]) -> tuple[Node, ...]:
    """Muon's work on one matrix: five times X X^T, its square, and their product with X, in bf16 (torch.optim.Muon:
    `_zeropower_via_newtonschulz`). Of m rows and n >= m columns, once transposed: 2m^2n + 2m^3 + 2m^2n FLOPs. X is
    there twice meanwhile, and so is the product of m rows and columns.
    """
    m, n = least(*shape), most(*shape)
    small, large = ITEMSIZE["bf16"] * m * m, ITEMSIZE["bf16"] * m * n

    def product(columns: Any, depth: Any, moved: Any, operands: Operands) -> Compute:
        flops = 2.0 * m * columns * depth
        return Compute("newton_schulz", "optimizer", flops, moved, "bf16", (m, columns, depth), operands=operands)

    once = (
        product(m, n, 2 * large + small, "nt"),
        product(m, m, 3 * small, "nn"),
        product(n, m, 2 * large + small, "nn"),
    )
    scratch = 2 * (large + small)
    held, released = Held("buffers", scratch, "Newton-Schulz"), Held("buffers", -scratch)
    return (held, *once * NEWTON_SCHULZ_STEPS, released)
