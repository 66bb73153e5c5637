"""The page of a tuning: one file that opens without a network, in light and dark.

This file decides what stands on it. Everything is inside the file, pictures as SVG; nothing is loaded from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from rich.text import Text

from forerun.figure_table import FigureTable
from forerun.tune.charts import acceptance_chart, can_draw, depth_chart, speed_chart
from forerun.tune.report import TuneReport
from forerun.tune.show import (
    WORTH,
    cost_figures,
    drafters,
    facts_of,
    memory_figures,
    speeds,
    template_line,
    title,
    verdict,
)

NO_CHARTS = "Charts need matplotlib, which is not installed: pip install 'forerun[report]', and run the command again."
STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1c2126; --soft: #5c6670; --rule: #d5dae0; --box: #f4f6f8;
  --good: #1d7a3e; --bad: #a65b00; }
@media (prefers-color-scheme: dark) { :root { --page: #14181c; --ink: #e4e8ec; --soft: #9aa5b0; --rule: #3a424b;
  --box: #1d2329; --good: #6fcf8f; --bad: #e8a64c; } }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
p { margin: .4rem 0; }
.soft, caption, dt { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); }
.verdict { background: var(--box); border-radius: .5rem; padding: .75rem 1rem; margin: 1rem 0; font-size: 1.1rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 9rem; max-width: 17rem; }
h1, dd { overflow-wrap: anywhere; }
tr.best td { font-weight: 600; background: var(--box); } tr.part td { color: var(--soft); }
tr.part td:first-child { padding-left: 1.6rem; }
svg { width: 100%; height: auto; display: block; } figure { margin: .5rem 0 0; }
figcaption { color: var(--soft); font-size: .9rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .92rem; } dd { margin: 0; }
summary { cursor: pointer; margin: .8rem 0 .3rem; }
pre { background: var(--box); border-radius: .5rem; padding: .6rem .9rem; overflow-x: auto; font-size: .88rem;
  margin: .3rem 0 .8rem; }
"""


def html_page(report: TuneReport) -> str:
    """The whole page."""
    target = escape(str(report.about["model"]["target"]))
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>forerun tune: {target}</title>",
        f"<style>{STYLE}</style></head><body>",
        f"<h1>Does speculation help {target}?</h1>",
        *answer(report),
        *(line for temperature in report.temperatures for line in speed_section(report, temperature)),
        *drafter_section(report),
        *use_section(report),
        "<h2>What was measured</h2><dl>",
        *(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts_of(report)),
        "</dl></body></html>",
    ]
    return "\n".join(lines) + "\n"


def answer(report: TuneReport) -> Iterator[str]:
    """What it means, first of all."""
    found = [f'<p class="{tone(line)}">{escape(line.plain)}</p>' for line in verdict(report)]
    yield f'<div class="verdict">{"".join(found)}</div>'


def tone(line: Text) -> str:
    """The class of a line, by its colour on the terminal."""
    return "good" if "green" in str(line.style) else "bad"


def speed_section(report: TuneReport, temperature: float) -> Iterator[str]:
    """Speed at a temperature: charts and the table."""
    yield f"<h2>{escape(title(report, temperature))}</h2>"
    under = template_line(report.about["prompts"])
    if can_draw():
        if any(cell.group.temperature == temperature for each in report.studied for cell in each.cells):
            first = report.settings.batches[0]
            yield figure(speed_chart(report, temperature), f"Measured speed-up with quartiles; {under}.")
            yield figure(depth_chart(report, first, temperature), f"Speed-up by depth, batch {first}; {under}.")
    else:
        yield f'<p class="bad">{escape(NO_CHARTS)}</p>'
    yield table(speeds(report, temperature))


def drafter_section(report: TuneReport) -> Iterator[str]:
    """Acceptance and memory."""
    yield f"<h2>{WORTH}</h2>"
    if can_draw():
        for temperature in report.temperatures:
            if any(each.acceptance.get(temperature, {}).get("") for each in report.studied):
                under = f"Acceptance by depth, temperature {temperature:g}; {template_line(report.about['prompts'])}."
                yield figure(acceptance_chart(report, temperature), under)
    yield table(drafters(report))
    yield table(memory_figures(report))
    yield "<details><summary>What rounds take, as measured at the start</summary>"
    yield f"{table(cost_figures(report))}</details>"


def use_section(report: TuneReport) -> Iterator[str]:
    """How to use the choice, here and elsewhere."""
    if report.pick is None:
        return
    yield "<h2>How to use it</h2><p>Every command reads the settings beside this page:</p>"
    yield "<pre>forerun generate --config forerun.toml &quot;…&quot;</pre>"
    translated = report.translated()
    if translated:
        warning = "which were not run: what is fastest here need not be fastest there"
        yield f"<p>Translations for other engines, {warning}.</p>"
    for each in translated:
        note = f' <span class="soft">({escape(each.note)})</span>' if each.note else ""
        yield f"<p>{escape(each.engine)}{note}</p>" + (f"<pre>{escape(each.options)}</pre>" if each.options else "")


def figure(svg: str, caption: str) -> str:
    """A chart with its caption."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def table(figures: FigureTable) -> str:
    """A table of figures, as on the terminal."""
    rows = [
        row(cells, style) for cells, style in zip(figures.rows, figures.styles or [""] * len(figures.rows), strict=True)
    ]
    heads = "".join(
        f"<th>{escape(head.replace('-' + chr(10), '')).replace(chr(10), '<br>')}</th>" for head in figures.heads
    )
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def row(cells: Sequence[str | Text], style: str) -> str:
    """One line of a table: the fastest is marked, a category is part of what stands above it."""
    best = isinstance(cells[0], Text) and "green" in str(cells[0].style)
    inside = "".join(cell(value) for value in cells)
    kind = ' class="best"' if best else ' class="part"' if style else ""
    return f"<tr{kind}>{inside}</tr>"


def cell(value: str | Text) -> str:
    """One cell, with its colour if it has one."""
    text = escape(str(value).strip())
    coloured = isinstance(value, Text) and bool(str(value.style))
    return f'<td class="{tone(value)}">{text}</td>' if coloured and isinstance(value, Text) else f"<td>{text}</td>"
