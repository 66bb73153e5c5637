"""Markdown tables: complete ones, and lines that are printed as soon as they are measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forerun.bench.figures import Spread


def line(*cells: object) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def header(*names: object) -> str:
    """The first two lines of a table."""
    return f"{line(*names)}\n{'|---' * len(names)}|"


def table(names: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A complete table, which ends with a line break."""
    return "".join(f"{each}\n" for each in (header(*names), *(line(*row) for row in rows)))


def show(*cells: object) -> None:
    """Print a line of a table at once."""
    print(line(*cells), flush=True)


def show_header(*names: object) -> None:
    """Print the first two lines of a table."""
    print(header(*names), flush=True)


def spread_cells(spread: Spread | None, form: str = ".2f") -> tuple[str, str]:
    """A median and its quartiles; empty strings if nothing was measured."""
    if spread is None:
        return "", ""
    return format(spread.median, form), f"{spread.low:{form}} to {spread.high:{form}}"
