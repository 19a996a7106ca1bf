"""What is raised when a question cannot be asked."""

from __future__ import annotations

from collections.abc import Iterable


class Refused(ValueError):
    """A question that cannot be asked, with every reason at once, in the user's words."""

    reasons: tuple[str, ...]

    def __init__(self, reasons: Iterable[str] | str) -> None:
        self.reasons = (reasons,) if isinstance(reasons, str) else tuple(reasons)
        super().__init__(self.reasons)

    def __str__(self) -> str:
        return "\n".join(self.reasons)
