"""The HTML report of a tuning: a single file that needs no network, for light and dark mode.

This file decides its content, `page.html` its layout. Charts are inline SVG.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

from jinja2 import Environment
from markupsafe import Markup
from rich.text import Text

from forerun.bench.chart import COLOURS, LinePanel, Series, svg
from forerun.report import shortened
from forerun.tune.report import TuneReport
from forerun.tune.show import WORTH, drafters, facts_of, memory_figures, speeds, template_line, title, verdict
from forerun.tune.study import Studied

WIDTH = 640  # pixels of a chart without its legend
NAME = 24  # maximum length of a drafter's name; longer ones lose their middle
FASTER = "times as fast as plain decoding"


def html_page(report: TuneReport) -> str:
    """The page as HTML."""
    sections = [(title(report, t), list(speed_charts(report, t)), [speeds(report, t)]) for t in report.temperatures]
    sections.append((WORTH, list(acceptance_charts(report)), [drafters(report), memory_figures(report)]))
    template = resources.files("forerun").joinpath("tune/page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return environment.from_string(template).render(
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
    """The CSS class of a line or cell, from its colour on the terminal; "" if it has none."""
    style = str(value.style) if isinstance(value, Text) else ""
    return ("good" if "green" in style else "bad") if style else ""


def speed_charts(report: TuneReport, temperature: float) -> Iterator[tuple[Markup, str]]:
    """(chart, caption) pairs of speed at a temperature."""
    first = report.selection.batches[0]
    if any(each.cell(first, temperature) for each in report.studied):
        yield chart(batch_panel(report, temperature)), "Measured speed-up with quartiles"
        yield chart(depth_panel(report, first, temperature)), f"Speed-up by depth, batch {first}"


def acceptance_charts(report: TuneReport) -> Iterator[tuple[Markup, str]]:
    """(chart, caption) pairs of acceptance by depth."""
    for temperature in report.temperatures:
        series = [
            Series(legend(each), list(enumerate(rates, start=1)), colour_of(report, each))
            for each in report.studied
            if (rates := each.acceptance.get(temperature, {}).get(""))
        ]
        if series:
            panel = LinePanel(series, "depth", "acceptance, given that all before were accepted")
            yield chart(panel), f"Acceptance by depth, temperature {temperature:g}"


def chart(panel: LinePanel) -> Markup:
    """A chart as markup that is not escaped."""
    return Markup(svg([[panel]], WIDTH))


def colour_of(report: TuneReport, each: Studied) -> str:
    """A candidate's colour in all charts."""
    return COLOURS[report.studied.index(each) % len(COLOURS)]


def legend(each: Studied) -> str:
    """A drafter's name for a legend."""
    return shortened(each.candidate.label, NAME)


def batch_panel(report: TuneReport, temperature: float) -> LinePanel:
    """Measured speed-up by batch size with quartiles, and the predictions."""
    series = []
    for each in report.studied:
        cells = [cell for batch in sorted(report.selection.batches) if (cell := each.cell(batch, temperature))]
        measured = {c.group.batch: c.drafted.speed_up for c in cells if c.drafted and c.drafted.speed_up}
        points, colour = [(batch, spread.median) for batch, spread in measured.items()], colour_of(report, each)
        series.append(Series(legend(each), points, colour, spreads=list(measured.values())))
        series.append(Series("", [(c.group.batch, c.prediction.speed_up) for c in cells], colour, "x"))
    ticks = sorted(report.selection.batches)
    return LinePanel(series, "batch (lines: measured, crosses: predicted)", FASTER, level=1.0, ticks=ticks)


def depth_panel(report: TuneReport, batch: int, temperature: float) -> LinePanel:
    """Predicted speed-up by depth at a batch size, and the measured one at the best depth."""
    series = []
    for each in report.studied:
        if cell := each.cell(batch, temperature):
            colour, prediction = colour_of(report, each), cell.prediction
            series.append(Series(legend(each), list(enumerate(prediction.by_depth, start=1)), colour, "-"))
            if cell.speed_up:
                series.append(Series("", [(prediction.depth, cell.speed_up)], colour))
    return LinePanel(series, "draft tokens per round (lines: predicted, dots: measured)", FASTER, level=1.0)
