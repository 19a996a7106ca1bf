"""Pictures as a transformer reads them: cut into squares, each a row of numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patches:
    """Square pictures of `image_size` pixels a side, in squares of `patch_size`, of `num_channels` numbers a pixel
    (Dosovitskiy et al. 2020, arXiv 2010.11929).
    """

    image_size: int
    patch_size: int
    num_channels: int

    @property
    def count(self) -> int:
        """Patches of a picture."""
        return int((self.image_size // self.patch_size) ** 2)

    @property
    def numbers(self) -> int:
        """Of one patch."""
        return self.num_channels * self.patch_size**2

    @property
    def seq_len(self) -> int:
        """Rows of the residual stream: the class token, and one for each patch."""
        return 1 + self.count
