"""`forerun demo`: plain and speculative decoding race on a chat model, and a card shows the result."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from forerun.commands.running import Result, importing, numbers
from forerun.config import AUTO
from forerun.errors import ModelNotFound
from forerun.options import REQUIRED_DRAFT, AdapterOption, OutputOptions, adapted, with_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forerun.demo.material import DemoPrompt, Pair
    from forerun.progress import LoadingBar

LIMIT_S = 150.0  # for loading and all races, without the download of the model
SEED = 1
EXAMPLES = """
forerun demo
forerun demo --draft ngram --temperature 1
forerun demo --bundled --draft block:stdlib-block
"""
TEMPERATURES = {True: "0,0.7", False: "0"}  # for a chat model (True) and for the bundled ones


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options for the models and the race."""

    TITLE: ClassVar[str] = "Race"

    draft: Annotated[str | None, REQUIRED_DRAFT] = None
    bundled: Annotated[bool, typer.Option("--bundled", help="Use the bundled models, which need no download.")] = False
    small: Annotated[bool, typer.Option("--small", help="Use them without widening: takes seconds.")] = False
    temperature: Annotated[
        str | None, typer.Option("--temperature", "-t", help="Temperatures, as in 0,1; 0: greedy decoding.")
    ] = None
    depth: Annotated[int | None, typer.Option(min=1, help="Tokens drafted per round; default: chosen.")] = None
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Maximum tokens per answer.")] = 256
    raw: Annotated[bool, typer.Option("--raw", help="Plain text without panels and colours.")] = False
    adapter: AdapterOption = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", adapted(self.draft, self.adapter))


@with_options(EXAMPLES)
def demo(options: DemoOptions, output: OutputOptions) -> None:
    """Compare plain and speculative decoding side by side, on questions of several kinds.

    The model is SmolLM2-135M-Instruct, which is downloaded once (98 MB). If the download fails, or FORERUN_OFFLINE is
    set, bundled models, enlarged to 0.5 billion and 21 million parameters, complete code instead. The demo takes less
    than three minutes. Exit status 1: the tokens differ.
    """
    result = Result.of(output)
    with importing():
        from rich.console import Console

        from forerun.demo.race import Comparison, RaceSetup
        from forerun.demo.screen import demo_card, view_of
        from forerun.progress import LoadingBar
    console = Console(quiet=result.as_json, no_color=options.raw or None, highlight=False)
    errors = Console(stderr=True, highlight=False)
    with LoadingBar(errors) as bar:
        pair, prompts = material_of(options, bar, errors.print)
        deadline_s = time.perf_counter() + LIMIT_S
        temperatures = numbers("temperature", options.temperature or TEMPERATURES[prompts[0].is_chat], float)
        setup = RaceSetup(pair.load(options.depth or AUTO, bar))
        comparison = Comparison(setup, SEED, options.max_tokens, deadline_s)
        comparison.warm_up(prompts[0], bar)
    console.print(pair.title, style="bold")
    races = [(prompt, temperature) for temperature in temperatures for prompt in prompts]
    num_left = sum(1 + len(prompt.later) for prompt, _ in races)
    for i, (first, temperature) in enumerate(races):
        prompt: DemoPrompt | None = first
        while prompt is not None and not comparison.late:
            heading = f"{i + 1}/{len(races)}, temperature {temperature:g}  {prompt.title}"
            with view_of(console, options.raw or result.as_json, heading, prompt.shown) as view:
                comparison.race(prompt, temperature, num_left, view.show)
            num_left, prompt = num_left - 1, prompt.after(comparison.answer)
    console.print()
    facts = comparison.facts(len(races))
    console.print(demo_card(pair.title, comparison.races, comparison.total, facts, comparison.totals))
    result.write(comparison.as_object(pair.title))
    if not comparison.total.same_tokens:
        raise typer.Exit(1)


def material_of(
    options: DemoOptions, bar: LoadingBar, say: Callable[[str], object]
) -> tuple[Pair, Sequence[DemoPrompt]]:
    """The models and prompts; `say` gets a line with the reason if the bundled models replace the chat model."""
    from forerun.demo.chat_model import fetch
    from forerun.demo.material import BUNDLED_DRAFT, CHAT_DRAFT, Pair, chat_prompts, load_prompts

    if not (options.bundled or options.small):
        try:
            bar("fetching SmolLM2-135M-Instruct, 98 MB", 0.0)
            return Pair(str(fetch()), options.draft or CHAT_DRAFT), chat_prompts()
        except ModelNotFound as error:
            say(f"Using the bundled models instead: {error}.")
    draft = options.draft or BUNDLED_DRAFT
    return Pair(draft=draft) if options.small else Pair.widened(draft, bar), load_prompts()
