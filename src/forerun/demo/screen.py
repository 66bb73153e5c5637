"""The demo's display: two panels that race (or a transcript without a terminal), and the card at the end.

Every number comes from a Score.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forerun.accept.commit import Origin
from forerun.bench.run import TimedRound
from forerun.card import STYLES
from forerun.demo.race import PromptScore, Score, Side, Tally
from forerun.report import FigureTable, card, fact_table

LEAST_WIDTH, LEAST_HEIGHT = 60, 14  # minimum terminal size for panels
MOST_LINES = 20
PROMPT_LINES = 6
FRAME_S = 0.05
NAMES = {Origin.DRAFTED: "drafted and accepted", Origin.RECOVERED: "recovered after a rejection", Origin.BONUS: "bonus"}


def view_of(console: Console, raw: bool, heading: str, prompt: str) -> FinalAnswers:
    """Panels if the terminal has colours and is large enough, otherwise a transcript."""
    colours = console.is_terminal and console.color_system is not None and not console.no_color
    large = console.width >= LEAST_WIDTH and console.height >= LEAST_HEIGHT
    return Panels(console, heading, prompt) if colours and large and not raw else FinalAnswers(console, heading)


class FinalAnswers:
    """A transcript: both answers, printed when the race is over."""

    def __init__(self, console: Console, heading: str) -> None:
        self._console = console
        self._heading = heading
        self._texts = {side: Text() for side in Side}  # styled by origin
        self._score = Score()

    def __enter__(self) -> FinalAnswers:
        self._print(f"\n{self._heading}")
        return self

    def show(self, side: Side, step: TimedRound, score: Score) -> None:
        """Add a round of a side."""
        for segment in (segment for delta in step.deltas for segment in delta.segments):
            self._texts[side].append(segment.text, STYLES[segment.origin])
        self._score = score

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for side, text in self._texts.items():
                self._print(f"\n--- {side}: {progress_line(self._score.of(side))}\n{text.plain}")
            self._print(f"\n{result_line(self._score)}")

    def _print(self, text: str) -> None:
        self._console.print(text, style=None, markup=False, highlight=False, soft_wrap=True)


class Panels(FinalAnswers):
    """Both answers side by side as they grow, scrolled to their ends."""

    def __init__(self, console: Console, heading: str, prompt: str) -> None:
        super().__init__(console, heading)
        self._prompt = "\n".join(prompt.splitlines()[-PROMPT_LINES:]) + "\n" * prompt.endswith("\n")
        self._lines = min(MOST_LINES, console.height - 8)
        self._live = Live(self._frame(), console=console, auto_refresh=False, vertical_overflow="crop")
        self._shown_s = 0.0

    def __enter__(self) -> Panels:
        self._live.start(refresh=True)
        return self

    def show(self, side: Side, step: TimedRound, score: Score) -> None:
        """Add a round of a side; the screen is refreshed every FRAME_S."""
        super().show(side, step, score)
        if time.monotonic() - self._shown_s >= FRAME_S:
            self._live.update(self._frame(), refresh=True)
            self._shown_s = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._live.update(self._frame(result_line(self._score) if kind is None else ""), refresh=True)
        self._live.stop()

    def _frame(self, result: str = "") -> RenderableType:
        sides = Table.grid(expand=True)
        for _ in Side:
            sides.add_column(ratio=1)
        sides.add_row(*(self._panel(side) for side in Side))
        legend = Text(" · ").join(Text(name, STYLES[origin]) for origin, name in NAMES.items())
        return Group(Text(f"\n{self._heading}", "bold", no_wrap=True), sides, legend, Text(result))

    def _panel(self, side: Side) -> Panel:
        text = Text.assemble((self._prompt, "dim"), self._texts[side])
        width = self._console.width // len(Side) - 4
        lines = text.wrap(self._console, width, overflow="fold", tab_size=4)[-self._lines :]
        footer = progress_line(self._score.of(side))
        return Panel(Text("\n").join(lines), title=side, subtitle=footer, height=self._lines + 2)


def progress_line(tally: Tally) -> str:
    """A side's tokens, time and speed."""
    if not tally.num_decoded:
        return "prefilling the prompt"
    return f"{len(tally.token_ids)} tokens, {tally.total_s:.1f} s, {tally.tokens_per_s:.1f} tokens/s"


def result_line(score: Score) -> str:
    """The result of a race."""
    rounds = score.speculative.stats.tokens_per_round or 0.0
    return f"×{score.speed_up:.2f}, {rounds:.2f} tokens per round; same tokens: {same(score)}"


def short(race: PromptScore) -> str:
    """The prompt's name; a file without its folders."""
    return race.name.rpartition("/")[2]


def same(score: Score) -> str:
    """Whether both sides gave the same tokens, as a word."""
    return "yes" if score.same_tokens else "NO"


def demo_card(
    title: str,
    races: Sequence[PromptScore],
    total: Score,
    about: Sequence[tuple[str, str]],
    totals: Mapping[float, Score] | None = None,
) -> RenderableType:
    """The final card: a table by prompt, costs, `about` facts, and the verdict.

    `totals`: scores by temperature.
    """
    return card(
        [Text(title, "bold")], [table(races, totals or {}, total)], [facts(total, about)], verdict(races, total)
    )


def verdict(races: Sequence[PromptScore], total: Score) -> Iterator[Text]:
    """Whether speculation is faster, on which prompts it is not, and whether the tokens are the same."""
    yield Text(total.verdict, "bold green" if total.pays else "bold yellow")
    if total.speed_up and not total.pays:
        yield Text(f"A round: {total.costs}.")
    losses = [race for race in races if race.score.speed_up and not race.score.pays]
    if total.pays and losses:
        names = (f"{short(race)} at temperature {race.temperature:g} (×{race.score.speed_up:.2f})" for race in losses)
        yield Text(f"It is not faster on {', '.join(names)}.")
    if total.same_tokens:
        yield Text(f"All {len(total.plain.token_ids)} tokens are the same with both.", "bold")
    else:
        yield Text("The tokens differ. This must not happen: please report it.", "bold red")


def table(races: Sequence[PromptScore], totals: Mapping[float, Score], total: Score) -> FigureTable:
    """The table by prompt, with totals by temperature if there are several, and overall."""
    heads = (
        *("prompt", "tempe-\nrature", "plain\ntokens/s", "speculative\ntokens/s"),
        *("speed-up", "tokens\nper round", "same\ntokens"),
    )
    lines = [row(short(race), f"{race.temperature:g}", race.score) for race in races]
    sums = [row("total", f"{each:g}", score) for each, score in totals.items() if len(totals) > 1]
    sums.append(row("total", "", total))
    styles = [*("" for _ in races), *("bold" for _ in sums)]
    return FigureTable(heads, [*lines, *sums], num_names=2, styles=styles)


def row(name: str, temperature: str, score: Score) -> list[str | Text]:
    """The cells of one prompt, or of a total."""
    return [
        name,
        temperature,
        f"{score.plain.tokens_per_s:.1f}",
        f"{score.speculative.tokens_per_s:.1f}",
        Text(f"×{score.speed_up:.2f}", "green" if score.pays else "yellow"),
        f"{score.speculative.stats.tokens_per_round or 0:.2f}",
        Text(same(score), "" if score.same_tokens else "bold red"),
    ]


def facts(total: Score, about: Sequence[tuple[str, str]]) -> Table:
    """The facts below the table, as two columns."""
    rates = " ".join(f"{rate:.2f}" for rate in total.speculative.stats.acceptance_at_depth)
    times = f"{total.plain.total_s:.1f} s plain, {total.speculative.total_s:.1f} s speculative"
    prefill = f"{total.plain.read_s:.1f} s and {total.speculative.read_s:.1f} s of it for prefill"
    known = [
        ("acceptance by depth", rates or "nothing drafted"),
        ("a drafted round", total.costs),
        ("total time", f"{times}; {prefill}"),
    ]
    return fact_table([*known, *about])
