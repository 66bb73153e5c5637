"""A table keeps every figure whole at any width, in its column's place, with the names of its rows."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from forerun.report import FigureTable, fact_table


def made(num_columns: int) -> FigureTable:
    heads = ["name", *(f"head{i}" * (1 + i % 2) for i in range(1, num_columns))]
    return FigureTable(heads, [[f"row {r}", *(f"{r}.{c:03}" for c in range(1, num_columns))] for r in range(3)])


def shown(table: FigureTable | Table, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(table)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("num_columns", [1, 2, 9])
@pytest.mark.parametrize("width", [20, 40, 60, 100])
def test_every_figure_is_printed_once_in_its_row(num_columns: int, width: int) -> None:
    lines = shown(made(num_columns), width)
    assert max(map(cell_len, lines)) <= width
    for row in range(3):
        mine = [line for line in lines if line.startswith(f"row {row}")]
        figures = [word for line in mine for word in line.split()[2:]]
        assert figures == [f"{row}.{c:03}" for c in range(1, num_columns)]
    num_parts = sum(line.strip().startswith("name") for line in lines)
    assert (num_parts == 1) == (made(num_columns).parts(width) == [list(range(num_columns))])


def test_brackets_in_facts_are_no_markup() -> None:
    assert [line.split() for line in shown(fact_table([("mix[a]", "mix[a,b]")]), 40)] == [["mix[a]", "mix[a,b]"]]


PATH = "/home/someone/models/checkpoints/of/november/a-model-with-a-name"


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
@pytest.mark.parametrize(
    "text", [PATH, f"{PATH} (float32)", f"eagle:{PATH}: a head of one layer, 2.31 tokens a round", "/模型" * 20, "a b"]
)
def test_a_long_path_is_shortened_in_the_middle_and_not_broken(text: str, width: int) -> None:
    for table in (fact_table([("it", text)]), FigureTable(("name", "figure"), [[text, "1.25"]], num_names=1)):
        lines = shown(table, width)
        assert max(map(cell_len, lines)) <= width
        words = " ".join(lines).split()
        long = [word for word in text.split() if word not in words]
        if width == 200:
            assert not long
        ends = [cut.split("…") for cut in words if "…" in cut]
        assert all(any(word.startswith(start) and word.endswith(end) for start, end in ends) for word in long)


def test_a_fact_with_one_long_path_stays_on_one_line() -> None:
    assert shown(fact_table([("target", f"{PATH} (float32)")]), 60) == [
        "target  /home/someone…november/a-model-with-a-name (float32)"
    ]


def test_one_table_where_everything_fits() -> None:
    assert len(shown(made(9), 200)) == 4
