"""The terminal report of a server's tuning; every number comes from a ServerTuning."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from forerun.bench.show import medians, number, speed_up_cells
from forerun.machine import disturbance
from forerun.remote.depths import DepthRange
from forerun.remote.forecast import DepthAdvice, ServedCell, advice_of, expected_to_hurt_from, hurts_from
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
DEPTHS = "Speed-up by depth, × where measured, with ranges that hold it nine times in ten"
ONCE = "Speed-up by depth, × where measured; one repetition does not tell how far chance widens these ranges"


def server_card(tuning: ServerTuning) -> RenderableType:
    """The report as a renderable card."""
    loads = FigureTable(HEADS, [list(load_row(tuning, cell)) for cell in tuning.cells])
    by_depth: list[RenderableType] = []
    if any(cell.by_depth for cell in tuning.cells):
        heads = ("guesses\na round", *(counted(cell.clients, "client") for cell in tuning.cells))
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
    yield from speed_up_cells(cell.speed_up, tuning.disturbed)
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
    yield "against", tuning.against or "nothing"
    blocks = f"{plan.num_requests} requests or more in each block, at most {plan.max_tokens} tokens each"
    least = min(cell.num_repetitions for cell in tuning.cells)
    cut = f", for more {plan.time_limit_s:g} seconds did not do" if least < plan.repeats else ""
    yield "runs", f"{medians(least)}{cut}, by turns; {blocks}, temperature {plan.temperature:g}; reading is not timed"
    if seen is not None:
        yield "guesses", acceptance_line(tuning)
    differing, compared = (sum(getattr(c, n) for c in tuning.cells) for n in ("num_differing", "num_compared"))
    if compared and tuning.plan.temperature == 0:
        same = "all as without speculation" if not differing else f"{differing} not as without speculation"
        yield "answers", f"{compared} compared, {same}" + ("; forerun prove --server says why" if differing else "")
    for sentence in tuning.unknown:
        yield "not known", sentence


def acceptance_line(tuning: ServerTuning) -> str:
    """The server's acceptance at the first load."""
    seen = tuning.acceptance
    assert seen is not None, "only called if the server counts"
    parts = [] if seen.acceptance_rate is None else [f"{seen.acceptance_rate:.0%} accepted"]
    if seen.depth is not None and seen.covered is not None:
        parts.append(f"{seen.depth:.1f} a draft, in {seen.covered:.0%} of rounds")
    if seen.reached:
        parts.append("by depth " + " ".join(f"{rate:.0%}" for rate in seen.at_depth))
    return "; ".join(parts) or f"{seen.tokens_per_round:.2f} tokens a round"


def verdict(tuning: ServerTuning) -> Iterator[Text]:
    """The conclusions: whether speculation helps, from which load on it hurts, and the best depth."""
    for cell in tuning.cells:
        figures = [each for each in (cell.speculating, cell.plain) if each is not None]
        failed, errors = sum(each.num_failed for each in figures), [error for each in figures for error in each.errors]
        if failed:
            some = "; ".join(errors[:MOST_ERRORS])
            yield Text(f"{counted(failed, 'request')} of {counted(cell.clients, 'client')} failed: {some}", "red")
    if tuning.against is None:
        yield from alone(tuning)
    else:
        yield from compared(tuning)
    if note := disturbance(tuning.num_busy):
        yield Text(f"That was {note}.", "bold red")


def alone(tuning: ServerTuning) -> Iterator[Text]:
    """The conclusions without a plain server."""
    seen = tuning.acceptance
    if seen is None:
        yield Text(
            "Nothing is known of its speculation: neither guesses are counted, nor is there plain decoding.",
            "bold yellow",
        )
        return
    most = f"at most {seen.tokens_per_round:.2f} times as fast"
    yield Text(
        f"Its rounds give {seen.tokens_per_round:.2f} tokens, so speculation makes it {most} as plain decoding.", "bold"
    )
    reached = seen.reached or ()
    worth = [(depth, rate * (seen.covered or 0.0)) for depth, rate in enumerate(reached, start=1)]
    if worth:
        each = ", ".join(f"depth {depth} {tokens / seen.tokens_per_round:.0%}" for depth, tokens in worth)
        yield Text(f"A depth pays if it makes a round longer by less than what it gives: {each} of the tokens.")


def compared(tuning: ServerTuning) -> Iterator[Text]:
    """The conclusions with a plain server."""
    for cell in tuning.cells:
        if cell.speed_up is not None:
            yield Text(*gain_line(cell))
    hurts, expected = hurts_from(tuning.cells), expected_to_hurt_from(tuning.cells)
    if hurts is not None and hurts is not tuning.cells[0]:
        yield Text(f"From {counted(hurts.clients, 'client')} on it hurts.", "bold yellow")
    elif expected is not None:
        yield Text(
            f"Extrapolated linearly from the costs of rounds, it would hurt from about {expected:.0f} clients on.",
            "yellow",
        )
    elif hurts is None:
        yield Text("It hurts at none of these loads.", "green")
    for cell in tuning.cells:
        if (advice := advice_of(cell)) is not None:
            yield from advice_lines(tuning, cell, advice)


def gain_line(cell: ServedCell) -> tuple[str, str]:
    """(line, style): whether speculation helps at a load."""
    spread, likely = cell.speed_up, cell.likely
    assert spread is not None, "both ways were measured"
    assert likely is not None, "both ways were measured"
    at = f"at {counted(cell.clients, 'client')}: {spread.median:.2f} times as fast"
    if cell.num_repetitions < 2:
        return f"One repetition {at}, which tells no difference from chance: nothing is advised", "yellow"
    ends = f" (nine times in ten {likely[0]:.2f} to {likely[1]:.2f})"
    if likely[0] <= 1 <= likely[1]:
        return f"No clear difference {at}{ends}", "yellow"
    helps = spread.median > 1
    return f"Speculation {'helps' if helps else 'hurts'} {at}{ends}", "bold green" if helps else "bold yellow"


def advice_lines(tuning: ServerTuning, cell: ServedCell, advice: DepthAdvice) -> Iterator[Text]:
    """The advised depth at a load, depths worth measuring, and the options that set them."""
    at = f"at {counted(cell.clients, 'client')}"
    if not advice.clear:
        line, style = f"Nothing that was measured is clearly faster than plain decoding {at}", "yellow"
    elif advice.depth is None:
        line, style = f"As it is served, it is right {at}", "green"
    elif advice.depth == 0:
        line, style = f"Plain decoding was fastest {at}", "bold yellow"
    else:
        line, style = f"Depth {advice.depth} was fastest {at}", "bold green"
    if (trial := advice.trial) is not None:
        line += f"; depth {trial.depth} may be faster, ×{trial.low:.2f} to ×{trial.high:.2f}: measure it too"
    elif (left := advice.open_depth) is not None:
        measured = sum(bool(each.depth and each.measured) for each in cell.by_depth)
        line += (
            f"; {counted(measured, 'measured depth')} leave{'s' if measured == 1 else ''} open what others bring, "
            f"as depth {left.depth}, ×{left.low:.2f} to ×{left.high:.2f}"
        )
    yield Text(f"{line}.", style)
    changed = trial.depth if trial else advice.depth if advice.clear else None
    if changed is not None and (options := tuning.dialect.options(changed)):
        yield Text(f"  {options}")
