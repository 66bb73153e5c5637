"""The picture of a trace, for a terminal and as an SVG.

The colours of origins are parameters. Everything that a colour shows is also shown by words or marks.
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
from forerun.trace.values import Fate, Rule, Trace, TracedNode, TracedRound, quote

Styles = Mapping[Origin, Style]

INDENT = "  "
DIM, BOLD, WRONG = Style(dim=True), Style(bold=True), Style(color="red")
MARKS: Mapping[Fate, str] = {"accepted": "✓", "rejected": "✗", "not judged": "·"}
RULES: Mapping[Rule, str] = {
    "follow": "A draft token is accepted (✓) if the target samples the same token there.",
    "token": "A draft token is accepted (✓) if its coin, uniform in (0, 1), is below p/q. At a rejection (✗) the token "
    "is sampled from the residual max(p - q, 0).",
    "block": "A draft token is accepted (✓) if its coin, uniform in (0, 1), is below its h, or a later token's coin is "
    "below the h of that token; h compares p with q over all tokens up to its own. At a rejection (✗) the token is "
    "sampled from the residual of p and q.",
}
SHARED_NOISE = "Both use the same noise, so they agree more often than with independent noise."
GREEDY = "At temperature 0, the most likely token has probability 1."
ORIGINS: Mapping[Origin, str] = {
    Origin.RECOVERED: "recovered: replaces a rejected token",
    Origin.BONUS: "bonus: one token after the draft",
    Origin.TARGET: "plain: sampled without a draft",
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
    tables = [list(round_rows(round_, styles)) for round_ in trace.rounds]
    width = min(MOST_TOKEN, max([LEAST_TOKEN, *(line[0].cell_len for lines in tables for line in lines)]))
    before = trace.prompt
    parts: list[RenderableType] = [*legend(trace)]
    for round_, lines in zip(trace.rounds, tables, strict=True):
        choice = [Text(INDENT + round_.choice, DIM)] if round_.choice else []
        parts += [Text(), as_table(round_, lines, width), *choice, so_far(before, round_, styles)]
        before = trace.prompt + round_.text
    return Group(*parts, Text(), *summary(trace))


def legend(trace: Trace) -> Iterator[Text]:
    """The legend of the values and marks that occur in the trace."""
    nodes = [node for round_ in trace.rounds for node in round_.guesses]
    if not nodes:
        yield Text("Nothing is drafted: this is plain decoding, one token per pass of the target.")
        return
    unknown = any(node.q is None for node in nodes)
    ends = " (-: it has none)." if unknown else "."
    yield Text.assemble(
        ("p", BOLD), ": the target's probability of the token.  ", ("q", BOLD), ": the drafter's" + ends
    )
    yield from (Text(RULES[rule]) for rule in dict.fromkeys(r.rule for r in trace.rounds if r.guesses))
    if trace.temperature == 0:
        yield Text(GREEDY)
    elif trace.verification == "coupled" and not unknown:
        yield Text(SHARED_NOISE)


def round_rows(round_: TracedRound, styles: Styles) -> Iterator[list[Text]]:
    """The table rows of a round: its draft tokens, depth first, then the token after them."""
    look = {"accepted": styles[Origin.DRAFTED], "rejected": WRONG, "not judged": DIM}
    for branch, node in with_branches(round_):
        q = "-" if node.q is None else f"{node.q:.3f}"
        first = Text.assemble(INDENT, (branch, DIM), (quote(node.text), look[node.verdict]))
        verdict = Text.assemble((MARKS[node.verdict], look[node.verdict]), " " + node.reason)
        yield [first, Text(q), Text(f"{node.p:.3f}"), verdict]
    for token in round_.emitted:
        if token.origin is not Origin.DRAFTED:
            first, style = Text.assemble(INDENT, (quote(token.text), styles[token.origin])), styles[token.origin]
            yield [first, Text(), Text(f"{token.p:.3f}"), Text.assemble(("+", style), " " + ORIGINS[token.origin])]


def with_branches(round_: TracedRound, parent: int = 0, indent: str = "") -> Iterator[tuple[str, TracedNode]]:
    """(branch lines, node) of the nodes below a parent, depth first; chains have no branch lines."""
    children = round_.children(parent)
    for node in children:
        last = node is children[-1]
        branch, below = ("└ ", "  ") if last else ("├ ", "│ ")
        yield indent + branch if round_.has_branches else "", node
        yield from with_branches(round_, node.node, indent + below)


def as_table(round_: TracedRound, lines: Sequence[list[Text]], width: int) -> Table:
    """A round's table with a header; `width`: of the first column."""
    counts = f"{len(round_.guesses)} drafted, {round_.num_accepted} accepted" if round_.guesses else ""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=Style())
    table.add_column(Text(f"round {round_.number}", BOLD), width=width, no_wrap=True, overflow="ellipsis")
    table.add_column(Text("q", DIM), justify="right", width=5, no_wrap=True)
    table.add_column(Text("p", DIM), justify="right", width=5, no_wrap=True)
    table.add_column("prefills the prompt" if round_.num_prompt_tokens else counts, overflow="fold")
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
        law = f"With {trace.verification} verification, the tokens have the distribution of plain decoding"
        yield Text(f"{law}; with --verification coupled they are the same tokens.")
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
