"""A number of a chip or a link, and how it is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tag = Literal["datasheet", "measured", "assumed", "derived"]
LONGEST_SOURCE = 1000
"""Characters of it, in a cluster's file."""


@dataclass(frozen=True)
class Quantity:
    """`value` in the SI unit that the field's name ends with."""

    value: float
    tag: Tag
    source: str
