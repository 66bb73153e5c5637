"""`forerun widen`: the same function at the cost of a larger model."""

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
    """Options that say what to grow, to what, and where the result goes."""

    TITLE: ClassVar[str] = "Checkpoint"

    model: ModelOption
    out: Annotated[Path, typer.Option(help="Folder to write; an existing one is not overwritten.")]
    parameters: Annotated[str | None, typer.Option(help="About how large: 0.5B, 21M. Chooses the whole shape.")] = None
    hidden: Annotated[
        int | None, typer.Option(help="Width of the residual stream; 4, 16, ... times as wide is exact.")
    ] = None
    layers: Annotated[int | None, typer.Option(help="Layers in all.")] = None
    mlp: Annotated[int | None, typer.Option(help="Neurons per layer; default: grows with the width.")] = None
    heads: Annotated[int | None, typer.Option(help="Query heads; default: grows with the width.")] = None
    vocab_size: Annotated[int | None, typer.Option(help="Padded vocabulary; default: unchanged.")] = None
    experts: Annotated[int | None, typer.Option(help="Experts that every MLP becomes; default: none.")] = None
    active: Annotated[int | None, typer.Option(help="Experts that a token takes; default: 2.")] = None
    spread: Annotated[
        bool, typer.Option("--spread/--at-end", help="Where layers that compute nothing go: between the others.")
    ] = True
    draft: Annotated[
        list[str] | None,
        typer.Option("--draft", "-d", help="A drafter on the model's states, to be widened into the same folder."),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the weights that have no effect.")] = 0

    def sizes(self) -> dict[str, int | None]:
        """The sizes of the shape, by name."""
        names = ("hidden", "layers", "mlp", "heads", "vocab_size", "experts", "active")
        return {name: getattr(self, name) for name in names}


@with_options(EXAMPLES)
def widen(shape: ShapeOptions, output: OutputOptions) -> None:
    """Write a larger checkpoint that computes the same function.

    It shows speculation at the cost of a real model where none is at hand. Trained drafters that read the model's
    states are widened with it, and guess the same.
    """
    result = Result.of(output)
    with importing():
        from forerun.commands.widening import Widened, wider_of
        from forerun.heads.widen import widen_drafter
        from forerun.models.loading import Blueprint
        from forerun.models.widen import widen as write_widened
        from forerun.progress import LoadingBar
    source = Blueprint.of(shape.model).config
    wider = wider_of(source, shape.parameters, shape.sizes(), shape.spread)
    with LoadingBar() as bar:
        folder = write_widened(shape.model, shape.out, wider, bar, shape.seed)
        drafts = [str(widen_drafter(each, shape.model, folder, wider, shape.seed)) for each in shape.draft or ()]
    made = Widened(source, wider.shape(source), folder, drafts)
    result.tell(made.as_object(), made.card())
