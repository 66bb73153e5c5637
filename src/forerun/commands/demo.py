"""`forerun demo`: plain and speculative decoding race on the bundled models, and a card shows the result."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import typer

from forerun.commands.destination import Result
from forerun.commands.interrupt import importing
from forerun.config import DEFAULT_DEPTH
from forerun.models.bundled import DRAFT
from forerun.options import REQUIRED_DRAFT, AdapterOption, OutputOptions, adapted, with_options

LIMIT_S = 105.0  # from the command's start: the rest of two minutes is for Python itself to start
SEED = 1
EXAMPLES = """
forerun demo
forerun demo --small --temperature 1 -n 48
forerun demo --draft block:stdlib-block
"""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options that say what races."""

    TITLE: ClassVar[str] = "Race"

    draft: Annotated[str | None, REQUIRED_DRAFT] = None
    small: Annotated[bool, typer.Option("--small", help="The models as trained, not widened: over in seconds.")] = False
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 takes the likeliest token.")] = 0.0
    depth: Annotated[int, typer.Option(min=1, help="Tokens drafted per round.")] = DEFAULT_DEPTH
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Most tokens per answer.")] = 96
    raw: Annotated[bool, typer.Option("--raw", help="No panels, no colours.")] = False
    adapter: AdapterOption = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", adapted(self.draft, self.adapter))


@with_options(EXAMPLES)
def demo(options: DemoOptions, output: OutputOptions) -> None:
    """Watch what speculation brings on this machine: prompts answered plain and speculatively, side by side.

    Without options it runs models widened to 0.5 billion and 21 million parameters, and takes less than two minutes.
    A drafter that is given guesses for every prompt; without one, n-grams guess where a text repeats itself.
    """
    deadline_s = time.perf_counter() + LIMIT_S
    result = Result.of(output)
    with importing():
        from rich.console import Console

        from forerun.demo.comparison import Comparison
        from forerun.demo.material import Pair, load_prompts
        from forerun.demo.race import RaceSetup
        from forerun.demo.screen import card, view_of
        from forerun.progress import LoadingBar
        from forerun.sampling.params import SamplingParams
    params = SamplingParams(temperature=options.temperature, seed=SEED)
    console = Console(quiet=result.as_json, no_color=options.raw or None, highlight=False)
    with LoadingBar(Console(stderr=True)) as bar:
        draft = options.draft or f"model:{DRAFT}"
        pair = Pair(draft=draft) if options.small else Pair.widened(draft, bar)
        setup, prompts = RaceSetup(pair.load(options.depth, bar), pair.drafter), load_prompts()
        if options.draft is not None:
            prompts = [replace(prompt, drafter="model") for prompt in prompts]
        comparison = Comparison(setup, params, options.max_tokens, deadline_s)
        comparison.warm_up(prompts[0], bar)
    console.print(pair.title, style="bold")
    for i, prompt in enumerate(prompts):
        if comparison.late:
            break
        widened = "" if options.small else ", widened"
        heading = f"{i + 1}/{len(prompts)}  {prompt.path}  (drafter: {setup.shown[prompt.drafter]}{widened})"
        with view_of(console, options.raw or result.as_json, heading, prompt.text) as view:
            comparison.race(prompt, len(prompts) - i, view.show)
    console.print()
    console.print(card(pair.title, comparison.races, comparison.total, comparison.facts(len(prompts))))
    result.tell(comparison.as_object(pair.title))
    if not comparison.total.same_tokens:
        raise typer.Exit(1)
