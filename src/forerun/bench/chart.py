"""Charts: panels of lines, as the content of a PNG file, which matplotlib draws, or as an SVG element of our own.

This file decides colours and layout.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from forerun.bench.figures import Spread
from forerun.errors import InvalidRequest, MissingPackage

COLOURS = ("#3b82c4", "#d9762b", "#3a9a5b", "#b05fb0", "#b39200", "#d1495b", "#2aa5a0", "#8a7f72")  # on light and dark
INCHES, DPI = (4.5, 3.6), 150  # of a panel in a PNG file
HEIGHT, GAP, LEFT, TOP, LETTER = 200, 60, 50, 40, 7  # of panels in an SVG, in pixels; LETTER is one of a legend
MARKS = {"o": "●", "x": "×"}  # by the sign in the form of a series
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#555}.t{font-weight:600}.g{stroke:#8886;stroke-width:.5}"
    ".l{stroke:#888;stroke-dasharray:4}@media(prefers-color-scheme:dark){text{fill:#bbb}}"
)


def check_picture(path: Path) -> None:
    """Raise, before anything is run, where a picture could not be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackage("--picture needs matplotlib, which is not installed: pip install 'forerun[bench]'")
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

    size = INCHES[0] * max(map(len, rows)), INCHES[1] * len(rows)
    figure, file = Figure(figsize=size, layout="constrained"), io.BytesIO()
    FigureCanvasAgg(figure)
    for axes, panels in zip(figure.subplots(len(rows), len(rows[0]), squeeze=False), rows, strict=True):
        for ax, panel in zip(axes, panels, strict=True):
            panel.draw(ax)
        axes[0].legend(fontsize="small", frameon=False)
    figure.suptitle(title, fontsize="medium", wrap=True)
    figure.savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def svg(panels: Sequence[LinePanel], width: int) -> str:
    """An SVG element with panels of so many pixels side by side, each before its legend; it suits light and dark."""
    body, left = "", LEFT
    for panel in panels:
        names = [(each.name, each.colour) for each in panel.series if each.name and each.points]
        body += svg_panel(panel, left, width)
        left += width + GAP
        for line, (name, colour) in enumerate(names):
            body += label(left - GAP + 12, TOP + 16 * line + 8, name, f'style="fill:{colour}"')
        left += max((LETTER * len(name) for name, _ in names), default=0)
    size = f'viewBox="0 0 {left} {HEIGHT + 2 * TOP}" width="{left}" height="{HEIGHT + 2 * TOP}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{body}</svg>\n'


def svg_panel(panel: LinePanel, left: int, width: int) -> str:
    """One panel: a title, a grid of values, and each series with its marks."""
    parts = [label(left, TOP - 16, panel.title or panel.y, 'class="t"')]
    points = [point for each in panel.series for point in each.points]
    if not points:
        return parts[0]
    scale: Callable[[float], float] = math.log2 if panel.ticks else float
    first, last = (scale(end(x for x, _ in points)) for end in (min, max))
    reached = [y for _, y in points] + [spread.high for each in panel.series for spread in each.spreads]
    high = 1.05 * max(*reached, panel.level or 0.0) or 1.0

    def place(x: float | int, y: float | int) -> tuple[float, float]:
        across = (scale(x) - first) / (last - first) if last > first else 0.5
        return round(left + width * across, 1), round(TOP + HEIGHT * (1 - y / high), 1)

    for share in (0.0, 0.5, 1.0):
        _, y = place(points[0][0], share * high)
        parts.append(f'<line class="g" x1="{left}" y1="{y}" x2="{left + width}" y2="{y}"/>')
        parts.append(label(left - 6, y + 4, f"{share * high:.3g}", 'text-anchor="end"'))
    if panel.level is not None:
        _, y = place(points[0][0], panel.level)
        parts.append(f'<line class="l" x1="{left}" y1="{y}" x2="{left + width}" y2="{y}"/>')
    ticks = panel.ticks or sorted({end(x for x, _ in points) for end in (min, max)})
    below = [*((place(tick, 0)[0], 16, f"{tick:g}") for tick in ticks), (left + width / 2, 34, panel.x)]
    parts += [label(x, TOP + HEIGHT + down, text, 'text-anchor="middle"') for x, down, text in below]
    return "".join([*parts, *(svg_series(each, place) for each in panel.series)])


def svg_series(each: Series, place: Callable[[float, float], tuple[float, float]]) -> str:
    """A line, a mark at every point, and a bar from quartile to quartile."""
    at, parts = [place(*point) for point in each.points], list[str]()
    if "-" in each.form:
        line = " ".join(f"{x},{y}" for x, y in at)
        parts.append(f'<polyline fill="none" stroke="{each.colour}" stroke-width="1.6" points="{line}"/>')
    mark = next((mark for mark in MARKS if mark in each.form), "")
    parts += [label(x, y + 4, MARKS[mark], f'text-anchor="middle" style="fill:{each.colour}"') for x, y in at if mark]
    for (x, _), spread in zip(each.points, each.spreads, strict=False):
        (across, low), (_, high) = place(x, spread.low), place(x, spread.high)
        parts.append(f'<line stroke="{each.colour}" x1="{across}" y1="{low}" x2="{across}" y2="{high}"/>')
    return "".join(parts)


def label(x: float | int, y: float | int, text: str, more: str) -> str:
    """Some text at a place."""
    return f'<text x="{x}" y="{y}" {more}>{escape(text)}</text>'
