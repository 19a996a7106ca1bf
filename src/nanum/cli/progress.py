"""A progress bar for what takes over a second: on stderr, on a terminal only, and not before that second has passed."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

PATIENCE_SECONDS = 1.0


class Progress:
    """Call it with how much is done, how much there is and, where it changes, what it is at.

    Use it as a context manager, so that the bar goes away.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._start_seconds = time.monotonic()
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        return self

    def __call__(self, done: int, total: int, what: str = "", /) -> None:
        if self._bar is None:
            if not sys.stderr.isatty() or time.monotonic() - self._start_seconds < PATIENCE_SECONDS:
                return
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._what, total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total, description=what or self._what)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
