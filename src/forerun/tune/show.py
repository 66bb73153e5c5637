"""The terminal report of a tuning: speed by temperature, acceptance, memory, and the recommendation."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from forerun.bench.figures import CellFigures
from forerun.bench.show import machine_line, medians, number, speed_up_cells
from forerun.cache.plan import size
from forerun.config import AUTO
from forerun.report import Cell, FigureTable, Section, card, fact_table, shortened
from forerun.tune.report import TunedChoice, TuneReport
from forerun.tune.study import NOT_REACHED, Studied, TuneCell

COLUMNS = ("drafter", "batch", "depth", "tokens\n/s", "measured\nspeed-up", "quartiles", "pre-\ndicted", "error")
UNDECIDED = "undecided"  # shown instead of quartiles
MOST_REASONS = 3
NAME = 40  # terminal columns of a drafter's name in a sentence
WORTH = "Acceptance and memory of the drafters"
SHOWN_DEPTHS = (1, 2, 4, 8)


def tune_card(report: TuneReport) -> RenderableType:
    """The report as a renderable card."""
    tables: list[Section] = [[Text(title(report, each), "bold"), speeds(report, each)] for each in report.temperatures]
    tables += [[Text(WORTH, "bold"), drafters(report)], [memory_figures(report)], [fact_table(facts_of(report))]]
    return card(*tables, verdict(report))


def title(report: TuneReport, temperature: float) -> str:
    """The heading of a speed table."""
    what = "recorded answers" if report.about["prompts"]["replayed"] else f"temperature {temperature:g}"
    return f"Speed, {what}"


def speeds(report: TuneReport, temperature: float) -> FigureTable:
    """The speed table: plain decoding and each candidate, at each batch size."""
    rows: list[list[Cell]] = []
    for batch in report.selection.batches:
        best = report.choice(batch, temperature)
        rows.append(plain_row(report, batch, temperature, best))
        for each in report.studied:
            cell = each.cell(batch, temperature)
            rows += rows_of(each, cell, best) if cell else [[Text(each.candidate.label), str(batch), *["–"] * 6]]
    return FigureTable(COLUMNS, rows, num_names=1)


def plain_row(report: TuneReport, batch: int, temperature: float, best: TunedChoice | None) -> list[Cell]:
    """The row of plain decoding: the median of its runs with all candidates."""
    cells = [cell for each in report.studied if (cell := each.cell(batch, temperature))]
    rates = [cell.plain.tokens_per_s.median for cell in cells if cell.plain and cell.plain.tokens_per_s]
    speed = f"{statistics.median_high(rates):.1f}" if rates else "?"
    return [marked_name("plain", best is not None and best.draft is None), str(batch), "0", speed, "×1.00", "", "", ""]


def rows_of(each: Studied, cell: TuneCell, best: TunedChoice | None) -> list[list[Cell]]:
    """The rows of a candidate at a batch size: at the best predicted depth, and with depth auto."""
    draft, name, batch = each.candidate.draft, each.candidate.label, str(cell.group.batch)
    is_best = {auto: best is not None and (best.draft, best.auto) == (draft, auto) for auto in (False, True)}
    doubt, error = UNDECIDED if cell.undecided else "", f"{cell.error:+.0%}" if cell.error is not None else ""
    predicted = [Text(each, "red" if doubt else "") for each in (f"×{cell.prediction.speed_up:.2f}", error)]
    depth = str(cell.prediction.depth)
    rows = [[marked_name(name, is_best[False]), batch, depth, *measured(cell.drafted, doubt), *predicted]]
    if cell.chosen:
        rows.append([marked_name(name, is_best[True]), batch, AUTO, *measured(cell.chosen, doubt), "", ""])
    return rows


def measured(figures: CellFigures | None, doubt: str) -> list[Cell]:
    """Cells: tokens per second, speed-up, and quartiles or the word of doubt."""
    if figures is None:
        return ["?", *speed_up_cells(None)]
    return [number(figures.tokens_per_s, ".1f"), *speed_up_cells(figures.speed_up, doubt)]


def marked_name(name: str, best: bool) -> Text:
    """A name, marked if it is the fastest; without a mark its width is the same, so that both are shortened alike."""
    return Text(f"{name} {'←' if best else ' '}", "bold green" if best else "")


def drafters(report: TuneReport) -> FigureTable:
    """The table of acceptance by depth, for all prompts and each category."""
    rows, styles = list[list[Cell]](), list[str]()
    for each in report.studied:
        for temperature, kinds in each.acceptance.items():
            for kind, rates in kinds.items():
                name = each.candidate.label if not kind else f"  {kind}"
                shown = [f"{rates[depth - 1]:.0%}" if len(rates) >= depth else "" for depth in SHOWN_DEPTHS]
                rows.append([Text(name), f"{temperature:g}", *shown])
                styles.append("dim" if kind else "")
    heads = ("drafter", "temper-\nature", *(f"accepted\ndepth {depth}" for depth in SHOWN_DEPTHS))
    return FigureTable(heads, rows, num_names=1, styles=styles)


def memory_figures(report: TuneReport) -> FigureTable:
    """The memory table of the target and each drafter."""
    figures = [(each.candidate.label, each.memory) for each in report.studied if each.memory]
    rows: list[list[Cell]] = [
        [Text(name), *map(size, (first.weights_bytes, first.cache_bytes, first.remembered_bytes))]
        for name, first in figures
    ]
    if figures:
        first = figures[0][1]
        rows.insert(0, [Text("target"), size(first.target_weights_bytes), size(first.target_cache_bytes), ""])
    return FigureTable(("memory", "weights", "cache", "past answers\nat most"), rows, num_names=1)


def facts_of(report: TuneReport) -> Iterator[tuple[str, str]]:
    """(name, value) facts below the tables."""
    model, machine, prompts = (report.about[name] for name in ("model", "machine", "prompts"))
    yield "target", f"{model['target']} ({model['format']})"
    yield "machine", machine_line(machine, model["kernels"])
    yield "prompts", f"{prompts['num_prompts']}, both to predict and to measure; {template_line(prompts)}"
    yield "runs", f"{medians(report.selection.repeats)}, plain and drafted by turns; prefill is not timed"
    for each in report.studied:
        if each.problem:
            yield each.candidate.label, each.problem
    for family, best in report.best_exits().items():
        yield family, f"the best exit is {best}"


def template_line(prompts: dict[str, object]) -> str:
    """The chat template in words."""
    template = prompts["template"]
    if not isinstance(template, dict):
        return "plain text, no chat template"
    thinking = {None: "the template's own thinking mode", True: "thinking", False: "no thinking"}[template["thinking"]]
    return f"chat template {template['hash']}, {thinking}"


def verdict(report: TuneReport) -> Iterator[Text]:
    """The recommendation, in a few lines."""
    pick, undecided = report.pick, report.undecided
    if pick is None and not undecided:
        late = any(not each.problem or each.problem == NOT_REACHED for each in report.studied)
        advice = "allow more time with --time-limit" if late else "the reason of each drafter is above"
        yield Text(f"Nothing was measured: {advice}.", "bold yellow")
        return
    sampling = "" if report.about["prompts"]["replayed"] else f", temperature {report.temperatures[0]:g}"
    at = f"at batch {report.selection.batches[0]}{sampling}"
    if pick is None:
        yield Text(f"Undecided {at}: no setting is recommended.", "bold red")
    elif pick.draft is None:
        yield Text(f"Plain decoding is fastest {at}: none of these drafters saves time.", "bold yellow")
    else:
        yield Text(
            f"Use {pick.draft} at depth {pick.shown_depth}: {pick.speed_up:.2f} times as fast {at}.", "bold green"
        )
        if pick.interval is not None:
            low, high = pick.interval
            yield Text(f"On other prompts like these, {low:.2f} to {high:.2f} times.", "green")
    for each in undecided[:MOST_REASONS]:
        setting = f"{shortened(each.draft, NAME)}, batch {each.batch}, temperature {each.temperature:g}"
        yield Text(f"{setting}, is undecided: {each.reason}.", "red")
    if len(undecided) > MOST_REASONS:
        yield Text(f"{len(undecided) - MOST_REASONS} more settings are undecided.", "red")
    yield from (Text(advice, "red") for advice in dict.fromkeys(each.advice for each in undecided))
    for temperature in report.temperatures:
        batch = report.plain_from(temperature)
        if batch is not None and pick is not None and pick.draft is not None:
            yield Text(f"From batch {batch} on plain decoding is faster (temperature {temperature:g}).", "yellow")
    if not report.complete:
        yield Text("Some cells were not measured; the same command resumes with them.", "yellow")
    if not report.same_tokens:
        yield Text("Tokens differ from plain decoding's in some runs: see same_tokens in tune.json.", "bold red")
