"""Charts: panels of lines, as the content of a PNG file or as SVG inside a page, which suits light and dark.

This file decides colours and layout, and is the only one of all measurements that imports matplotlib.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.bench.figures import Spread
from forerun.errors import InvalidRequest, MissingPackage

COLOURS = ("#3b82c4", "#d9762b", "#3a9a5b", "#b05fb0", "#b39200", "#d1495b", "#2aa5a0", "#8a7f72")  # on light and dark
WIDTH, HEIGHT, DPI = 4.5, 3.6, 150  # inches of a panel in a PNG file
PAGE_WIDTH, PAGE_HEIGHT = 8.4, 3.4
INK, RULE = "#010203", "#040506"  # stand for the page's colours until the chart is text
PAGE_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10.0,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), RULE),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.linewidth": 0.6,
    "axes.spines.left": False,
    "ytick.major.size": 0,
}
REPLACED = (  # in the text of an SVG
    (re.compile(r"^.*?(?=<svg)|\s*<metadata>.*?</metadata>", re.DOTALL), ""),
    (re.compile(r'<svg [^>]*(viewBox="[^"]*")[^>]*>'), r"<svg \1>"),
    (re.compile(INK), "currentColor"),
    (re.compile(RULE), "var(--rule)"),
)


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_charts(option: str, extra: str) -> None:
    """Raise MissingPackage where an option's charts cannot be drawn."""
    if not can_draw():
        raise MissingPackage(f"{option} needs matplotlib, which is not installed: pip install 'forerun[{extra}]'")


def check_picture(path: Path) -> None:
    """Raise, before anything is run, where a picture could not be drawn."""
    require_charts("--picture", "bench")
    if path.suffix != ".png":
        raise InvalidRequest("picture", f"{path} must be a .png file.")


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one name, from left to right, with bars from quartile to quartile where `spreads` are known."""

    name: str
    points: Sequence[tuple[int | float, int | float]]
    colour: str
    form: str = "o-"
    spreads: Sequence[Spread] = ()


@dataclass(frozen=True, slots=True)
class LinePanel:
    """Draws series under a title, and a horizontal line at `level`; `ticks` are those of a logarithmic x-axis."""

    series: Sequence[Series]
    x: str
    title: str = ""
    y: str = ""
    level: float | None = None
    ticks: Sequence[int | float] = ()

    def draw(self, axes: Any) -> None:
        """Draw into matplotlib's axes."""
        for each in self.series:
            xs, ys = zip(*each.points, strict=True) if each.points else ((), ())
            bars = [[s.median - s.low for s in each.spreads], [s.high - s.median for s in each.spreads]]
            axes.errorbar(
                xs,
                ys,
                yerr=bars if each.spreads else None,
                fmt=each.form,
                color=each.colour,
                markersize=4,
                capsize=2,
                label=each.name or None,
            )
        if self.ticks:
            axes.set_xscale("log", base=2)
            axes.set_xticks(self.ticks, [f"{tick:g}" for tick in self.ticks])
        elif all(x == int(x) for each in self.series for x, _ in each.points):
            axes.xaxis.get_major_locator().set_params(integer=True)
        if self.level is not None:
            axes.axhline(self.level, color="#999999", linewidth=0.8, linestyle="--")
        axes.set_title(self.title, fontsize="medium")
        axes.set_xlabel(self.x)
        axes.set_ylabel(self.y)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)


def png(title: str, rows: Sequence[Sequence[LinePanel]]) -> bytes:
    """A picture of rows of panels, whose first ones have a legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = WIDTH * max(map(len, rows)), HEIGHT * len(rows)
    figure, file = Figure(figsize=size, layout="constrained"), io.BytesIO()
    FigureCanvasAgg(figure)
    for axes, panels in zip(figure.subplots(len(rows), len(rows[0]), squeeze=False), rows, strict=True):
        for own, panel in zip(axes, panels, strict=True):
            panel.draw(own)
        axes[0].legend(fontsize="small", frameon=False)
    figure.suptitle(title, fontsize="medium", wrap=True)
    figure.savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def svg(panel: LinePanel) -> str:
    """An SVG element as wide as the page; its text has the colour of the page."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    file = io.StringIO()
    with rc_context(PAGE_STYLE):
        figure = Figure(figsize=(PAGE_WIDTH, PAGE_HEIGHT), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        panel.draw(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    for pattern, new in REPLACED:
        text = pattern.sub(new, text)
    return text
