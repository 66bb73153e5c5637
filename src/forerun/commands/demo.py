"""`forerun demo`: plain and speculative decoding race on the bundled models, and a card says what it brought."""

from __future__ import annotations

import json
import time
from typing import Annotated

import torch
import typer
from rich.console import Console

from forerun.cache.plan import size
from forerun.config import DEFAULT_DEPTH
from forerun.demo.material import Pair, load_prompts
from forerun.demo.meet import Meet
from forerun.demo.race import Track
from forerun.demo.score import verdict
from forerun.demo.screen import card, view_of
from forerun.machine import peak_rss_bytes
from forerun.options import with_options
from forerun.progress import LoadingBar
from forerun.sampling.params import SamplingParams

LIMIT_S = 105.0  # from the command's start: the rest of two minutes is for Python itself to start
SEED = 1

Small = Annotated[bool, typer.Option("--small", help="The models as trained, not widened: over in seconds.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 takes the likeliest token.")]


@with_options
def demo(
    small: Small = False,
    temperature: Temperature = 0.0,
    depth: Annotated[int, typer.Option(min=1, help="Tokens guessed per round.")] = DEFAULT_DEPTH,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Most tokens per answer.")] = 96,
    raw: Annotated[bool, typer.Option("--raw", help="No panels, no colours.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: all numbers.")] = False,
) -> None:
    """Watch what speculation brings on this machine: prompts answered plain and speculatively, side by side."""
    deadline_s = time.perf_counter() + LIMIT_S
    params = SamplingParams(temperature=temperature, seed=SEED)
    console = Console(quiet=as_json, no_color=raw or None, highlight=False)
    with LoadingBar(Console(stderr=True)) as bar:
        pair = Pair() if small else Pair.widened(bar)
        meet, prompts = Meet(Track(pair.load(depth, bar)), params, max_tokens, deadline_s), load_prompts()
        meet.warm_up(prompts[0], bar)
    console.print(pair.title, style="bold")
    for i, prompt in enumerate(prompts):
        if meet.late:
            break
        heading = f"{i + 1}/{len(prompts)}  {prompt.path}  (drafter: {prompt.drafter}{', widened' * (not small)})"
        with view_of(console, raw or as_json, heading, prompt.text) as view:
            meet.race(prompt, len(prompts) - i, view.show)
    console.print()
    console.print(card(pair.title, meet.heats, meet.total, about(meet, len(prompts))))
    if as_json:
        typer.echo(json.dumps(as_object(pair, meet)))
    if not meet.total.same_tokens:
        raise typer.Exit(1)


def about(meet: Meet, num_prompts: int) -> list[tuple[str, str]]:
    """What else is worth knowing, by name."""
    params = meet.params
    num_threads = torch.get_num_threads()
    machine = f"{num_threads} thread{'s' * (num_threads > 1)}, {meet.track.llm.kernels}, {meet.track.llm.format}"
    lines = [("temperature", f"{params.temperature:g}, seed {params.seed}"), ("machine", machine)]
    if peak := peak_rss_bytes():
        lines.append(("peak memory", size(peak)))
    if meet.shortened:
        lengths = ", ".join(str(heat.num_tokens) for heat in meet.heats)
        lines.append(("to be over in time", f"answers of at most {lengths} tokens instead of {meet.max_tokens}"))
    if num_left := num_prompts - len(meet.heats):
        lines.append(("left out", f"{num_left} of {num_prompts} prompts: this machine is too slow, or busy"))
    return lines


def as_object(pair: Pair, meet: Meet) -> dict[str, object]:
    """The demo as JSON."""
    return {
        "models": pair.title,
        "depth": meet.track.llm.requests.default.depth,
        "temperature": meet.params.temperature,
        "seed": meet.params.seed,
        "max_tokens": meet.max_tokens,
        "shortened": meet.shortened,
        "prompts": [heat.as_object() for heat in meet.heats],
        "total": meet.total.as_object(),
        "verdict": verdict(meet.total),
        "num_threads": torch.get_num_threads(),
        "peak_rss_bytes": peak_rss_bytes(),
        "fingerprint": meet.track.llm.fingerprint,
    }
