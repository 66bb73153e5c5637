"""Charts of a tuning, as SVG that stands inside a page: text has the colour of the page, so it suits light and dark.

This is the only file of a tuning that imports matplotlib.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from forerun.bench.figures import Spread
from forerun.errors import MissingPackage
from forerun.tune.report import TuneReport
from forerun.tune.study import Studied, TuneCell

COLOURS = ("#3b82c4", "#d9762b", "#3a9a5b", "#b05fb0", "#b39200", "#d1495b", "#2aa5a0", "#8a7f72")  # on light and dark
TEXT, RULE = "#010203", "#040506"  # stand for the page's colours until the chart is text
WIDTH, HEIGHT = 8.4, 3.4  # inches
BAR = 0.8  # of the room of a batch size that its bars take
NAME = 24  # characters of a drafter's name; of longer ones the end is shown
REPLACED = (
    (re.compile(r"^.*?(?=<svg)", re.DOTALL), ""),
    (re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL), ""),
    (re.compile(r' xmlns(:\w+)?="[^"]*"'), ""),
    (re.compile(TEXT), "currentColor"),
    (re.compile(RULE), "var(--rule)"),
    (
        re.compile(r'(<svg [^>]*?)width="[^"]*" height="[^"]*"|(<svg [^>]*?)height="[^"]*" ([^>]*?)width="[^"]*"'),
        r"\1\2\3",
    ),
)
STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10.0,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": RULE,
    "axes.titlecolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "ytick.major.size": 0,
}
Draw = Callable[[Any], None]


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_charts() -> None:
    """Raise MissingPackage where no chart could be drawn."""
    if not can_draw():
        raise MissingPackage("--html needs matplotlib, which is not installed: pip install 'forerun[report]'")


def chart(draw: Draw) -> str:
    """An SVG element with what `draw` puts into a panel, as wide as the page."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    file = io.StringIO()
    with rc_context(STYLE):
        picture = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        FigureCanvasSVG(picture)
        draw(picture.subplots())
        picture.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    for pattern, new in REPLACED:
        text = pattern.sub(new, text)
    return text


def colour_of(report: TuneReport, each: Studied) -> str:
    """A candidate's colour, the same in all charts."""
    return COLOURS[report.studied.index(each) % len(COLOURS)]


def shortened(name: str) -> str:
    """A name for a legend, which would take the chart's room if it were the whole path of a model."""
    return name if len(name) <= NAME else f"…{name[1 - NAME :]}"


def speed_chart(report: TuneReport, temperature: float) -> str:
    """Measured speed-up by batch size, a bar for each candidate, with quartiles and what was expected."""
    shown = [each for each in report.studied if any(c.group.temperature == temperature for c in each.cells)]

    def draw(panel: Any) -> None:
        width = BAR / max(1, len(shown))
        expected: list[tuple[float, float]] = []
        for number, each in enumerate(shown):
            for place, batch in enumerate(report.settings.batches):
                cell = each.cell(batch, temperature)
                if cell is not None:
                    x = place + (number + 0.5) * width - BAR / 2
                    bar(panel, x, width, cell, colour_of(report, each))
                    expected.append((x, cell.prediction.speed_up))
            panel.bar([0], [0], color=colour_of(report, each), label=shortened(each.candidate.draft))
        panel.plot(*zip(*expected, strict=True), "D", color=TEXT, markersize=4, label="predicted", fillstyle="none")
        panel.axhline(1.0, color=TEXT, linewidth=1.0, linestyle="--", label="plain decoding")
        panel.set_xticks(range(len(report.settings.batches)), [f"batch {batch}" for batch in report.settings.batches])
        panel.tick_params(axis="x", length=0)
        finish(panel, "times as fast as plain decoding", "")

    return chart(draw)


def bar(panel: Any, x: float, width: float, cell: TuneCell, colour: str) -> None:
    """One bar, from quartile to quartile where it was repeated."""
    spread: Spread | None = cell.drafted.speed_up if cell.drafted else None
    if spread is None:
        return
    reach = [[spread.median - spread.low], [spread.high - spread.median]]
    panel.bar([x], [spread.median], width * 0.9, color=colour, yerr=reach, ecolor=TEXT, error_kw={"linewidth": 1.0})
    panel.text(x, 0.02, f"{spread.median:.2f}", ha="center", va="bottom", fontsize="small", color=TEXT)


def depth_chart(report: TuneReport, batch: int, temperature: float) -> str:
    """Expected speed-up by depth at a batch size, and what was measured at the best depth."""

    def draw(panel: Any) -> None:
        for each in report.studied:
            cell = each.cell(batch, temperature)
            if cell is not None:
                depths, colour = range(1, len(cell.prediction.by_depth) + 1), colour_of(report, each)
                panel.plot(depths, cell.prediction.by_depth, color=colour, label=shortened(each.candidate.draft))
                if cell.speed_up:
                    panel.plot([cell.prediction.depth], [cell.speed_up], "o", color=colour, markersize=7)
        panel.axhline(1.0, color=TEXT, linewidth=1.0, linestyle="--")
        panel.xaxis.get_major_locator().set_params(integer=True)
        finish(panel, "times as fast as plain decoding", "guesses per round (lines: predicted, dots: measured)")

    return chart(draw)


def acceptance_chart(report: TuneReport, temperature: float) -> str:
    """How often a guess is accepted where those before it were, by depth."""

    def draw(panel: Any) -> None:
        for each in report.studied:
            rates: Sequence[float] = each.acceptance.get(temperature, {}).get("", ())
            if rates:
                depths = range(1, len(rates) + 1)
                name, colour = shortened(each.candidate.draft), colour_of(report, each)
                panel.plot(depths, rates, "o-", color=colour, markersize=4, label=name)
        panel.set_ylim(0, 1.05)
        panel.xaxis.get_major_locator().set_params(integer=True)
        finish(panel, "accepted, where those before were", "place of the guess in its draft")

    return chart(draw)


def finish(panel: Any, y: str, x: str) -> None:
    """Labels and the legend."""
    panel.set_ylim(bottom=0)
    panel.set_ylabel(y)
    panel.set_xlabel(x)
    legend = panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")
    for text in legend.get_texts():
        text.set_color(TEXT)
