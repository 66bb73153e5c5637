"""The terminal report of a server's tuning; every number comes from a ServerTuning."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from forerun.bench.show import DISTURBED, medians, number, speed_up_cells
from forerun.remote.depths import DepthRange
from forerun.remote.forecast import DepthAdvice, ServedCell, advice_of, predicted_slower_from, slower_from
from forerun.remote.tuning import ServerTuning
from forerun.report import Cell, FigureTable, Section, card, counted, fact_table

HEADS = (
    "clients",
    "tokens/s\nspeculating",
    "tokens/s\nplain",
    "measured\nspeed-up",
    "quartiles",
    "tokens\n/round",
    "cost of\na round",
)
MOST_ERRORS = 3
DEPTHS = "Speed-up by depth (× where measured), with 90 % confidence intervals"
ONCE = "Speed-up by depth (× where measured), with intervals that do not include the noise of the one repetition"


def server_card(tuning: ServerTuning) -> RenderableType:
    """The report as a renderable card."""
    loads = FigureTable(HEADS, [list(load_row(tuning, cell)) for cell in tuning.cells])
    by_depth: list[RenderableType] = []
    if any(cell.by_depth for cell in tuning.cells):
        heads = ("depth", *(counted(cell.clients, "client") for cell in tuning.cells))
        known = [{each.depth: each for each in cell.by_depth} for cell in tuning.cells]
        rows = [[str(depth), *(depth_cell(each.get(depth)) for each in known)] for depth in sorted(set().union(*known))]
        several = all(cell.num_repetitions > 1 for cell in tuning.cells)
        by_depth = [Text(DEPTHS if several else ONCE, "bold"), FigureTable(heads, rows)]
    title: Section = [Text(f"{tuning.model} at {tuning.url}", "bold"), loads]
    return card(title, by_depth, [fact_table(facts(tuning))], verdict(tuning))


def load_row(tuning: ServerTuning, cell: ServedCell) -> Iterator[Cell]:
    """The cells of a load."""
    seen = cell.speculating.acceptance
    yield str(cell.clients)
    yield number(cell.speculating.tokens_per_s, ".1f")
    yield number(cell.plain.tokens_per_s, ".1f") if cell.plain else "?"
    yield from speed_up_cells(cell.speed_up, DISTURBED * bool(tuning.undecided))
    yield f"{seen.tokens_per_round:.2f}" if seen else "?"
    yield f"×{cell.cost.median:.2f}" if cell.cost else "?"


def depth_cell(each: DepthRange | None) -> str:
    """A measured speed-up with its interval, or the interval alone."""
    if each is None:
        return ""
    if each.depth == 0:
        return "×1.00"
    ends = f"{each.low:.2f}–{each.high:.2f}"
    return f"×{each.measured.median:.2f} ({ends})" if each.measured else ends


def facts(tuning: ServerTuning) -> Iterator[tuple[str, str]]:
    """(name, value) facts below the tables."""
    plan, seen = tuning.plan, tuning.acceptance
    yield "engine", tuning.dialect.name
    yield "against", tuning.against or "no other server"
    blocks = f"blocks of {plan.num_requests} or more requests with at most {plan.max_tokens} tokens"
    least = min(cell.num_repetitions for cell in tuning.cells)
    cut = f" (more did not fit into {plan.time_limit_s:g} seconds)" if least < plan.repeats else ""
    yield "runs", f"{medians(least)}{cut}, alternating; {blocks}, temperature {plan.temperature:g}; without prefill"
    if seen is not None:
        yield "acceptance", acceptance_line(tuning)
    differing, compared = (sum(getattr(c, n) for c in tuning.cells) for n in ("num_differing", "num_compared"))
    if compared and tuning.plan.temperature == 0:
        result = f"{compared} compared with plain decoding, {differing or 'none'} differ"
        yield "answers", result + ("; forerun prove --server finds out why" if differing else "")
    for sentence in tuning.unknown:
        yield "unknown", sentence


def acceptance_line(tuning: ServerTuning) -> str:
    """The server's acceptance at the first load."""
    seen = tuning.acceptance
    assert seen is not None, "only called if the acceptance is known"
    parts = [] if seen.acceptance_rate is None else [f"{seen.acceptance_rate:.0%} accepted"]
    if seen.depth is not None and seen.covered is not None:
        parts.append(f"{seen.depth:.1f} draft tokens per draft, {seen.covered:.0%} of rounds with a draft")
    if seen.reached:
        parts.append("by depth " + " ".join(f"{rate:.0%}" for rate in seen.at_depth))
    return "; ".join(parts) or f"{seen.tokens_per_round:.2f} tokens per round"


def verdict(tuning: ServerTuning) -> Iterator[Text]:
    """The conclusions: whether speculation is faster, from which load on it is slower, and the best depth."""
    for cell in tuning.cells:
        figures = [each for each in (cell.speculating, cell.plain) if each is not None]
        failed, errors = sum(each.num_failed for each in figures), [error for each in figures for error in each.errors]
        if failed:
            some = "; ".join(errors[:MOST_ERRORS])
            yield Text(f"{counted(failed, 'request')} of {counted(cell.clients, 'client')} failed: {some}", "red")
    if tuning.against is None:
        yield from conclusions_alone(tuning)
    elif tuning.undecided:
        yield Text(f"Undecided: this was {tuning.undecided}.", "bold red")
        yield Text("Run the same command again when other programs rest.", "red")
    else:
        yield from conclusions_compared(tuning)


def conclusions_alone(tuning: ServerTuning) -> Iterator[Text]:
    """The conclusions without a plain server."""
    seen = tuning.acceptance
    if seen is None:
        yield Text(
            "No conclusion: the server does not report its draft tokens, and there is no plain server to compare with.",
            "bold yellow",
        )
        return
    most = f"at most {seen.tokens_per_round:.2f} times as fast as plain decoding"
    yield Text(f"A round yields {seen.tokens_per_round:.2f} tokens, so the server is {most}.", "bold")
    reached = seen.reached or ()
    added = [(depth, rate * (seen.covered or 0.0)) for depth, rate in enumerate(reached, start=1)]
    if added:
        each = ", ".join(f"depth {depth} {tokens / seen.tokens_per_round:.0%}" for depth, tokens in added)
        yield Text(f"A depth saves time if its share of a round's time is below its share of the tokens: {each}.")


def conclusions_compared(tuning: ServerTuning) -> Iterator[Text]:
    """The conclusions with a plain server."""
    for cell in tuning.cells:
        if cell.speed_up is not None:
            yield Text(*gain_line(cell))
    slower, predicted = slower_from(tuning.cells), predicted_slower_from(tuning.cells)
    if slower is not None and slower is not tuning.cells[0]:
        yield Text(f"From {counted(slower.clients, 'client')} on, speculation is slower.", "bold yellow")
    elif predicted is not None:
        yield Text(
            f"By linear extrapolation of the costs of rounds, it is slower from about {predicted:.0f} clients on.",
            "yellow",
        )
    elif slower is None:
        yield Text("Speculation is not slower at any of these loads.", "green")
    for cell in tuning.cells:
        if (advice := advice_of(cell)) is not None:
            yield from advice_lines(tuning, cell, advice)


def gain_line(cell: ServedCell) -> tuple[str, str]:
    """(line, style): whether speculation is faster at a load."""
    spread, likely = cell.speed_up, cell.likely
    assert spread is not None, "both servers were measured"
    assert likely is not None, "both servers were measured"
    at = f"at {counted(cell.clients, 'client')}: {spread.median:.2f} times as fast"
    if cell.num_repetitions < 2:
        return f"One repetition {at}, which may be due to chance: no recommendation", "yellow"
    ends = f" (90 % interval {likely[0]:.2f} to {likely[1]:.2f})"
    if likely[0] <= 1 <= likely[1]:
        return f"No clear difference {at}{ends}", "yellow"
    faster = spread.median > 1
    return f"Speculation is {'faster' if faster else 'slower'} {at}{ends}", "bold green" if faster else "bold yellow"


def advice_lines(tuning: ServerTuning, cell: ServedCell, advice: DepthAdvice) -> Iterator[Text]:
    """The recommended depth at a load, a depth worth measuring, and the options that set it."""
    at = f"at {counted(cell.clients, 'client')}"
    if not advice.clear:
        line, style = f"No measured setting is clearly faster than plain decoding {at}", "yellow"
    elif advice.depth is None:
        line, style = f"The server's setting was fastest {at}", "green"
    elif advice.depth == 0:
        line, style = f"Plain decoding was fastest {at}", "bold yellow"
    else:
        line, style = f"Depth {advice.depth} was fastest {at}", "bold green"
    if (trial := advice.trial) is not None:
        line += f"; depth {trial.depth} should be faster, ×{trial.low:.2f} to ×{trial.high:.2f}: measure it too"
    elif (unmeasured := advice.open_depth) is not None:
        line += (
            f"; depth {unmeasured.depth}, which was not measured, may be faster or not: ×{unmeasured.low:.2f} to "
            f"×{unmeasured.high:.2f}"
        )
    yield Text(f"{line}.", style)
    changed = trial.depth if trial else advice.depth if advice.clear else None
    if changed is not None and (options := tuning.dialect.options(changed)):
        yield Text(f"  {options}")
