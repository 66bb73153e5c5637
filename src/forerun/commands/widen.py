"""`forerun widen`: writes a larger checkpoint that computes the same function."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from forerun.commands.running import Result, importing
from forerun.options import ModelOption, OutputOptions, with_options

EXAMPLES = """
forerun widen --model stdlib --parameters 0.1B --out stdlib-100M
forerun widen --model ./target --draft eagle:./my-layer --parameters 1B --out target-1B
forerun widen --model stdlib --experts 16 --active 2 --out stdlib-experts
forerun widen --model stdlib-draft --hidden 256 --layers 8 --out stdlib-draft-wide
"""


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    """Options for the source, the new shape and the output folder."""

    TITLE: ClassVar[str] = "Checkpoint"

    model: ModelOption
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")]
    parameters: Annotated[
        str | None, typer.Option(help="Approximate number of parameters, as in 0.5B; instead of the sizes below.")
    ] = None
    hidden: Annotated[
        int | None, typer.Option(help="Hidden size; the function is exactly the same at 4, 16, ... times the width.")
    ] = None
    layers: Annotated[int | None, typer.Option(help="Number of layers.")] = None
    mlp: Annotated[int | None, typer.Option(help="MLP width; default: scaled with the hidden size.")] = None
    heads: Annotated[int | None, typer.Option(help="Query heads; default: scaled with the hidden size.")] = None
    experts: Annotated[int | None, typer.Option(help="Replace every MLP by this many experts; default: none.")] = None
    active: Annotated[int | None, typer.Option(help="Active experts per token; default: 2.")] = None
    draft: Annotated[
        list[str] | None,
        typer.Option("--draft", "-d", help="A drafter that reads the model's hidden states, also widened; repeatable."),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the added weights, which do not affect the output.")] = 0

    def sizes(self) -> dict[str, int | None]:
        """The new sizes by name; None if unchanged."""
        names = ("hidden", "layers", "mlp", "heads", "experts", "active")
        return {name: getattr(self, name) for name in names}


@with_options(EXAMPLES)
def widen(shape: ShapeOptions, output: OutputOptions) -> None:
    """Write a larger checkpoint that computes the same function.

    On the result, speculation can be measured at the cost of a real model without having one. Trained drafters that
    read the model's hidden states are widened as well, and draft the same tokens.
    """
    result = Result.of(output)
    with importing():
        from forerun.commands.widening import Widened, wider_of
        from forerun.heads.widen import widen_drafter
        from forerun.models.loading import Blueprint
        from forerun.models.widen import widen as write_widened
        from forerun.progress import LoadingBar
        from forerun.report import fact_table
    source = Blueprint.of(shape.model).config
    wider = wider_of(source, shape.parameters, shape.sizes())
    with LoadingBar() as bar:
        folder = write_widened(shape.model, shape.out, wider, bar, shape.seed)
        drafts = [str(widen_drafter(each, shape.model, folder, wider, shape.seed)) for each in shape.draft or ()]
    made = Widened(source, wider.shape(source), folder, drafts)
    result.write(made.as_object(), fact_table(made.facts()))
