"""The one error a user can cause: a question that cannot be asked."""

from __future__ import annotations

from collections.abc import Iterable


class Refused(ValueError):
    """Carries every reason at once, each a sentence in the user's own words."""

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = (reasons,) if isinstance(reasons, str) else tuple(reasons)
        super().__init__("\n".join(self.reasons))
