"""The page of a tuning: one file that opens without a network, in light and dark.

This file decides what stands on it. Everything is inside the file, charts as SVG; nothing is loaded from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import Environment
from markupsafe import Markup
from rich.text import Text

from forerun.bench.chart import COLOURS, LinePanel, Series, svg
from forerun.tune.report import TuneReport
from forerun.tune.show import WORTH, drafters, facts_of, memory_figures, speeds, template_line, title, verdict
from forerun.tune.study import Studied

WIDTH = 640  # pixels of a chart without its legend
NAME = 24  # characters of a drafter's name; of longer ones the end is shown
FASTER = "times as fast as plain decoding"
PAGE = """\
{% macro table(figures) %}
<div class="scroll"><table><thead><tr>
{%- for head in figures.heads %}<th>{{ head.replace("-\\n", "").split("\\n") | join(br) }}</th>{% endfor -%}
</tr></thead><tbody>
{% for cells in figures.rows %}
<tr{% if tone(cells[0]) == "good" %} class="best"{% elif figures.styles and figures.styles[loop.index0] %} class="part"
{%- endif %}>
{%- for cell in cells %}<td{% if tone(cell) %} class="{{ tone(cell) }}"{% endif %}>{{ (cell ~ "").strip() }}</td>
{%- endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}
{% macro figures(charts) %}
{% for chart, caption in charts %}
<figure>{{ chart }}<figcaption>{{ caption }}; {{ template }}.</figcaption></figure>
{% endfor %}
{% endmacro %}
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>forerun tune: {{ target }}</title>
<style>
:root { color-scheme: light dark; --page: #ffffff; --ink: #1c2126; --soft: #5c6670; --rule: #d5dae0; --box: #f4f6f8;
  --good: #1d7a3e; --bad: #a65b00; }
@media (prefers-color-scheme: dark) { :root { --page: #14181c; --ink: #e4e8ec; --soft: #9aa5b0; --rule: #3a424b;
  --box: #1d2329; --good: #6fcf8f; --bad: #e8a64c; } }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
p { margin: .4rem 0; }
.soft, dt { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); }
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
pre { background: var(--box); border-radius: .5rem; padding: .6rem .9rem; overflow-x: auto; font-size: .88rem;
  margin: .3rem 0 .8rem; }
</style></head><body>
<h1>Does speculation help {{ target }}?</h1>
<div class="verdict">
{% for line in verdict %}
<p class="{{ tone(line) }}">{{ line.plain }}</p>
{% endfor %}
</div>
{% for title, charts, tables in sections %}
<h2>{{ title }}</h2>
{{ figures(charts) }}{% for each in tables %}{{ table(each) }}{% endfor %}
{% endfor %}
{% if report.pick %}
<h2>How to use it</h2><p>Every command reads the settings beside this page:</p>
<pre>forerun generate --config forerun.toml &quot;…&quot;</pre>
{% for each in report.translated() %}
{% if loop.first %}
<p>Translations for other engines, which were not run: what is fastest here need not be fastest there.</p>
{% endif %}
<p>{{ each.engine }}{% if each.note %} <span class="soft">({{ each.note }})</span>{% endif %}</p>
{% if each.options %}
<pre>{{ each.options }}</pre>
{% endif %}
{% endfor %}
{% endif %}
<h2>What was measured</h2><dl>
{% for name, value in facts %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl></body></html>
"""


def html_page(report: TuneReport) -> str:
    """The whole page."""
    sections = [(title(report, t), list(speed_charts(report, t)), [speeds(report, t)]) for t in report.temperatures]
    sections.append((WORTH, list(acceptance_charts(report)), [drafters(report), memory_figures(report)]))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return environment.from_string(PAGE).render(
        report=report,
        target=report.about["model"]["target"],
        verdict=list(verdict(report)),
        sections=sections,
        facts=list(facts_of(report)),
        template=template_line(report.about["prompts"]),
        tone=tone,
        br=Markup("<br>"),
    )


def tone(value: str | Text) -> str:
    """The class of a line or cell, by its colour on the terminal; empty where it has none."""
    style = str(value.style) if isinstance(value, Text) else ""
    return ("good" if "green" in style else "bad") if style else ""


def speed_charts(report: TuneReport, temperature: float) -> Iterator[tuple[Markup, str]]:
    """Charts of speed at a temperature, with their captions."""
    first = report.settings.batches[0]
    if any(each.cell(first, temperature) for each in report.studied):
        yield chart(batch_panel(report, temperature)), "Measured speed-up with quartiles"
        yield chart(depth_panel(report, first, temperature)), f"Speed-up by depth, batch {first}"


def acceptance_charts(report: TuneReport) -> Iterator[tuple[Markup, str]]:
    """How often a guess is accepted where those before it were, by depth, with captions."""
    for temperature in report.temperatures:
        series = [
            Series(shortened(each), list(enumerate(rates, start=1)), colour_of(report, each))
            for each in report.studied
            if (rates := each.acceptance.get(temperature, {}).get(""))
        ]
        if series:
            panel = LinePanel(series, "place of the guess in its draft", "accepted, where those before were")
            yield chart(panel), f"Acceptance by depth, temperature {temperature:g}"


def chart(panel: LinePanel) -> Markup:
    """A chart that the page takes as it is."""
    return Markup(svg([[panel]], WIDTH))


def colour_of(report: TuneReport, each: Studied) -> str:
    """A candidate's colour in all charts."""
    return COLOURS[report.studied.index(each) % len(COLOURS)]


def shortened(each: Studied) -> str:
    """A name for a legend, which would take the chart's room if it were the whole path of a model."""
    name = each.candidate.draft
    return name if len(name) <= NAME else f"…{name[1 - NAME :]}"


def batch_panel(report: TuneReport, temperature: float) -> LinePanel:
    """Measured speed-up by batch size with quartiles, and what was expected."""
    series = []
    for each in report.studied:
        cells = [cell for batch in sorted(report.settings.batches) if (cell := each.cell(batch, temperature))]
        measured = {c.group.batch: c.drafted.speed_up for c in cells if c.drafted and c.drafted.speed_up}
        points, colour = [(batch, spread.median) for batch, spread in measured.items()], colour_of(report, each)
        series.append(Series(shortened(each), points, colour, spreads=list(measured.values())))
        series.append(Series("", [(c.group.batch, c.prediction.speed_up) for c in cells], colour, "x"))
    ticks = sorted(report.settings.batches)
    return LinePanel(series, "batch (lines: measured, crosses: predicted)", FASTER, level=1.0, ticks=ticks)


def depth_panel(report: TuneReport, batch: int, temperature: float) -> LinePanel:
    """Expected speed-up by depth at a batch size, and what was measured at the best depth."""
    series = []
    for each in report.studied:
        if cell := each.cell(batch, temperature):
            colour, prediction = colour_of(report, each), cell.prediction
            series.append(Series(shortened(each), list(enumerate(prediction.by_depth, start=1)), colour, "-"))
            if cell.speed_up:
                series.append(Series("", [(prediction.depth, cell.speed_up)], colour))
    return LinePanel(series, "guesses per round (lines: predicted, dots: measured)", FASTER, level=1.0)
