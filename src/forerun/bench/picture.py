"""The picture of a benchmark: speed-up by depth, and the cost of a pass over more tokens.

Each workload gets a pair of panels, each batch size a colour and each temperature a line style; bars reach from
quartile to quartile. This is the only file of the benchmark that imports matplotlib.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forerun.bench.figures import CellFigures, GroupFigures, Spread
from forerun.bench.plan import CHOSEN
from forerun.bench.report import BenchReport
from forerun.errors import InvalidRequest, MissingPackage

COLOURS = ("#2a6f97", "#d1495b", "#3a7d44", "#e09f3e", "#6d597a", "#444444")
STYLES = ("-", "--", ":", "-.")
WIDTH, HEIGHT, DPI = 9.0, 3.6, 150  # inches per row of panels


def check_picture(path: Path) -> None:
    """Raise, before anything is run, where a picture could not be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackage("--picture needs matplotlib, which is not installed: pip install 'forerun[bench]'")
    if path.suffix != ".png":
        raise InvalidRequest("picture", f"{path} must be a .png file.")


def draw(report: BenchReport) -> bytes:
    """The picture as the content of a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(figures.group.workload for figures in report.groups))
    picture = Figure(figsize=(WIDTH, HEIGHT * len(names)), layout="constrained")
    FigureCanvasAgg(picture)
    panels = picture.subplots(len(names), 2, squeeze=False)
    for (left, right), name in zip(panels, names, strict=True):
        groups = [figures for figures in report.groups if figures.group.workload == name]
        lines(left, report, groups, lambda cell: cell.speed_up, f"{name}: speed-up over plain decoding")
        lines(right, report, groups, lambda cell: cell.pass_ratio, f"{name}: v(k), a pass against a plain one")
        left.legend(fontsize="small", frameon=False)
    models = report.about["models"]
    picture.suptitle(f"{models['target']}, drafted by {models['draft']}", fontsize="medium", wrap=True)
    file = io.BytesIO()
    picture.savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def lines(
    panel: Any,
    report: BenchReport,
    groups: Sequence[GroupFigures],
    figure: Callable[[CellFigures], Spread | None],
    title: str,
) -> None:
    """One figure by depth, a line per group."""
    batches = list(dict.fromkeys(figures.group.batch for figures in report.groups))
    temperatures = list(dict.fromkeys(figures.group.temperature for figures in report.groups))
    for figures in groups:
        fixed = [cell for cell in figures.cells if cell.depth != CHOSEN]
        points = [(cell.depth, spread) for cell in fixed if (spread := figure(cell)) is not None]
        middle = [spread.median for _, spread in points]
        bars = [[s.median - s.low for _, s in points], [s.high - s.median for _, s in points]]
        panel.errorbar(
            [depth for depth, _ in points],
            middle,
            yerr=bars,
            color=COLOURS[batches.index(figures.group.batch) % len(COLOURS)],
            linestyle=STYLES[temperatures.index(figures.group.temperature) % len(STYLES)],
            marker="o",
            markersize=4,
            capsize=2,
            label=f"batch {figures.group.batch}, temperature {figures.group.temperature:g}",
        )
    panel.axhline(1.0, color="#999999", linewidth=0.8)
    panel.set_title(title, fontsize="medium")
    panel.set_xlabel("depth")
    panel.set_xticks(sorted({cell.depth for figures in groups for cell in figures.cells} - {CHOSEN}))
    panel.set_ylim(bottom=0)
    panel.spines[["top", "right"]].set_visible(False)
