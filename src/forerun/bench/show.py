"""The terminal report and the picture of a benchmark.

The report is readable without colours. Every number comes from a BenchReport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from forerun.bench.chart import COLOURS, LinePanel, Series, svg
from forerun.bench.figures import BenchReport, CellFigures, GroupFigures, Spread
from forerun.bench.plan import CHOSEN, depth_name
from forerun.cache.plan import size
from forerun.device import is_cpu
from forerun.machine import disturbance, disturbs
from forerun.report import Cell, FigureTable, Section, card, counted, fact_table

COLUMNS = ("depth", "tokens\n/s", "speed-up", "quartiles", "tokens\n/round", "accepted", "v(k)")
MORE_COLUMNS = ("pre-\ndicted", "engine\nms", "first\nms")
MOST_SHOWN = 3
DISTURBED = "disturbed"  # shown instead of quartiles
STYLES = ("o-", "o--", "o:", "o-.")
WIDTH = 340  # of a panel, in pixels


def bench_card(report: BenchReport) -> RenderableType:
    """The report as a renderable card."""
    groups: list[Section] = [
        [Text(each.group.name, "bold"), table(each), *group_lines(report, each)] for each in report.groups
    ]
    return card(*groups, [fact_table(facts_of(report))], [verdict(report)])


def table(figures: GroupFigures) -> FigureTable:
    """A group's table with a row per depth."""
    return FigureTable((*COLUMNS, *MORE_COLUMNS), [list(row(cell)) for cell in figures.cells])


def row(cell: CellFigures) -> Iterator[Cell]:
    """The cells of one depth; plain decoding has no ratios."""
    yield depth_name(cell.depth)
    yield number(cell.tokens_per_s, ".1f")
    disturbed = disturbs(cell.num_busy)
    yield from speed_up_cells(cell.speed_up, DISTURBED * disturbed) if cell.depth else ("plain", DISTURBED * disturbed)
    yield f"{cell.tokens_per_round:.2f}" if cell.tokens_per_round is not None else "?"
    yield f"{cell.acceptance_rate:.0%}" if cell.acceptance_rate is not None else ""
    yield number(cell.pass_ratio, ".2f") if cell.depth > 0 else ""
    yield f"×{cell.predicted.median:.2f}" if cell.predicted else ""
    yield number(cell.engine_s, ".2f", 1000.0)
    yield number(cell.first_token_s, ".0f", 1000.0)


def speed_up_cells(speed_up: Spread | None, doubt: str = "") -> tuple[Cell, Cell]:
    """A coloured speed-up and its quartiles, or the word of doubt instead of them."""
    if speed_up is None:
        return Text("?"), ""
    median = Text(f"×{speed_up.median:.2f}", "red" if doubt else "green" if speed_up.median > 1 else "yellow")
    return median, Text(doubt, "red") if doubt else f"{speed_up.low:.2f}–{speed_up.high:.2f}"


def number(spread: Spread | None, form: str, scale: float = 1.0) -> str:
    """A formatted median; "?" if there is none."""
    return format(scale * spread.median, form) if spread else "?"


def group_lines(report: BenchReport, figures: GroupFigures) -> Iterator[Text]:
    """The lines below a group's table."""
    deepest = figures.cells[-1]
    if deepest.acceptance_at_depth:
        rates = " ".join(f"{rate:.2f}" for rate in deepest.acceptance_at_depth)
        yield Text(f"accepted at depth 1, 2, …: {rates}", "dim")
    yield from choices(figures)
    if note := disturbance(max((cell.num_busy or 0.0 for cell in figures.cells), default=None)):
        yield Text(note, "red")
    if read := [cell for cell in figures.cells if cell.experts and cell.expected_experts]:
        each = (f"{number(c.experts, '.1f')} ({c.expected_experts:.1f}) at depth {depth_name(c.depth)}" for c in read)
        yield Text(f"experts read per layer and pass (expected for random choices): {', '.join(each)}", "dim")
    if figures.distinct_ngrams is not None:
        yield Text(f"{figures.distinct_ngrams:.0%} of the 8-grams in the answers are distinct", "dim")
    if (share := report.limit_share(figures)) is not None:
        pass_time = f"{1000 * (figures.plain_pass_s or 0):.1f} ms"
        yield Text(f"a plain pass takes {pass_time}; reading its weights alone would take {share:.0%} of that", "dim")
    if figures.same_tokens:
        yield Text("same tokens: yes")
    else:
        yield Text(f"same tokens: NO ({len(figures.differences)} answers)", "bold red")
    for difference in figures.differences[:MOST_SHOWN]:
        place = report.place(figures, difference)
        yield Text(f"  depth {depth_name(difference.depth)}, repetition {difference.repetition + 1}: {place}", "red")


def choices(figures: GroupFigures) -> Iterator[Text]:
    """The controller's choices: the mean depth with depth auto, and the drafters of a mix."""
    for cell in figures.cells:
        phrases = []
        if cell.depth == CHOSEN and cell.guesses_per_round is not None:
            phrases.append(f"{cell.guesses_per_round:.2f} draft tokens per round")
        if total := sum(cell.num_rounds_by_arm.values()):
            shares = (f"{drafter} {num / total:.0%}" for drafter, num in cell.num_rounds_by_arm.items())
            phrases.append("drafted by " + ", ".join(shares))
        if phrases:
            yield Text(f"depth {depth_name(cell.depth)}: {'; '.join(phrases)}", "dim")


def facts_of(report: BenchReport) -> Iterator[tuple[str, str]]:
    """(name, value) facts below the tables."""
    models, machine, settings = (report.about[name] for name in ("models", "machine", "settings"))
    yield "target", f"{models['target']} ({models['format']})"
    yield "drafter", models["draft"]
    yield "machine", machine_line(machine, models["kernels"])
    if models["kernels_measured"]:
        yield "kernels", models["kernels_measured"]
    yield "software", f"forerun {report.about['forerun']}, torch {machine['torch']}, python {machine['python']}"
    start, end = size(round(report.bandwidth.start)), size(round(report.bandwidth.end))
    yield "bandwidth", f"{start}/s before the runs, {end}/s after; a pass reads {size(report.pass_bytes)}"
    if report.peak_bytes is not None:
        yield "peak memory" if is_cpu(report.placement.device) else "host memory", size(report.peak_bytes)
    if tree := settings.get("tree"):
        yield "drafts", f"trees of one shape with {len(tree['paths'])} nodes, cut to each depth"
    repetitions = f"{medians(settings['repeats'])}, depths alternating"
    yield "runs", f"{repetitions}; answers of {settings['num_tokens']} tokens unless replayed"


def machine_line(machine: Mapping[str, Any], kernels: str) -> str:
    """The processor, threads and kernels."""
    return f"{machine['processor']}, {counted(machine['num_threads'], 'thread')}, {kernels}"


def medians(repeats: int) -> str:
    """The number of repetitions as a phrase."""
    return f"medians of {counted(repeats, 'repetition')}"


def verdict(report: BenchReport) -> Text:
    """Whether the tokens were the same, in one line."""
    if report.same_tokens:
        return Text("Every depth gave the same tokens as plain decoding.", "bold green")
    if not report.placement.same_bits:
        line = "Tokens differ from plain decoding. On a GPU this is possible at near ties; with --one-gemm it is not."
        return Text(line, "bold yellow")
    return Text("FAULT: tokens differ from plain decoding. This must not happen: please report it.", "bold red")


def picture(report: BenchReport) -> str:
    """The SVG of speed-up and pass cost by depth.

    Each workload has two panels, each batch size a colour and each temperature a line style.
    """
    names = dict.fromkeys(figures.group.workload for figures in report.groups)
    rows = [
        (
            panel(report, name, lambda cell: cell.speed_up, "speed-up over plain decoding"),
            panel(report, name, lambda cell: cell.pass_ratio, "v(k), pass time over a plain pass"),
        )
        for name in names
    ]
    models = report.about["models"]
    return svg(rows, WIDTH, f"{models['target']}, drafted by {models['draft']}")


def panel(report: BenchReport, name: str, figure: Callable[[CellFigures], Spread | None], title: str) -> LinePanel:
    """A panel of one figure of a workload by depth, with a line for each group."""
    batches = list(dict.fromkeys(figures.group.batch for figures in report.groups))
    temperatures = list(dict.fromkeys(figures.group.temperature for figures in report.groups))
    series = []
    for figures in report.groups:
        group = figures.group
        known = {cell.depth: spread for cell in figures.cells if cell.depth != CHOSEN and (spread := figure(cell))}
        line = Series(
            f"batch {group.batch}, temperature {group.temperature:g}",
            [(depth, spread.median) for depth, spread in known.items()],
            COLOURS[batches.index(group.batch) % len(COLOURS)],
            STYLES[temperatures.index(group.temperature) % len(STYLES)],
            list(known.values()),
        )
        series += [line] if group.workload == name else []
    return LinePanel(series, "depth", f"{name}: {title}", level=1.0)
