"""`forerun convert`: converts a drafter to the format of another program.

This file defines the options and the output; `forerun.heads.convert` does the work.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from forerun.commands.running import Result, importing
from forerun.options import OutputOptions, complete_model, with_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forerun.heads.convert import Converted

EXAMPLES = """
forerun convert RedHatAI/Qwen3-8B-speculator.eagle3 --to eagle --out qwen3-eagle
forerun convert my-layer --to speculators --model ./target --out for-vllm
forerun convert ./medusa-vicuna-7b --to medusa --out my-heads
forerun convert ./speculator.dflash --to dflash --model ./target --out my-block
"""


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """Options for the format and the folder to write."""

    TITLE: ClassVar[str] = "Conversion"

    to: Annotated[str, typer.Option(help="Format to write: eagle, dflash, mtp, medusa, medusa-pt or speculators.")]
    out: Annotated[Path, typer.Option(help="Folder to write; must be empty or new unless --force is given.")]
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The drafter's target: checks that it fits.", autocompletion=complete_model),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Replace files of the same names in the folder.")] = False


@with_options(EXAMPLES)
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A folder with a drafter, or a hub id.")],
    options: ConversionOptions,
    output: OutputOptions,
) -> None:
    """Convert a drafter to another format: that of its authors, of speculators, or of forerun.

    The format of the source is detected from its files. It is an error if a weight is unknown or missing. The result
    is read back and compared with the source before the folder gets its name.
    """
    result = Result.of(output)
    with importing():
        from forerun.heads.convert import convert as run
        from forerun.report import fact_table
    made = run(source, options.to, options.out, options.model, options.force)
    result.write(made.as_object(), fact_table(facts(made)))


def facts(made: Converted) -> Iterator[tuple[str, str]]:
    """(name, fact) of the result."""
    yield "drafter", made.read.method.label
    yield "from", f"{made.source} ({made.read.format})"
    yield "to", f"{made.folder} ({made.written.format})"
    yield "weights", f"{made.num_tensors} tensors, {made.num_bytes / 1e6:.1f} MB, bit for bit equal"
    if made.written.is_runnable:
        yield "use it with", f"--draft {shlex.quote(made.draft)}"
