"""Computes figures from cells: rates and times by load and contender, ratios within a repetition, tables, the picture.

Times are medians over the repetitions of each repetition's percentile.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from textwrap import indent

from benchmarks.markdown import spread_cells, table
from benchmarks.peers.tables import INDENT
from benchmarks.serving.cells import CellKey, ServedCell

from forerun.bench.chart import COLOURS, LinePanel, Series, svg
from forerun.bench.figures import Spread
from forerun.bench.show import WIDTH

AUTO, OFF = "forerun auto", "forerun off"
FEW_CLIENTS = 4  # up to this number of clients drafting has to shorten answers
LEAST_MEAN, LEAST_CELL = 1.0, 0.95
Cells = Mapping[CellKey, ServedCell]


@dataclass(frozen=True, slots=True)
class ServedRow:
    """The figures of one contender with one number of clients.

    `ratio` is the rate of forerun's auto over this one's, `latency_ratio` the same of median latencies; both are None
    if no repetition has cells of both.
    """

    concurrency: int
    contender: str
    num_repetitions: int
    num_failed: int
    tokens_per_s: Spread | None
    ratio: Spread | None
    latency_ratio: Spread | None
    first_p50_s: float
    first_p95_s: float
    latency_p50_s: float
    latency_p95_s: float


def rows(cells: Cells) -> list[ServedRow]:
    """One row for each load and contender, in the order of the loads."""
    pairs = {(key.concurrency, key.contender) for key in cells}
    order = {name: i for i, name in enumerate(dict.fromkeys(key.contender for key in cells))}
    return [row(cells, *pair) for pair in sorted(pairs, key=lambda pair: (pair[0], order[pair[1]]))]


def row(cells: Cells, concurrency: int, contender: str) -> ServedRow:
    """The figures of all repetitions of a contender at a load."""
    repeated = repetitions(cells, concurrency, contender)
    auto = repetitions(cells, concurrency, AUTO)

    def median(value: Callable[[ServedCell], float]) -> float:
        return statistics.median(map(value, repeated.values()))

    return ServedRow(
        concurrency,
        contender,
        len(repeated),
        sum(cell.num_failed for cell in repeated.values()),
        Spread.of(cell.tokens_per_s for cell in repeated.values()),
        Spread.of(auto[i].tokens_per_s / repeated[i].tokens_per_s for i in repeated if i in auto),
        Spread.of(auto[i].latency_s(50.0) / repeated[i].latency_s(50.0) for i in repeated if i in auto),
        median(lambda cell: cell.first_token_s(50.0)),
        median(lambda cell: cell.first_token_s(95.0)),
        median(lambda cell: cell.latency_s(50.0)),
        median(lambda cell: cell.latency_s(95.0)),
    )


def repetitions(cells: Cells, concurrency: int, contender: str) -> dict[int, ServedCell]:
    """The cells of a contender at a load, by repetition."""
    return {
        key.repetition: cell
        for key, cell in cells.items()
        if key.concurrency == concurrency and key.contender == contender
    }


def different_answers(cells: Cells) -> int:
    """The number of answers of auto that differ from those of off to the same request; 0 is promised."""
    count = 0
    for key, cell in cells.items():
        plain = cells.get(CellKey(key.concurrency, key.repetition, OFF))
        if key.contender == AUTO and plain is not None:
            pairs = zip(cell.answers, plain.answers, strict=True)
            count += sum(a.digest != b.digest for a, b in pairs if not a.error and not b.error)
    return count


def markdown(rows: Sequence[ServedRow], failures: Mapping[str, str]) -> str:
    """The rows as a Markdown table, followed by the error output of failed servers."""
    heads = ("at once", "server", "tokens/s", "quartiles", "auto / this", "quartiles", "first token p50, ms", "p95, ms")
    reasons = [f"{server} failed:\n\n{indent(reason, INDENT)}\n" for server, reason in failures.items()]
    return "\n".join([table((*heads, "latency p50, s", "p95, s", "failed"), map(row_cells, rows)), *reasons])


def row_cells(row: ServedRow) -> list[object]:
    """The texts of one row's cells."""
    speed, ratio = spread_cells(row.tokens_per_s, ".1f"), spread_cells(None if row.contender == AUTO else row.ratio)
    first, latency = (row.first_p50_s, row.first_p95_s), (row.latency_p50_s, row.latency_p95_s)
    times = [*(f"{1000 * each:.0f}" for each in first), *(f"{each:.2f}" for each in latency)]
    return [row.concurrency, row.contender, *speed, *ratio, *times, row.num_failed or ""]


def verdict(table: Sequence[ServedRow], num_different: int) -> Iterator[str]:
    """Lines that compare the results with the goals: throughput of auto over off, latency of few clients, answers."""
    plain = [(row.concurrency, row.ratio, row.latency_ratio) for row in table if row.contender == OFF and row.ratio]
    if plain:
        ratios = {concurrency: ratio.median for concurrency, ratio, _ in plain if ratio}
        mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
        least = min(ratios, key=lambda concurrency: ratios[concurrency])
        yield f"auto / off, tokens/s: geometric mean {mean:.2f} (goal: at least {LEAST_MEAN:g})"
        yield f"auto / off, minimum: {ratios[least]:.2f}, {least} at once (goal: at least {LEAST_CELL:g})"
        few = [f"{ratio.median:.2f} ({number})" for number, _, ratio in plain if ratio and number <= FEW_CLIENTS]
        if few:
            yield f"auto / off, median latency (requests at once): {', '.join(few)} (goal: below 1)"
    yield f"answers of auto that differ from off: {num_different} (goal: 0)"


def picture(table: Sequence[ServedRow], title: str) -> str:
    """Throughput, times to the first token and latency by load, one line for each contender, as an SVG."""
    figures: dict[str, Callable[[ServedRow], float]] = {
        "tokens per second": lambda row: row.tokens_per_s.median if row.tokens_per_s else 0.0,
        "ms to the first token, p95": lambda row: 1000 * row.first_p95_s,
        "seconds to the last token, p50": lambda row: row.latency_p50_s,
    }
    names = list(dict.fromkeys(row.contender for row in table))
    loads = sorted({row.concurrency for row in table})
    panels = []
    for head, value in figures.items():
        series = [
            Series(name, [(row.concurrency, value(row)) for row in table if row.contender == name], colour)
            for name, colour in zip(names, cycle(COLOURS), strict=False)
        ]
        panels.append(LinePanel(series, "requests at once", head, ticks=loads))
    return svg([panels], WIDTH, title)
