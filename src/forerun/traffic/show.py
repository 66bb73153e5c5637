"""The terminal report and the picture of a load test; every number comes from a TrafficReport."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle

from rich.console import RenderableType
from rich.text import Text

from forerun.bench.chart import COLOURS, LinePanel, Series, svg
from forerun.bench.show import WIDTH, number, speed_up_cells
from forerun.report import Cell, FigureTable, Section, card, counted
from forerun.traffic.figures import TrafficFigures, TrafficReport, capacity
from forerun.traffic.plan import LoadKind

HEADS = (
    "load",
    "speculation",
    "requests\n/s",
    "tokens\n/s",
    "speed-up",
    "first ms\np50",
    "\np95",
    "between ms\np50",
    "\np95",
    "\np99",
    "longest gap\nms p95",
    "tokens\n/round",
)
WITHIN = ("within\nlimits", "goodput\n/s")
MOST_ERRORS = 5
LATE_S = 0.01  # client delays above this are reported
KINDS: dict[LoadKind, str] = {"rate": "requests per second", "concurrency": "concurrent requests"}


def traffic_card(report: TrafficReport) -> RenderableType:
    """The report as a renderable card."""
    loads: Section = [Text(f"{report.model.name} at {report.url}", "bold"), table(report), *notes(report)]
    by_category: Section = [Text("by category, at the last load", "bold"), category_table(report)]
    return card(loads, by_category if len(categories(report)) > 1 else [], verdict(report))


def table(report: TrafficReport) -> FigureTable:
    """The table with a row for each load and mode."""
    has_limits = report.agreement.has_limits
    rows = [[*row(report, each), *(within(each) if has_limits else ())] for each in report.figures]
    return FigureTable((*HEADS, *(WITHIN if has_limits else ())), rows, num_names=2)


def row(report: TrafficReport, each: TrafficFigures) -> Iterator[Cell]:
    """The cells of a load in a mode."""
    yield each.load.name
    yield each.mode.shown
    yield number(each.requests_per_s, ".2f")
    yield number(each.tokens_per_s, ".1f")
    yield speed_up_cells(each.speed_up)[0] if each.speed_up and each.mode != report.plan.baseline else ""
    yield from (ms(each.times.first_token_s, share) for share in ("p50", "p95"))
    yield from (ms(each.times.between_tokens_s, share) for share in ("p50", "p95", "p99"))
    yield ms(each.times.longest_gap_s, "p95")
    yield "" if each.tokens_per_round is None else f"{each.tokens_per_round:.2f}"


def within(each: TrafficFigures) -> Iterator[Cell]:
    """The cells of the service level."""
    yield Text(f"{each.kept or 0.0:.0%}", "green" if each.holds else "yellow")
    yield number(each.goodput_per_s, ".2f")


def ms(values: Mapping[str, float] | None, share: str) -> str:
    """A percentile in milliseconds."""
    return f"{1000 * values[share]:.1f}" if values else "?"


def categories(report: TrafficReport) -> list[str]:
    """The categories of the prompts."""
    return list(dict.fromkeys(kind for each in report.figures for kind in each.by_category))


def category_table(report: TrafficReport) -> FigureTable:
    """The table of times by category, with modes as columns."""
    last = report.plan.loads[-1]
    figures = [each for each in report.figures if each.load == last]
    heads = ["category", "requests"]
    heads += [f"{each.mode.shown}\nbetween ms\n{share}" for each in figures for share in ("p50", "p95")]
    rows = []
    for kind in categories(report):
        times = [each.by_category.get(kind) for each in figures]
        num_answers = next((each.num_answers for each in times if each is not None), 0)
        cells = [ms(each.between_tokens_s if each else None, share) for each in times for share in ("p50", "p95")]
        rows.append([kind, str(num_answers), *cells])
    return FigureTable(heads, rows, num_names=1)


def notes(report: TrafficReport) -> Iterator[Text]:
    """Notes on the figures."""
    plan = report.plan
    each = f"{plan.num_requests} requests in each of {plan.repeats} repetitions, alternating between modes"
    yield Text(f"{each}; at most {plan.max_tokens} tokens each, temperature {plan.temperature:g}", "dim")
    if report.num_prompts < plan.num_requests * plan.repeats:
        yield Text(f"{report.num_prompts} different prompts, repeated: a prefix cache makes repeats faster", "dim")
    if any(load.kind == "rate" for load in plan.loads):
        yield Text("at a rate, times count from the scheduled time of a request, even if it is sent later", "dim")
    late_s = max(each.late_s for each in report.figures)
    if late_s > LATE_S:
        yield Text(f"the load test sent a request up to {1000 * late_s:.0f} ms late, which the times include", "yellow")
    if not all(each.counted for each in report.figures):
        yield Text("the server reports no usage, so chunks with text are counted as tokens", "yellow")
    errors = sum((Counter(each.errors) for each in report.figures), Counter[str]())
    for error, num_failed in list(errors.items())[:MOST_ERRORS]:
        yield Text(f"{counted(num_failed, 'request')} failed: {error}", "red")


def capacity_text(best: TrafficFigures) -> str:
    """The capacity of a mode as a phrase."""
    if best.load.kind == "rate" or best.requests_per_s is None:
        return best.load.name
    return f"{best.requests_per_s.median:.2f} requests/s, {best.load.name}"


def verdict(report: TrafficReport) -> Iterator[Text]:
    """The capacity of each mode, and whether the answers were the same."""
    agreement = report.agreement
    if agreement.has_limits:
        yield Text(f"Highest load with {agreement.percentile:g} % of requests within {agreement.text}:", "bold")
        for mode in report.plan.modes:
            best, violated = capacity(report.figures, mode)
            if best is None:
                yield Text(f"  {mode.shown}: none of these loads", "yellow")
                continue
            more = "" if violated else ", the highest load measured"
            yield Text(f"  {mode.shown}: {capacity_text(best)}{more}", "green")
    if report.same_answers:
        yield Text("Every mode gave the same answers.", "bold green")
    elif report.same_answers is False:
        yield Text(f"Answers differ from those of {report.plan.baseline.shown}: {len(report.differing)}.", "bold red")
        for each in report.differing[:MOST_ERRORS]:
            place = f"repetition {each.repetition + 1}, request {each.request + 1}"
            yield Text(f"  {each.mode}, {each.load}, {place}", "red")


def picture(report: TrafficReport) -> str:
    """The SVG of throughput and latency by load: a line for each mode, a row of panels for each kind of load."""

    def tokens(each: TrafficFigures) -> float | None:
        return each.tokens_per_s.median if each.tokens_per_s else None

    def first_ms(each: TrafficFigures) -> float | None:
        return 1000 * each.times.first_token_s["p95"] if each.times.first_token_s else None

    def between_ms(each: TrafficFigures) -> float | None:
        return 1000 * each.times.between_tokens_s["p95"] if each.times.between_tokens_s else None

    agreement = report.agreement
    rows = [
        (
            panel(report, kind, tokens, "tokens per second"),
            panel(report, kind, first_ms, "ms to the first token, p95", agreement.first_s),
            panel(report, kind, between_ms, "ms between tokens, p95", agreement.between_s),
        )
        for kind in dict.fromkeys(load.kind for load in report.plan.loads)
    ]
    return svg(rows, WIDTH, f"{report.model.name}, {report.plan.max_tokens} tokens per request")


def panel(
    report: TrafficReport,
    kind: LoadKind,
    figure: Callable[[TrafficFigures], float | None],
    title: str,
    limit_s: float | None = None,
) -> LinePanel:
    """A panel of one figure by load, with the service level's limit, if any."""
    series = []
    for mode, colour in zip(report.plan.modes, cycle(COLOURS), strict=False):
        points = [
            (each.load.value, value)
            for each in report.of(mode)
            if each.load.kind == kind and (value := figure(each)) is not None
        ]
        series.append(Series(mode.shown, sorted(points), colour))
    return LinePanel(series, KINDS[kind], title, level=None if limit_s is None else 1000 * limit_s)
