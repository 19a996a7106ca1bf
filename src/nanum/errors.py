"""What is raised when a question cannot be asked, or was asked and its run failed."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST_WORD = 80  # characters of a user's word that a reason repeats
LONGEST_NAME = 200  # characters of what a file names: a cluster, a chip, a model


class Refused(ValueError):
    """A question that cannot be asked, with every reason at once, in the user's words."""

    reasons: tuple[str, ...]

    def __init__(self, reasons: Iterable[str] | str) -> None:
        self.reasons = (reasons,) if isinstance(reasons, str) else tuple(reasons)
        super().__init__(self.reasons)

    def __str__(self) -> str:
        return "\n".join(self.reasons)


class RunFailed(RuntimeError):
    """A run that was started and did not end well; its text says how, to a person. No bug of nanum's: bad news."""


def printable(word: str) -> str:
    """A user's word on one line: he may have written what would break it, or move a terminal's cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in word)


def cut_short(word: str, longest: int = LONGEST_WORD) -> str:
    """A user's word as a reason repeats it: not longer than a line."""
    return word if len(word) <= longest else f"{word[: longest - 1]}…"
