"""Charts: rows of panels of lines, as one SVG that needs nothing else, in light and in dark.

This file decides colours and layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from forerun.bench.figures import Spread

COLOURS = ("#3b82c4", "#d9762b", "#3a9a5b", "#b05fb0", "#b39200", "#d1495b", "#2aa5a0", "#8a7f72")  # on light and dark
HEIGHT, GAP, LEFT, TOP, LETTER = 200, 60, 50, 40, 7  # of panels, in pixels; LETTER is one of a legend
MOST_TICKS = 17  # of the points' own places: as many as depths
MARKS = {"o": "●", "x": "×"}  # by the sign in the form of a series
DASHES = {"--": "6 4", "-.": "8 3 2 3", ":": "2 3", "-": ""}  # by the line in the form of a series, the longest first
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#555}.t{font-weight:600}.g{stroke:#8886;stroke-width:.5}"
    ".l{stroke:#888;stroke-dasharray:4}@media(prefers-color-scheme:dark){text{fill:#bbb}}"
)


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
    level: float | None = None
    ticks: Sequence[int | float] = ()


def svg(rows: Sequence[Sequence[LinePanel]], width: int, title: str = "") -> str:
    """An SVG element: under a title rows of panels, so many pixels wide each, every row before its legend."""
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
    """One panel: a title, a grid of values, and each series with its marks."""
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
    """Round values with the same step between them, from 0 to the highest or a little above it."""
    unit = 10.0 ** math.floor(math.log10(highest / 5)) if highest > 0 else 1.0
    step = next(size * unit for size in (1.0, 2.0, 2.5, 5.0, 10.0) if 5 * size * unit >= highest)
    return [round(step * number, 12) for number in range(max(1, math.ceil(highest / step)) + 1)]


def svg_series(each: Series, place: Callable[[float, float], tuple[float, float]]) -> str:
    """A line, a mark at every point, and a bar from quartile to quartile."""
    at = [place(*point) for point in each.points]
    parts = [svg_line(each, " ".join(f"{x},{y}" for x, y in at))]
    mark = next((mark for mark in MARKS if mark in each.form), "")
    parts += [label(x, y + 4, MARKS[mark], f'text-anchor="middle" style="fill:{each.colour}"') for x, y in at if mark]
    for (x, _), spread in zip(each.points, each.spreads, strict=False):
        (across, low), (_, high) = place(x, spread.low), place(x, spread.high)
        parts.append(f'<line stroke="{each.colour}" x1="{across}" y1="{low}" x2="{across}" y2="{high}"/>')
    return "".join(parts)


def svg_line(each: Series, points: str) -> str:
    """A line through points in a series' own colour and form; nothing where its form has no line."""
    dashes = next((dashes for line, dashes in DASHES.items() if line in each.form), None)
    if dashes is None:
        return ""
    look = f'fill="none" stroke="{each.colour}" stroke-width="1.6"' + f' stroke-dasharray="{dashes}"' * bool(dashes)
    return f'<polyline {look} points="{points}"/>'


def label(x: float | int, y: float | int, text: str, more: str) -> str:
    """Some text at a place."""
    return f'<text x="{x}" y="{y}" {more}>{escape(text)}</text>'
