"""Line charts: rows of panels as one self-contained SVG, for light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from forerun.bench.figures import Spread

COLOURS = ("#3b82c4", "#d9762b", "#3a9a5b", "#b05fb0", "#b39200", "#d1495b", "#2aa5a0", "#8a7f72")  # on light and dark
HEIGHT, GAP, LEFT, TOP, LETTER = 200, 60, 50, 40, 7  # pixels; LETTER: the width of a legend's character
MOST_TICKS = 17  # with more x values, only the first and last are labelled
MARKS = {"o": "●", "x": "×"}  # by the character in a series' form
DASHES = {"--": "6 4", "-.": "8 3 2 3", ":": "2 3", "-": ""}  # by the line in a series' form, longest first
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#555}.t{font-weight:600}.g{stroke:#8886;stroke-width:.5}"
    ".l{stroke:#888;stroke-dasharray:4}@media(prefers-color-scheme:dark){text{fill:#bbb}}"
)


@dataclass(frozen=True, slots=True)
class Series:
    """A named line through points, from left to right, with quartile bars if there are `spreads`."""

    name: str
    points: Sequence[tuple[int | float, int | float]]
    colour: str
    form: str = "o-"
    spreads: Sequence[Spread] = ()


@dataclass(frozen=True, slots=True)
class LinePanel:
    """Series under a title, a horizontal line at `level`, and `ticks` if the x-axis is logarithmic."""

    series: Sequence[Series]
    x: str
    title: str = ""
    level: float | None = None
    ticks: Sequence[int | float] = ()


def svg(rows: Sequence[Sequence[LinePanel]], width: int, title: str = "") -> str:
    """The SVG of rows of panels, `width` pixels wide each, with a legend at the end of each row."""
    body, top, widest = label(LEFT, 16, title, 'class="t"') if title else "", 16 if title else 0, 0
    for panels in rows:
        left = LEFT
        for panel in panels:
            body += f'<g transform="translate({left},{top + TOP})">{svg_panel(panel, width)}</g>'
            left += width + GAP
        named = {each.name: each for panel in panels for each in panel.series if each.name and each.points}
        for line, each in enumerate(named.values()):
            x, y = left - GAP + 12, top + TOP + 16 * line + 8
            body += svg_line(each, f"{x},{y - 4} {x + 24},{y - 4}") + label(x + 30, y, each.name, "")
        widest = max(widest, left + max((30 + LETTER * len(name) for name in named), default=0))
        top += HEIGHT + 2 * TOP
    size = f'viewBox="0 0 {widest} {top}" width="{widest}" height="{top}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{body}</svg>\n'


def svg_panel(panel: LinePanel, width: int) -> str:
    """The SVG of a panel: title, grid and series."""
    parts = [label(0, -16, panel.title, 'class="t"')]
    points = [point for each in panel.series for point in each.points]
    if not points:
        return parts[0]
    scale: Callable[[float], float] = math.log2 if panel.ticks else float
    places = sorted({x for x, _ in points})
    first, last = scale(places[0]), scale(places[-1])
    reached = [y for _, y in points] + [spread.high for each in panel.series for spread in each.spreads]
    values = round_values(max(*reached, panel.level or 0.0))

    def place(x: float | int, y: float | int) -> tuple[float, float]:
        across = (scale(x) - first) / (last - first) if last > first else 0.5
        return round(width * across, 1), round(HEIGHT * (1 - y / values[-1]), 1)

    for value in values:
        _, y = place(places[0], value)
        parts.append(f'<line class="g" x1="0" y1="{y}" x2="{width}" y2="{y}"/>')
        parts.append(label(-6, y + 4, f"{value:g}", 'text-anchor="end"'))
    if panel.level is not None:
        _, y = place(places[0], panel.level)
        parts.append(f'<line class="l" x1="0" y1="{y}" x2="{width}" y2="{y}"/>')
    ticks = panel.ticks or (places if len(places) <= MOST_TICKS else (places[0], places[-1]))
    below = [*((place(tick, 0)[0], 16, f"{tick:g}") for tick in ticks), (width / 2, 34, panel.x)]
    parts += [label(x, HEIGHT + down, text, 'text-anchor="middle"') for x, down, text in below]
    return "".join([*parts, *(svg_series(each, place) for each in panel.series)])


def round_values(highest: float) -> list[float]:
    """Equidistant round values from 0 to at least `highest`, for a grid."""
    unit = 10.0 ** math.floor(math.log10(highest / 5)) if highest > 0 else 1.0
    step = next(size * unit for size in (1.0, 2.0, 2.5, 5.0, 10.0) if 5 * size * unit >= highest)
    return [round(step * number, 12) for number in range(max(1, math.ceil(highest / step)) + 1)]


def svg_series(each: Series, place: Callable[[float, float], tuple[float, float]]) -> str:
    """The SVG of a series: its line, marks and quartile bars."""
    at = [place(*point) for point in each.points]
    parts = [svg_line(each, " ".join(f"{x},{y}" for x, y in at))]
    mark = next((mark for mark in MARKS if mark in each.form), "")
    parts += [label(x, y + 4, MARKS[mark], f'text-anchor="middle" style="fill:{each.colour}"') for x, y in at if mark]
    for (x, _), spread in zip(each.points, each.spreads, strict=False):
        (across, low), (_, high) = place(x, spread.low), place(x, spread.high)
        parts.append(f'<line stroke="{each.colour}" x1="{across}" y1="{low}" x2="{across}" y2="{high}"/>')
    return "".join(parts)


def svg_line(each: Series, points: str) -> str:
    """The SVG line through points, in a series' colour and style; "" if its form has no line."""
    dashes = next((dashes for line, dashes in DASHES.items() if line in each.form), None)
    if dashes is None:
        return ""
    dashed = f' stroke-dasharray="{dashes}"' * bool(dashes)
    return f'<polyline fill="none" stroke="{each.colour}" stroke-width="1.6"{dashed} points="{points}"/>'


def label(x: float | int, y: float | int, text: str, more: str) -> str:
    """An SVG text at a position; `more` are its attributes."""
    return f'<text x="{x}" y="{y}" {more}>{escape(text)}</text>'
