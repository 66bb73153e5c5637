"""Reports of commands: cards for a terminal, made of tables of facts and figures, and JSON objects.

Tables are split to fit the terminal, so that all figures are shown at any width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

Cell = str | Text
Section = Sequence[RenderableType]  # of a card
GAP = 1  # terminal columns between two columns of a table


def counted(number: int, noun: str) -> str:
    """A number and a noun, in the plural unless the number is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def json_object(**values: Any) -> dict[str, Any]:
    """A JSON object of these values, with dataclasses as objects, tuples as lists and non-finite numbers as None."""
    return {name: json_value(value) for name, value in values.items()}


def json_value(value: Any) -> Any:
    """A value in the form that `json_object` describes."""
    if is_dataclass(value):
        return {each.name: json_value(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {name: json_value(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def card(*sections: Section | Iterable[Text]) -> RenderableType:
    """Sections with empty lines between them; empty sections are left out."""
    parts: list[RenderableType] = []
    for section in map(list, sections):
        parts += [Text()] * bool(parts and section) + section
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A text in a table that is folded between words; a path that does not fit is shortened in the middle."""

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text(fitted(self.text.plain, options.max_width), self.text.style) if not self.text.spans else self.text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.text)


def fitted(text: str, width: int) -> str:
    """The text with its longest word shortened, if one line is then enough, or else each word that is too long."""
    words = text.split(" ")
    longest = max(range(len(words)), key=lambda i: cell_len(words[i]))
    room = width - (cell_len(text) - cell_len(words[longest]))
    if cell_len(text) > width and room >= width // 2 and "/" in words[longest]:
        words[longest] = shortened(words[longest], room)
    return " ".join(shortened(word, width) for word in words)


def shortened(word: str, width: int) -> str:
    """A word in this number of terminal columns; a longer one without its middle, since paths differ at their ends."""
    if cell_len(word) <= width or width < 3:
        return word
    before = set_cell_size(word, (width - 1) // 3)
    after = set_cell_size(word[::-1], width - 1 - cell_len(before))[::-1]
    return f"{before}…{after}"


def fact_table(facts: Iterable[tuple[str, Cell]] = ()) -> Table:
    """A table of two columns: the name of each fact, and the fact, folded if it is long."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts:
        table.add_row(Text(name), Fitted(Text(fact) if isinstance(fact, str) else fact))  # brackets are not markup
    return table


@dataclass(frozen=True, slots=True)
class FigureTable:
    """Rows under `heads`. If the table is split, each part starts with the first column, which names the rows.

    The first `num_names` columns hold words, the others figures. A name is folded if it takes more than a third of a
    narrow terminal; a figure never is. `styles` has one entry for each row.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    num_names: int = 0
    styles: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        for number, columns in enumerate(self.parts(options.max_width)):
            if number:
                yield Text()
            yield self.part(columns, options.max_width)

    def parts(self, width: int) -> list[list[int]]:
        """The columns of each part, by number: as many as fit next to the first one."""
        parts: list[list[int]] = [[0]]
        first = self.first_width(width)
        room = width - first
        for column in range(1, len(self.heads)):
            needed = GAP + self.width(column)
            if needed > room and len(parts[-1]) > 1:
                parts.append([0])
                room = width - first
            parts[-1].append(column)
            room -= needed
        return parts

    def part(self, columns: Sequence[int], width: int) -> Table:
        """The table of these columns."""
        grid = Table(box=None, padding=(0, GAP), pad_edge=False, collapse_padding=True)
        for column in columns:
            name = column < self.num_names
            grid.add_column(
                self.heads[column],
                justify="left" if name else "right",
                width=self.first_width(width) if column == 0 else self.width(column),
                overflow="fold",
            )
        for number, row in enumerate(self.rows):
            style = self.styles[number] if self.styles else ""
            grid.add_row(*(self.cell(row, column) for column in columns), style=style)
        return grid

    def cell(self, row: Sequence[Cell], column: int) -> Cell | Fitted:
        """A cell of a row; a long name is fitted into its column."""
        cell = row[column]
        return Fitted(Text(cell) if isinstance(cell, str) else cell) if column < self.num_names else cell

    def first_width(self, width: int) -> int:
        """Terminal columns of the first column: all that it needs if the entire table fits."""
        needed = self.width(0)
        others = sum(GAP + self.width(column) for column in range(1, len(self.heads)))
        return needed if needed + others <= width else min(needed, max(width // 3, 1))

    def width(self, column: int) -> int:
        """Terminal columns that a column needs."""
        cells = [self.heads[column], *(row[column] for row in self.rows)]
        return max(cell_len(line) for cell in cells for line in (str(cell).splitlines() or [""]))
