"""What the lesson prints with: titles, paragraphs and tables in one language, at 80 columns or more."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nanum.lesson.words import Words


@dataclass(frozen=True)
class Page:
    say: Words
    console: Console

    def title(self, key: str) -> None:
        self.console.print()
        self.console.print(Text(self.say(key), style="bold"))

    def paragraph(self, key: str, **fields: object) -> None:
        self.console.print()
        self.console.print(Text(self.say(key, **fields)))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
        """A table of texts; the columns whose places are in `right` are numbers."""
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
        for place, name in enumerate(columns):
            table.add_column(Text(name), justify="right" if place in right else "left")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self.console.print()
        self.console.print(Padding(table, (0, 0, 0, 2), expand=False))
