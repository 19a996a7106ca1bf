"""Tables and lines that fit a terminal of 80 columns, and a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Document = Mapping[str, Any]
Row = Sequence[str | Text]


def print_table(
    console: Console, headings: Row | None, rows: Iterable[Row], words: int, last_is_words: bool = False
) -> None:
    """The first `words` columns are words, which wrap; the others are numbers, which do not."""
    all_rows = list(rows)
    table = Table(
        box=box.SIMPLE_HEAD, show_header=headings is not None, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0)
    )
    for i in range(len(all_rows[0]) if all_rows else len(headings or ())):
        is_words = i < words or (last_is_words and i == len(all_rows[0]) - 1)
        heading = headings[i] if headings else ""
        if is_words:
            table.add_column(heading, overflow="fold")
        else:
            widest = max((len(row[i]) for row in all_rows), default=0)
            table.add_column(heading, justify="right", min_width=widest, overflow="fold")
    for row in all_rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    console.print(table)


def title(console: Console, words: str) -> None:
    console.print()
    console.print(Text(words, "bold"))


def say(console: Console, words: str | Text, style: str = "") -> None:
    console.print(words if isinstance(words, Text) else Text(words, style))


def print_list(console: Console, heading: str, lines: Iterable[str]) -> None:
    all_lines = list(lines)
    if not all_lines:
        return
    title(console, heading)
    grid = Table.grid(padding=(0, 1))
    for line in all_lines:
        grid.add_row(Text("-"), Text(line))
    console.print(grid)
