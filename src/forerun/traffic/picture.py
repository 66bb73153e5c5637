"""The picture of a load test: throughput and times by load, one line for each mode; imports matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from forerun.bench.picture import COLOURS, DPI, HEIGHT, WIDTH
from forerun.traffic.figures import TrafficFigures
from forerun.traffic.plan import LoadKind
from forerun.traffic.report import TrafficReport

KINDS: dict[LoadKind, str] = {"rate": "requests that arrive a second", "concurrency": "requests at once"}
TOKENS, FIRST, BETWEEN = "tokens a second", "ms to the first token, p95", "ms between tokens, p95"


def draw_traffic(report: TrafficReport) -> bytes:
    """The picture as the content of a PNG file: one row of panels for each kind of load."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(load.kind for load in report.plan.loads))
    picture = Figure(figsize=(WIDTH * 1.3, HEIGHT * len(kinds)), layout="constrained")
    FigureCanvasAgg(picture)
    for row, kind in zip(picture.subplots(len(kinds), 3, squeeze=False), kinds, strict=True):
        lines(row[0], report, kind, tokens, TOKENS)
        lines(row[1], report, kind, lambda each: at_p95(each.times.first_token_s), FIRST, report.agreement.first_s)
        limit = report.agreement.between_s
        lines(row[2], report, kind, lambda each: at_p95(each.times.between_tokens_s), BETWEEN, limit)
        row[0].legend(fontsize="small", frameon=False)
    picture.suptitle(f"{report.model.name}, {report.plan.max_tokens} tokens a request", fontsize="medium", wrap=True)
    file = io.BytesIO()
    picture.savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def tokens(each: TrafficFigures) -> float | None:
    """The median throughput."""
    return each.tokens_per_s.median if each.tokens_per_s else None


def at_p95(values: Any) -> float | None:
    """The 95th percentile in milliseconds."""
    return 1000 * values[95] if values else None


def lines(
    panel: Any,
    report: TrafficReport,
    kind: LoadKind,
    figure: Callable[[TrafficFigures], float | None],
    title: str,
    limit_s: float | None = None,
) -> None:
    """One figure by load, a line for each mode, and the agreement's limit if it has one."""
    for number, mode in enumerate(report.plan.modes):
        own = sorted((each for each in report.of(mode) if each.load.kind == kind), key=lambda each: each.load.value)
        points = [(each.load.value, value) for each in own if (value := figure(each)) is not None]
        colour = COLOURS[number % len(COLOURS)]
        panel.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, label=mode.shown)
    if limit_s is not None:
        panel.axhline(1000 * limit_s, color="#999999", linewidth=0.8, linestyle="--")
    panel.set_title(title, fontsize="medium")
    panel.set_xlabel(KINDS[kind])
    panel.set_ylim(bottom=0)
    panel.spines[["top", "right"]].set_visible(False)
