"""`python -m recipes.stdlib`: train the bundled family, or resume. It takes about three hours on 2 cores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from recipes.stdlib.corpus import standard_library
from recipes.stdlib.recipe import STDLIB, cook

SHIPPED = Path(__file__).resolve().parents[2] / "src" / "forerun" / "bundled" / "stdlib"


def main(
    source: Annotated[Path | None, typer.Option(help="Folder of Python source; default: the standard library.")] = None,
    work: Annotated[Path, typer.Option(help="Folder of checkpoints, from which it resumes.")] = Path("build/stdlib"),
    out: Annotated[Path, typer.Option(help="Folder of the family.")] = SHIPPED,
    target: Annotated[
        Path | None, typer.Option(help="A target of an earlier run: only its students are trained.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
) -> None:
    """Train the tokenizer, the target, and its draft and middle, and write the model card."""
    if threads is not None:
        torch.set_num_threads(threads)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as bar:
        cook(STDLIB, source or standard_library(), work, out, bar, target)
    typer.echo(f"The family is in {out}; its card is {out / 'README.md'}.")


if __name__ == "__main__":
    typer.run(main)
