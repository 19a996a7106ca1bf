"""Tables and lines that fit a terminal, and a pipe of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2  # cells between columns: the box's own, and a padding
NARROW_WORDS, LEAST_WORDS = 14, 10
"""Cells of a column of words that are kept before headings of numbers wrap, and after that."""
KEPT = "\N{NO-BREAK SPACE}"
Document = Mapping[str, Any]
Row = Sequence[str | Text]


def print_table(
    console: Console,
    headings: Row | None,
    rows: Iterable[Row],
    words: int,
    last_is_words: bool = False,
    names: Iterable[str] | None = None,
) -> None:
    """The first `words` columns are words, which wrap; the others are numbers, which do not. Each of `names` stands
    above its row, whole, however long. Where a terminal is too narrow for the columns, the widest words stand above
    their row too, and where it is too narrow for numbers alone, each row is told with its headings between.
    """
    all_rows = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    count = len(all_rows[0]) if all_rows else len(headings or ())
    of_words = [i < words or (last_is_words and i == count - 1) for i in range(count)]
    table = _Columns(headings, all_rows, of_words)
    above = None if names is None else [Text(name) for name in names]
    whole = above is not None
    if above is None and not table.fits(console.width) and any(of_words) and count > 1:
        widest = max((i for i in range(count) if of_words[i]), key=lambda i: table.wanted[i])
        above, table = [row[widest] for row in all_rows], table.without(widest)
    if not table.fits(console.width):
        _tell(console, table, above, whole=whole)
    elif above is None:
        console.print(table.made(console.width, all_rows, heads=True), crop=False)
    else:
        console.print(table.made(console.width, (), heads=True), crop=False)
        for name, row in zip(above, table.rows, strict=True):
            if name:  # a row under the heading of the one above has none
                console.print(name, soft_wrap=whole)
            console.print(table.made(console.width, [row], heads=False), crop=False)


@dataclass(frozen=True)
class _Columns:
    headings: Row | None
    rows: Sequence[Sequence[Text]]
    of_words: Sequence[bool]

    def without(self, i: int) -> _Columns:
        headings = None if self.headings is None else (*self.headings[:i], *self.headings[i + 1 :])
        rows = [[*row[:i], *row[i + 1 :]] for row in self.rows]
        return _Columns(headings, rows, [*self.of_words[:i], *self.of_words[i + 1 :]])

    @cached_property
    def cells(self) -> list[int]:
        """What each column needs for its cells."""
        return [max((_width(row[i]) for row in self.rows), default=0) for i in range(len(self.of_words))]

    @cached_property
    def wanted(self) -> list[int]:
        """And for its heading too, unwrapped."""
        heads = self.headings or ("",) * len(self.cells)
        return [max(width, _width(heading)) for width, heading in zip(self.cells, heads, strict=True)]

    @cached_property
    def least(self) -> list[int]:
        """What each can be narrowed to: words wrap, and headings between their words."""
        heads = self.headings or ("",) * len(self.cells)
        runs = [max((cell_len(run) for run in str(heading).split()), default=1) for heading in heads]
        return [
            max(min(cell, LEAST_WORDS) if words else cell, run)
            for cell, run, words in zip(self.cells, runs, self.of_words, strict=True)
        ]

    def fits(self, columns: int) -> bool:
        return sum(self.least) + GAP * (len(self.least) - 1) <= columns

    def widths(self, columns: int) -> list[int]:
        """Of each column. Where not all have what they want, words wrap first, the longest column first; then headings
        of numbers do; then words do once more.
        """
        widths = list(self.wanted)
        room = columns - GAP * (len(widths) - 1)
        for words in ((NARROW_WORDS, None), (NARROW_WORDS, 0), (LEAST_WORDS, 0)):
            kept = zip(self.wanted, self.least, self.of_words, strict=True)
            _narrow(widths, [_kept(*each, *words) for each in kept], room)
        return widths

    def made(self, columns: int, rows: Iterable[Sequence[Text]], *, heads: bool) -> Table:
        widths = self.widths(columns)
        table = Table(
            box=box.SIMPLE_HEAD,
            show_header=heads and self.headings is not None,
            pad_edge=False,
            show_edge=False,
            padding=(0, GAP - 1, 0, 0),
            width=sum(widths) + GAP * (len(widths) - 1),
        )
        for i, width in enumerate(widths):
            heading = self.headings[i] if self.headings else ""
            table.add_column(heading, justify="left" if self.of_words[i] else "right", width=width, overflow="fold")
        for row in rows:
            table.add_row(*row)
        return table


def _kept(wanted: int, least: int, words: bool, of_words: int, of_headings: int | None) -> int:
    """What a column keeps in one round of narrowing: so much of words, and all of a heading where that is None."""
    if words:
        return max(min(wanted, of_words), least)
    return wanted if of_headings is None else least


def _tell(console: Console, table: _Columns, above: Sequence[Text] | None, *, whole: bool) -> None:
    """Each row with its headings between, and its name above."""
    wrap = textwrap.TextWrapper(
        console.width,
        initial_indent="" if above is None else "  ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    heads = [_line(heading, "-\n", "") for heading in table.headings or [""] * len(table.of_words)]
    for i, row in enumerate(table.rows):
        if above is not None:
            console.print(above[i], soft_wrap=whole)
        cells = [_line(cell, "\n", ", ") for cell in row]
        told = "; ".join(f"{head} {cell}".strip() for head, cell in zip(heads, cells, strict=True) if cell)
        for line in wrap.wrap(told):
            console.print(Text(line.replace(KEPT, " ")), soft_wrap=True)


def _line(cell: str | Text, end: str, between: str) -> str:
    """A cell on one line, in which nothing wraps but between words of a heading."""
    said = str(cell).replace(end, between).replace("\n", " ").strip()
    return said.replace(" ", KEPT) if any(c.isdigit() for c in said) else said


def _width(cell: str | Text) -> int:
    """Of its longest line."""
    return max((cell_len(line) for line in str(cell).split("\n")), default=0)


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
