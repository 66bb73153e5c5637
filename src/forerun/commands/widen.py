"""`forerun widen`: the same function at the cost of a larger model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from forerun.errors import InvalidRequest
from forerun.fields import read_fields
from forerun.models.bundled import BUNDLED_NAMES
from forerun.models.config import UNITS, WIDENED, ModelConfig, amount
from forerun.models.loading import Blueprint
from forerun.models.widen import Wider, count_parameters
from forerun.models.widen import widen as write_widened
from forerun.options import with_options
from forerun.progress import LoadingBar

AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMB]?)", re.IGNORECASE)


@with_options
def widen(
    model: Annotated[str, typer.Option("--model", "-m", help=f"Hugging Face folder, hub id, or {BUNDLED_NAMES}.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; one that is there is not overwritten.")],
    parameters: Annotated[str | None, typer.Option(help="About how large: 0.5B, 21M. Chooses a shape.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Width of the residual stream; 4, 16, ... times is exact.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers in all.")] = None,
    mlp: Annotated[int | None, typer.Option(help="Neurons per layer; default: grows with the width.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads; default: grows with the width.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Padded vocabulary; default: unchanged.")] = None,
    spread: Annotated[bool, typer.Option("--spread/--at-end", help="Where layers that compute nothing go.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the dead weights.")] = 0,
) -> None:
    """Write a larger checkpoint that computes the same: to see speculation at the size of a real model."""
    source = Blueprint.of(model)
    shape = (hidden, layers, mlp, heads, vocab_size)
    if parameters is not None and any(size is not None for size in shape):
        raise InvalidRequest("parameters", "it chooses the whole shape: give it or the sizes, not both.")
    if parameters is None and all(size is None for size in shape):
        raise InvalidRequest(
            "parameters", "there is nothing to grow to: give --parameters 0.5B, or --hidden and so on."
        )
    if parameters is not None:
        wider = replace(Wider.of(source.config, read_amount(parameters)), spread=spread)
    else:
        c = source.config
        wider = Wider(hidden or c.hidden, layers or c.layers, mlp, heads, vocab_size, spread)
    errors = Console(stderr=True)
    with LoadingBar(errors) as bar:
        folder = write_widened(model, out, wider, bar, seed)
    Console(highlight=False).print(report(source.config, wider.shape(source.config), folder))


def read_amount(text: str) -> int:
    """A number of parameters as people write it: 21M, 0.5B, 500000."""
    found = AMOUNT.fullmatch(text.strip())
    if found is None:
        raise InvalidRequest("parameters", f"{text!r} is no number of parameters: write it like 21M or 0.5B.")
    return round(float(found[1]) * UNITS[found[2].upper()])


def report(source: ModelConfig, wide: ModelConfig, folder: Path) -> Table:
    """Both shapes, and what the check at the making found."""
    check = read_fields(folder / "config.json").values[WIDENED]["check"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("from", describe(source))
    table.add_row("to", describe(wide))
    found, allowed, largest = (check[key] for key in ("largest_difference", "tolerance", "largest_logit"))
    table.add_row("logits", f"differ by at most {found:.2g} ({allowed:.2g} allowed, the largest is {largest:.3g})")
    table.add_row("folder", str(folder))
    return table


def describe(config: ModelConfig) -> str:
    """A model's size and shape on a line."""
    heads = f"{config.heads} heads ({config.kv_heads} of keys)"
    shape = f"{config.hidden} wide, {config.layers} layers, {heads}, {config.intermediate} neurons"
    return f"{amount(count_parameters(config))} parameters: {shape}, vocabulary {config.vocab_size}"
