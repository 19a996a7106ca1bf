"""What is worked out once for the same things: nodes, bodies and arrays, which can be told apart only by identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """A memory of results by the identities of what they were made of, which is kept with them: an identity is only
    one's own while one lives. Where it may hold `at_most` so many, the oldest goes first.
    """

    def __init__(self, at_most: int | None = None) -> None:
        self._at_most = at_most
        self._kept: dict[tuple[int, ...], tuple[tuple[object, ...], T]] = {}

    def __call__(self, made_of: tuple[object, ...], make: Callable[[], T]) -> T:
        """The result for `made_of`, which `make` gives where there is none yet."""
        key = tuple(map(id, made_of))
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = made_of, make()
            if self._at_most is not None and len(self._kept) > self._at_most:
                del self._kept[next(iter(self._kept))]
        return found[1]
