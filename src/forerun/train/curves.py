"""The curves of a training as one SVG, written without any library: it opens in a browser, in light and in dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, GAP, LEFT, TOP = 340, 200, 60, 50, 40  # of a panel, in pixels
COLOURS = ("#3b82c4", "#d9762b", "#3a9a5b", "#b05fb0")  # on light and dark
SMOOTH = 20  # steps whose mean a point of the loss is
MOST_POINTS = 400
SHOWN_DEPTHS = (1, 2, 4, 8)
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#555}.t{font-weight:600}.g{stroke:#8886;stroke-width:.5}"
    "@media(prefers-color-scheme:dark){text{fill:#bbb}}"
)
Curve = tuple[str, Sequence[tuple[int, float]]]


def curves(log: Sequence[Mapping[str, Any]]) -> str:
    """Loss, acceptance by depth and tokens per round, over the steps; `log` are the lines of train.jsonl."""
    rates = series(log, "held_out", "acceptance_at_depth")
    tokens = series(log, "held_out", "tokens_per_round")
    depths = [d for d in SHOWN_DEPTHS if any(len(values) >= d for _, values in rates)]
    panels: list[tuple[str, list[Curve]]] = [
        ("loss", [("", smoothed(series(log, "loss")))]),
        (
            "held out: accepted, by depth",
            [(f"depth {d}", [(s, v[d - 1]) for s, v in rates if len(v) >= d]) for d in depths],
        ),
        (
            "held out: tokens per round",
            [(f"depth {d}", [(s, v[d - 1]) for s, v in tokens if len(v) >= d]) for d in SHOWN_DEPTHS],
        ),
    ]
    body = "".join(panel(title, own, i * (WIDTH + GAP) + LEFT) for i, (title, own) in enumerate(panels))
    width, height = len(panels) * (WIDTH + GAP) + LEFT, HEIGHT + 2 * TOP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<style>{STYLE}</style>{body}</svg>\n"
    )


def series(log: Sequence[Mapping[str, Any]], *keys: str) -> list[tuple[int, Any]]:
    """(step, value) of every line of a log that has a value under these keys, one inside the other."""
    found = []
    for line in log:
        value: Any = line
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found.append((line["step"], value))
    return found


def panel(title: str, own: Sequence[Curve], left: int) -> str:
    """One panel: a frame of values, and a line for each curve that has points."""
    shown = [(name, points) for name, points in own if points]
    parts = [f'<text class="t" x="{left}" y="{TOP - 18}">{escape(title)}</text>']
    if not shown:
        return "".join(parts)
    last = max(1, max(step for _, points in shown for step, _ in points))
    values = [value for _, points in shown for _, value in points]
    low, high = min(0.0, *values), max(values) * 1.05 or 1.0
    for share in (0.0, 0.5, 1.0):
        y, value = TOP + HEIGHT * (1 - share), low + share * (high - low)
        parts.append(f'<line class="g" x1="{left}" y1="{y:.1f}" x2="{left + WIDTH}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    parts.append(f'<text x="{left + WIDTH}" y="{TOP + HEIGHT + 18}" text-anchor="end">step {last}</text>')
    for number, (name, points) in enumerate(shown):
        colour = COLOURS[number % len(COLOURS)]
        at = [
            f"{left + WIDTH * step / last:.1f},{TOP + HEIGHT * (1 - (value - low) / (high - low)):.1f}"
            for step, value in points
        ]
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{" ".join(at)}"/>')
        if name:
            x = left + number * WIDTH // len(COLOURS)
            parts.append(f'<text x="{x}" y="{TOP - 4}" style="fill:{colour}">{escape(name)}</text>')
    return "".join(parts)


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The means of the last SMOOTH values, at MOST_POINTS places at most."""
    stride = max(1, len(points) // MOST_POINTS)
    found = []
    for end in range(len(points), 0, -stride):
        part = [value for _, value in points[max(0, end - SMOOTH) : end]]
        found.append((points[end - 1][0], sum(part) / len(part)))
    return found[::-1]
