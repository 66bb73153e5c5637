"""`forerun generate`: go on from a text."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from forerun.accept.outcome import Stats
from forerun.card import AnswerTiming, Painter, Setting, run_card
from forerun.commands.answering import Answer, answer, build_llm, setting_of
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.options import AnswerOptions, ModelOptions, with_options
from forerun.progress import LoadingBar

Prompt = Annotated[str | None, typer.Argument(help="Text to go on from; - or nothing reads standard input.")]


@with_options
def generate(
    where: ModelOptions,
    how: AnswerOptions,
    prompt: Prompt = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: text, token ids, statistics.")] = False,
) -> None:
    """Go on from a text. The new text is streamed to standard output, a card of the run to standard error."""
    text = read_prompt(prompt)
    params = how.params()
    errors = Console(stderr=True, no_color=how.raw or None)
    llm = build_llm(where, errors)
    setting = setting_of(llm, where, cast(int, params.seed))
    if as_json:
        result = answer(llm, text, params, lambda *_: None, LoadingBar(errors))
        typer.echo(json.dumps(as_object(result, setting, llm)))
    else:
        painter = Painter(Console(), how.raw)
        result = answer(llm, text, params, painter.write, LoadingBar(errors))
        painter.end()
        if not painter.visible:
            errors.print()  # the text, wherever it went, ends without a line's end
        errors.print(run_card(setting, result.timing, llm.stats, result.origins, llm.plan.lines(), llm.arms))
    if result.finish_reason == "cancelled":
        raise typer.Exit(130)


def read_prompt(prompt: str | None) -> str:
    """The argument, or standard input without its last line break."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise InvalidRequest("prompt", "there is none: give it as the last argument, or pipe it in")
    return sys.stdin.read().removesuffix("\n")


def as_object(result: Answer, setting: Setting, llm: LLM) -> dict[str, Any]:
    """An answer as JSON: what was said, where each token came from, and how it went."""
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "origins": [origin.value for origin in result.origins],
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        **asdict(setting),
        "stats": stats_object(llm.stats, result.timing, llm.arms),
        "memory_plan": llm.plan.lines(),
    }


def stats_object(stats: Stats, timing: AnswerTiming, arms: Sequence[str] = ()) -> dict[str, Any]:
    """The counters and rates of a run, by the names they have everywhere; of a mix, those of its `arms` too."""
    by_arm = {arms[arm]: asdict(own) for arm, own in sorted(stats.arms.items())}
    return {
        "num_tokens": timing.num_tokens,
        "first_token_s": timing.first_s,
        "total_s": timing.total_s,
        "tokens_per_s": timing.tokens_per_s,
        "num_rounds": stats.num_rounds,
        "num_drafted": stats.num_drafted,
        "num_accepted": stats.num_accepted,
        "tokens_per_round": stats.tokens_per_round,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_at_depth": list(stats.acceptance_at_depth),
    } | ({"arms": by_arm} if by_arm else {})
