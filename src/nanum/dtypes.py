"""How many bytes an element takes."""

from __future__ import annotations

from typing import Any, Literal

ITEMSIZE = {
    "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "mxfp8": 1, "int64": 8, "uint8": 1, "bool": 1, "onehot": 0, "number": 8,
}  # fmt: skip
"""Bytes of one element. A one-hot operand (token ids) is never materialised; a number that multiplies a tensor is
one of its own to autograd, and not to a checkpoint."""

MXFP8_BLOCK = 32
"""Elements that share a scale of 8 bits (OCP Microscaling Formats, version 1.0, section 5.2). DeepSeek's fp8 has an
fp32 scale for each 128: as many bytes."""
Scales = Literal["tensor", "rows", "blocks"]
"""Of an fp8 product's operand: one for all of it, one for each row of what is summed, or one for each block (MXFP8)."""
NF4 = "nf4"
NF4_BLOCK, NF4_SCALES = 64, 256
"""Elements that share a scale, and scales that share a scale of theirs (QLoRA, arXiv 2305.14314, section 3)."""


def bytes_of(elements: Any, dtype: str) -> Any:
    """Of so many elements. MXFP8 has a scale for each block beside them. NF4 takes 4 bits each, a scale of 8 bits for
    each block, and an fp32 one for each 256 of these: 8/64 + 32/(64 * 256) = 0.127 bits more, as the paper counts them.
    """
    if dtype == "mxfp8":
        return elements + -(-elements // MXFP8_BLOCK)
    if dtype != NF4:
        return elements * ITEMSIZE[dtype]
    return -(-elements // 2) + -(-elements // NF4_BLOCK) + 4 * -(-elements // (NF4_BLOCK * NF4_SCALES))
