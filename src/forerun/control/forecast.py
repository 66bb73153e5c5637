"""Forecasts: the expected speed-up over plain decoding, from the controller's measurements.

A forecast assumes that every sequence is drafted by the same drafter to the same depth, whichever are best. At start-up
the measurements are from sample prompts, later from recent requests.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from forerun.config import AUTO_DEPTH
from forerun.control.choices import FAVOR
from forerun.control.costs import CostTable, Kind, size_class
from forerun.control.drafters import MeasuredDrafters
from forerun.economy import WEIGHT, Acceptance

BATCHES = (1, 8, 32)
SURE = 2.0  # standard errors between a forecast and its bounds: they hold in 95 % of cases
NARROW = 1.2  # ratio of the bounds up to which only the forecast itself is reported


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expected speed-up over plain decoding (`gain`) at a batch size, by the best drafter and depth.

    Depth 0 means that drafting would not be faster; `gain` is then that of the best drafter and depth nevertheless. The
    bounds `least` and `most` reflect the number of verified draft tokens, `num_drafted`; costs count as exact.
    """

    batch: int
    drafter: str
    depth: int
    gain: float
    least: float
    most: float
    num_drafted: int

    def __str__(self) -> str:
        drafter = f"{self.drafter}, " if self.drafter else ""
        sure = self.most <= NARROW * self.least
        gain = f"×{self.gain:.2f}" if sure else f"×{self.least:.2f} to ×{self.most:.2f}"
        return f"{gain} at batch {self.batch}" + (f" ({drafter}depth {self.depth})" if self.depth else "")


def forecast(costs: CostTable, drafters: MeasuredDrafters, batch: int, num_context: int = 0) -> Forecast | None:
    """The forecast for a batch size and total context; None without measured costs or verified draft tokens."""
    if not costs.kinds or not drafters.all:
        return None
    ways = [(drafter, depth) for depth in range(1, AUTO_DEPTH + 1) for drafter in range(len(drafters.all))]
    ways = [way for way in ways if measured(costs, drafters, *way, batch, num_context)] or ways
    rates = [record.evidence.rates() for record in drafters.all]
    gains = {way: gain(costs, drafters, *way, rates[way[0]], batch, num_context) for way in ways}
    drafter, depth = max(ways, key=gains.__getitem__)
    best, counts = gains[drafter, depth], drafters.all[drafter].evidence
    least, most = (gain(costs, drafters, drafter, depth, each, batch, num_context) for each in bounding(counts))
    num_drafted = round(sum(counts.offered) / counts.unit)
    if num_drafted == 0:
        return None
    return Forecast(batch, drafters.names[drafter], depth if best >= 1 + FAVOR else 0, best, least, most, num_drafted)


def bounding(counts: Acceptance) -> Iterator[list[float]]:
    """Lower, then upper bounds of the acceptance rates by depth (Wilson's interval)."""
    share, num = counts.overall(), sum(counts.offered) / counts.unit + WEIGHT
    off = SURE * math.sqrt(share * (1 - share) / num + (SURE / (2 * num)) ** 2)
    for sign in (-1, 1):
        bound = (share + SURE**2 / (2 * num) + sign * off) / (1 + SURE**2 / num)
        yield [min(1.0, max(0.0, rate + bound - share)) for rate in counts.rates()]


def gain(
    costs: CostTable,
    drafters: MeasuredDrafters,
    drafter: int,
    depth: int,
    rates: Sequence[float],
    batch: int,
    num_context: int,
) -> float:
    """The expected speed-up if one drafter drafts all rows to this depth, given acceptance `rates` by depth."""
    chosen, merged = drafters.all[drafter], drafters.is_mix and drafter == len(drafters.all) - 1
    members = drafters.all[:-1] if merged else [chosen]
    tokens: float = 1 + chosen.covered * sum(accumulate(rates[:depth], mul))
    rows, made = max(1, round(chosen.covered * batch)), [0.0, *chosen.cut_off.num_made(depth)]
    share = min(1.0, chosen.covered * batch)  # of rounds in which something is drafted
    plain_s = costs.expect(Kind.of(batch, num_context), batch)
    pass_s = max(plain_s, costs.expect(Kind.of(batch, num_context, merged), batch + rows * made[-1]))
    draft_s = sum(member.cost_s(1 + made[-2], rows) for member in members)
    return tokens * plain_s / (share * (pass_s + draft_s) + (1 - share) * plain_s)


def measured(
    costs: CostTable, drafters: MeasuredDrafters, drafter: int, depth: int, batch: int, num_context: int
) -> bool:
    """Whether passes of this size were measured: interpolated costs are too low for mixture-of-experts targets."""
    kind = Kind.of(batch, num_context, drafters.is_mix and drafter == len(drafters.all) - 1)
    num_tokens = batch + max(1, round(drafters.all[drafter].covered * batch)) * depth
    return size_class(num_tokens) in costs.of(kind).seen


def forecasts(costs: CostTable, drafters: MeasuredDrafters, most_rows: int) -> Sequence[Forecast]:
    """Forecasts for small, medium and large batches, as far as the engine's `most_rows` allow."""
    sizes = sorted({min(batch, most_rows) for batch in BATCHES})
    return tuple(each for batch in sizes if (each := forecast(costs, drafters, batch)) is not None)


def forecast_line(found: Sequence[Forecast]) -> str:
    """Forecasts in one line, for the log."""
    num = min(each.num_drafted for each in found)
    basis = f"(estimated from {num} draft token{'' if num == 1 else 's'} on built-in sample prompts)"
    if not any(each.depth for each in found):
        return f"drafting is not expected to save time {basis}: {max(found, key=lambda each: each.gain)} at best"
    plain = [f"plain decoding at batch {each.batch}" for each in found if not each.depth]
    paying = [str(each) for each in found if each.depth]
    return f"expected speed-up {basis}: {', '.join(paying + plain)}"


@contextmanager
def without_advice() -> Iterator[None]:
    """Suppress the controller's log messages about drafting being paused, during calibrations and measurements."""
    log = logging.getLogger("forerun.control.measured")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
