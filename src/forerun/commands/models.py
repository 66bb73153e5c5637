"""`forerun models`: shows a model's properties, whether and how it runs here, and which drafters fit.

This file defines the options and the output; `forerun.catalog` collects the facts.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.commands.running import Result, importing
from forerun.options import LoadingOptions, OutputOptions, complete_model, with_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forerun.catalog import ModelFacts, ModelHere

EXAMPLES = """
forerun models
forerun models stdlib
forerun models model.Q4_K_M.gguf --json
"""


@with_options(EXAMPLES)
def models(
    loading: LoadingOptions,
    output: OutputOptions,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Folder, GGUF file, hub id or bundled model; without it, the models on this machine are listed.",
            autocompletion=complete_model,
        ),
    ] = None,
) -> None:
    """Show whether and how a model runs here, which drafters fit it, and the commands for it.

    No weights are loaded. For a model that cannot run, the exit status is 2 and one line says why and what to do.
    Without a model: list the bundled models, those in the hub's cache, and GGUF files that were used before.
    """
    result = Result.of(output)
    with importing():
        from rich.console import Console
        from rich.text import Text

        from forerun.catalog import facts_of, models_here
        from forerun.report import fact_table
    if what is None:
        checkpoints = list(models_here())
        if not result.as_json:
            Console(highlight=False).print(Text("\n".join(overview_lines(checkpoints))), soft_wrap=True)
        result.write({"models": [asdict(each) for each in checkpoints]})
        return
    facts = facts_of(loading.spec(what))
    if not result.as_json:
        console = Console(highlight=False)
        console.print(fact_table(fact_rows(facts)))
        for i, command in enumerate(facts.commands):  # not wrapped, so that they can be copied
            console.print(Text(("" if i else "run it").ljust(len("drafters") + 2) + command), soft_wrap=True)
    result.write(facts.as_object())


def fact_rows(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    """(name, fact) of one model, for the table."""
    from forerun.cache.plan import size

    yield "model", facts.name
    yield "what", f"{facts.family}, {facts.parameters / 1e6:,.1f} M parameters"
    yield "runs", f"in {facts.number_format} with {facts.kernels}"
    total_bytes = facts.weights_bytes + facts.token_bytes * facts.context
    yield "memory", f"{size(facts.weights_bytes)} of weights, {size(facts.token_bytes)} per token"
    yield "context", f"{facts.context:,} tokens; a full context needs {size(total_bytes)} in total"
    num_contexts = max(0, facts.budget_bytes - facts.weights_bytes) // (facts.token_bytes * facts.context)
    yield "room", f"for {num_contexts:,} full contexts at once in {size(facts.budget_bytes)}, 80% of the free memory"
    yield "chat", "has a chat template" if facts.has_chat_template else "no chat template: it continues texts"
    for i, each in enumerate(facts.drafters):
        yield "" if i else "drafters", f"{each.draft}: {each.about}"


def overview_lines(models: list[ModelHere]) -> Iterator[str]:
    """The models on this machine, one per line; the name is the last column, so that long names are not wrapped."""
    from forerun.cache.plan import size

    yield f"{'runs':4}  {'family':14}  {'parameters':>12}  {'files':>8}  model"
    for each in models:
        parameters, files = (f"{each.parameters / 1e6:,.1f} M", size(each.num_bytes)) if each.runs else ("", "")
        yield f"{'yes' if each.runs else 'no':4}  {each.family:14}  {parameters:>12}  {files:>8}  {each.name}"
    if not all(each.runs for each in models):
        yield "forerun models MODEL shows why a model does not run."
