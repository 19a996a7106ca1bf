"""Tables and lines that fit a terminal, and a pipe of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2  # cells between columns: the box's own, and a padding
NARROW_WORDS, NARROWEST_WORDS = 14, 6
"""Cells of a column of words that are kept before headings of numbers wrap, and after that."""
Document = Mapping[str, Any]
Row = Sequence[str | Text]


def print_table(
    console: Console, headings: Row | None, rows: Iterable[Row], words: int, last_is_words: bool = False
) -> None:
    """The first `words` columns are words, which wrap; the others are numbers, which do not. Where a terminal is too
    narrow for these, the table is wider than it.
    """
    all_rows = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    count = len(all_rows[0]) if all_rows else len(headings or ())
    of_words = [i < words or (last_is_words and i == count - 1) for i in range(count)]
    cells = [max((_width(row[i]) for row in all_rows), default=0) for i in range(count)]
    wanted = [max(width, _width(headings[i]) if headings else 0) for i, width in enumerate(cells)]
    widths = _widths(wanted, cells, of_words, console.width - GAP * (count - 1))
    table = Table(
        box=box.SIMPLE_HEAD,
        show_header=headings is not None,
        pad_edge=False,
        show_edge=False,
        padding=(0, GAP - 1, 0, 0),
        width=sum(widths) + GAP * (count - 1),
    )
    for i, width in enumerate(widths):
        heading = headings[i] if headings else ""
        table.add_column(heading, justify="left" if of_words[i] else "right", width=width, overflow="fold")
    for row in all_rows:
        table.add_row(*row)
    console.print(table, crop=False)


def _width(cell: str | Text) -> int:
    """Of its longest line."""
    return max((cell_len(line) for line in str(cell).split("\n")), default=0)


def _widths(wanted: Sequence[int], cells: Sequence[int], of_words: Sequence[bool], room: int) -> list[int]:
    """Of each column. Where not all have what they want, words wrap first, the longest column first; then headings of
    numbers do; then words do once more.
    """
    widths = list(wanted)
    columns = list(zip(wanted, cells, of_words, strict=True))
    _narrow(widths, [min(width, NARROW_WORDS) if word else width for width, _, word in columns], room)
    _narrow(widths, [min(width, NARROW_WORDS) if word else max(cell, 1) for width, cell, word in columns], room)
    _narrow(widths, [min(width, NARROWEST_WORDS) if word else max(cell, 1) for width, cell, word in columns], room)
    return widths


def _narrow(widths: list[int], least: Sequence[int], room: int) -> None:
    """Take from the widest column that is wider than its least, until all fit or none is."""
    while sum(widths) > room and (wider := [i for i in range(len(widths)) if widths[i] > least[i]]):
        widths[max(wider, key=lambda i: widths[i])] -= 1


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
