"""The output of the command line: tokens coloured by origin, and a card of the run.

This file decides colours and wording. There are no colours if the output is not a colour terminal or NO_COLOR is set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.color import ColorSystem
from rich.console import Console, RenderableType
from rich.style import Style
from rich.text import Text

from forerun.accept.commit import Origin
from forerun.accept.outcome import Stats
from forerun.models.generation import format_params
from forerun.report import Fitted, counted, fact_table

STYLES = {
    Origin.DRAFTED: Style(color="green"),
    Origin.RECOVERED: Style(color="yellow"),
    Origin.BONUS: Style(color="cyan"),
    Origin.TARGET: Style(),
}
THOUGHT = Style(dim=True)


@dataclass(frozen=True, slots=True)
class AnswerTiming:
    """The times of an answer: `first_s` until its first token, `total_s` until its last."""

    num_tokens: int
    first_s: float
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens over the total time, prefill included."""
        return self.num_tokens / self.total_s if self.total_s else 0.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that an answer depends on: the models, how they run, and the fingerprint of identical results."""

    model: str
    draft: str | None
    depth: int | str
    verification: str
    seed: int
    format: str
    kernels: str
    measured: str  # how fast `kernels` are compared with the alternatives; empty if not measured
    num_threads: int
    fingerprint: str
    forecast: str = ""  # the predicted speed-up; empty if not measured
    defaults: Mapping[str, Any] = field(default_factory=dict)  # the model's default sampling parameters


class Painter:
    """Streams an answer to standard output, coloured on a colour terminal."""

    def __init__(self, console: Console, plain: bool) -> None:
        self._console = console
        self.colours = not plain and console.color_system is not None and not console.no_color

    def write(self, text: str, origin: Origin, *, thought: bool = False) -> None:
        """Write a piece of text at once; reasoning (`thought`) is dim, whatever its origin."""
        if self.colours:
            style = THOUGHT if thought else STYLES[origin]
            text = style.render(text, color_system=ColorSystem.STANDARD)
        self._console.file.write(text)
        self._console.file.flush()

    @property
    def visible(self) -> bool:
        """Whether the answer is shown on a terminal."""
        return self._console.is_terminal

    def end(self, followed: bool = False) -> None:
        """End the line after the answer on a terminal; a file or a pipe gets only the text, unless more `followed`."""
        if followed or self._console.is_terminal:
            self._console.file.write("\n")


def speed_line(timing: AnswerTiming, stats: Stats) -> str:
    """The short form of a card: "12.3 tokens/s, 2.41 tokens per round, 61 % accepted"."""
    parts = [f"{timing.tokens_per_s:.1f} tokens/s"]
    if stats.tokens_per_round is not None:
        parts.append(f"{stats.tokens_per_round:.2f} tokens per round")
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} accepted")
    return ", ".join(parts)


def run_card(
    setting: Setting,
    timing: AnswerTiming,
    stats: Stats,
    origins: Sequence[Origin],
    plan: Sequence[str],
    drafters: Sequence[str] = (),
    ended: str = "",
) -> RenderableType:
    """The facts of a run, as a table of two columns; for a mix also the counts of each of its `drafters`.

    `ended` is the reason why the answer ended, for a run with one answer.
    """
    card = fact_table()
    card.add_row("model", Fitted(Text(setting.model)))
    drafts = f"{setting.draft}, depth {setting.depth}" if setting.draft else "none: plain decoding"
    card.add_row("draft", Fitted(Text(drafts)))  # as Text, so that brackets are not read as markup
    if setting.forecast:
        card.add_row("", setting.forecast)
    card.add_row("verification", setting.verification)
    if setting.defaults:
        text = f"{format_params(setting.defaults, ' ')} (used if not set here; --generation-config none ignores them)"
        card.add_row("model's defaults", Text(text))
    if timing.num_tokens:
        times = f"{counted(timing.num_tokens, 'token')} in {timing.total_s:.2f} s, first after {timing.first_s:.2f} s"
        card.add_row("speed", f"{timing.tokens_per_s:.1f} tokens/s ({times})")
    card.add_row("tokens", _origin_counts(origins))
    if ended:
        card.add_row("ended", Text(ended))
    if stats.tokens_per_round is not None:
        card.add_row("tokens per round", f"{stats.tokens_per_round:.2f} ({counted(stats.num_rounds, 'round')})")
    if stats.gain is not None:
        card.add_row("gain", f"×{stats.gain:.2f} compared with plain decoding (estimated)")
    if stats.acceptance_rate is not None:
        share = f"{stats.acceptance_rate:.1%} ({stats.num_accepted} of {stats.num_drafted} draft tokens)"
        card.add_row("acceptance", share)
        card.add_row("  by depth", " ".join(f"{rate:.2f}" for rate in stats.acceptance_at_depth))
        for number, counts in sorted(stats.drafters.items()):
            accepted = f", {counts.num_accepted} of {counts.num_drafted} accepted" if counts.num_drafted else ""
            line = f"{drafters[number]} in {counted(counts.num_rounds, 'round')}{accepted}"
            card.add_row("" if number != min(stats.drafters) else "  by drafter", Text(line))
    for i, line in enumerate(plan):
        card.add_row("" if i else "plan", line)
    threads = counted(setting.num_threads, "thread")
    card.add_row("computed by", Text(f"{setting.kernels}, {setting.format}, {threads}"))
    if setting.measured:
        card.add_row("", setting.measured)
    card.add_row("fingerprint", setting.fingerprint)
    card.add_row("seed", str(setting.seed))
    return card


def _origin_counts(origins: Sequence[Origin]) -> Text:
    """The number of tokens of each origin, each in its colour: the legend of the text above."""
    counts = Counter(origins)
    names = {origin: "plain" if origin is Origin.TARGET else origin.value for origin in STYLES}
    shown = [Text(f"{counts[o]} {names[o]}", STYLES[o]) for o in STYLES if counts[o]]
    return Text(", ").join(shown) if shown else Text("none")
