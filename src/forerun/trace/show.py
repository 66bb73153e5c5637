"""The picture of a trace, for a terminal and as an SVG.

The colours of origins are passed in. Everything that a colour shows is also shown in words or marks.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from forerun.accept.commit import Origin
from forerun.report import counted
from forerun.trace.values import Fate, Guess, Rule, Trace, TracedRound, quote

Styles = Mapping[Origin, Style]

INDENT = "  "
DIM, BOLD, WRONG = Style(dim=True), Style(bold=True), Style(color="red")
MARKS: Mapping[Fate, str] = {"accepted": "✓", "rejected": "✗", "not judged": "·"}
RULES: Mapping[Rule, str] = {
    "follow": "A guess is accepted (✓) if the target's own draw in its place is the same token, however likely it was.",
    "token": "A guess is accepted (✓) if its coin, uniform in (0, 1), lies below p/q. At a rejection (✗) the token is "
    "drawn from what p gives and q does not.",
    "block": "A guess is accepted (✓) if its coin, uniform in (0, 1), or that of a later guess lies below its h, which "
    "weighs p against q over all guesses up to it. At a rejection (✗) the token is drawn from what p gives and q does "
    "not.",
}
SHARED_NOISE = "Both draw with the same noise, so they agree more often than two separate draws."
GREEDY = "At temperature 0 all probability lies on the likeliest token."
ORIGINS: Mapping[Origin, str] = {
    Origin.RECOVERED: "recovered: drawn in place of a guess",
    Origin.BONUS: "bonus: one more where guesses end",
    Origin.TARGET: "nothing guessed: the target's own",
}
LATEST = 160  # characters of text shown per round
LEAST_TOKEN, MOST_TOKEN = 12, 26  # width of the token column
SVG_WIDTH = 80
SVG_FORMAT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px / {line_height}px "Fira Code", Menlo, Consolas, monospace }}
{styles}
</style>
<defs>
{lines}
</defs>
<rect x="1" y="1" width="99.8%" height="99.8%" rx="8" fill="#ffffff" stroke="#d0d7de"/>
<g transform="translate({terminal_x}, 24)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def picture(trace: Trace, styles: Styles) -> RenderableType:
    """The trace as a renderable: legend, rounds and summary."""
    tables = [list(lines_of(round_, styles)) for round_ in trace.rounds]
    width = min(MOST_TOKEN, max([LEAST_TOKEN, *(line[0].cell_len for lines in tables for line in lines)]))
    before = trace.prompt
    parts: list[RenderableType] = [*legend(trace)]
    for round_, lines in zip(trace.rounds, tables, strict=True):
        choice = [Text(INDENT + round_.choice, DIM)] if round_.choice else []
        parts += [Text(), as_table(round_, lines, width), *choice, so_far(before, round_, styles)]
        before = trace.prompt + round_.text
    return Group(*parts, Text(), *summary(trace))


def legend(trace: Trace) -> Iterator[Text]:
    """The legend, limited to what occurs."""
    guesses = [guess for round_ in trace.rounds for guess in round_.guesses]
    if not guesses:
        yield Text("Nothing is guessed: this is plain decoding, one token for each pass of the target.")
        return
    unknown = any(guess.q is None for guess in guesses)
    ends = " (-: it has none)." if unknown else "."
    yield Text.assemble(
        ("p", BOLD), ": the target's probability of the token.  ", ("q", BOLD), ": the drafter's" + ends
    )
    yield from (Text(RULES[rule]) for rule in dict.fromkeys(r.rule for r in trace.rounds if r.guesses))
    if trace.temperature == 0:
        yield Text(GREEDY)
    elif trace.verification == "coupled" and not unknown:
        yield Text(SHARED_NOISE)


def lines_of(round_: TracedRound, styles: Styles) -> Iterator[list[Text]]:
    """The cells of a round's drafted tokens, depth first, then of the token after them."""
    look = {"accepted": styles[Origin.DRAFTED], "rejected": WRONG, "not judged": DIM}
    for branch, guess in laid_out(round_):
        q = "-" if guess.q is None else f"{guess.q:.3f}"
        first = Text.assemble(INDENT, (branch, DIM), (quote(guess.text), look[guess.verdict]))
        verdict = Text.assemble((MARKS[guess.verdict], look[guess.verdict]), " " + guess.reason)
        yield [first, Text(q), Text(f"{guess.p:.3f}"), verdict]
    for token in round_.emitted:
        if token.origin is not Origin.DRAFTED:
            first, style = Text.assemble(INDENT, (quote(token.text), styles[token.origin])), styles[token.origin]
            yield [first, Text(), Text(f"{token.p:.3f}"), Text.assemble(("+", style), " " + ORIGINS[token.origin])]


def laid_out(round_: TracedRound, node: int = 0, indent: str = "") -> Iterator[tuple[str, Guess]]:
    """(branch lines, guess) of the guesses below a node, depth first; chains have no branch lines."""
    children = round_.children(node)
    for guess in children:
        last = guess is children[-1]
        branch, below = ("└ ", "  ") if last else ("├ ", "│ ")
        yield indent + branch if round_.branches else "", guess
        yield from laid_out(round_, guess.node, indent + below)


def as_table(round_: TracedRound, lines: Sequence[list[Text]], width: int) -> Table:
    """A round's table with a header; `width`: of the first column."""
    done = f"{len(round_.guesses)} guessed, {round_.num_accepted} accepted" if round_.guesses else ""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=Style())
    table.add_column(Text(f"round {round_.number}", BOLD), width=width, no_wrap=True, overflow="ellipsis")
    table.add_column(Text("q", DIM), justify="right", width=5, no_wrap=True)
    table.add_column(Text("p", DIM), justify="right", width=5, no_wrap=True)
    table.add_column("reads the prompt" if round_.num_prompt_tokens else done, overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def so_far(before: str, round_: TracedRound, styles: Styles) -> Table:
    """The end of the text so far, with the round's part in the colours of origins."""
    text = Text(printed(before))
    for segment in round_.segments:
        text.append(printed(segment.text), styles[segment.origin] + BOLD)
    shown = text[-LATEST:] if len(text) > LATEST else text
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(Text(INDENT + "text", DIM), Text.assemble("…", shown) if shown is not text else shown)
    return grid


def printed(text: str) -> str:
    """A text on one line, with control characters escaped."""
    return "".join("↵" if c == "\n" else quote(c)[1:-1] for c in text)


def summary(trace: Trace) -> Iterator[Text]:
    """The numbers of tokens and rounds, and whether plain decoding gave the same tokens."""
    tokens, rounds = counted(len(trace.token_ids), "token"), counted(len(trace.rounds), "round")
    yield Text(f"{rounds} for {tokens}: plain decoding needs {counted(len(trace.token_ids), 'target pass')}.", BOLD)
    if trace.same_as_plain is None:
        law = f"By {trace.verification} verification they follow the law of plain decoding"
        yield Text(f"{law}; the very same tokens are what --verification coupled gives.")
    else:
        yield Text(
            f"Same tokens as plain decoding: {'yes' if trace.same_as_plain else 'NO'} (seed {trace.seed}).", BOLD
        )


def svg(trace: Trace, styles: Styles, width: int = SVG_WIDTH) -> str:
    """The picture of a trace as SVG, dark on light."""
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="standard", no_color=False
    )
    console.print(picture(trace, styles), highlight=False)
    return console.export_svg(title="", theme=DEFAULT_TERMINAL_THEME, code_format=SVG_FORMAT)
