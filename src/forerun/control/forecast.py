"""Forecast: how much faster than plain decoding drafting would be, by what the controller knows.

It is made for rows that are all drafted alike, as far as pays most. At the start it goes by sample texts; later by the
texts of late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from forerun.config import AUTO_DEPTH
from forerun.control.arms import Arms
from forerun.control.pass_costs import Kind, PassCosts, size_class

BATCHES = (1, 8, 32)
PAYS = 1.02  # times as fast, below which drafting is as good as none


@dataclass(frozen=True, slots=True)
class Forecast:
    """The most that drafting gives at a batch size: times as fast as plain decoding, by this arm, this far.

    At depth 0 drafting does not pay, and the gain is that of the best way to draft all the same.
    """

    batch: int
    arm: str
    depth: int
    gain: float

    def __str__(self) -> str:
        arm = f"{self.arm}, " if self.arm else ""
        return f"×{self.gain:.2f} at batch {self.batch}" + (f" ({arm}depth {self.depth})" if self.depth else "")


def forecast(costs: PassCosts, arms: Arms, batch: int, num_context: int = 0) -> Forecast | None:
    """The forecast for so many rows with so many tokens of text together; None where nothing was measured."""
    if not costs.kinds or not arms.arms:
        return None
    ways = [(arm, depth) for depth in range(1, AUTO_DEPTH + 1) for arm in range(len(arms.arms))]
    ways = [way for way in ways if measured(costs, arms, *way, batch, num_context)] or ways
    gains = {(arm, depth): gain(costs, arms, arm, depth, batch, num_context) for arm, depth in ways}
    arm, depth = max(ways, key=gains.__getitem__)
    best = gains[arm, depth]
    return Forecast(batch, arms.names[arm], depth if best >= PAYS else 0, best)


def gain(costs: PassCosts, arms: Arms, arm: int, depth: int, batch: int, num_context: int) -> float:
    """Of drafting all rows by one arm, so far: tokens per second over those of plain rounds."""
    chosen, merged = arms.arms[arm], arms.is_mix and arm == len(arms.arms) - 1
    members = arms.arms[:-1] if merged else [chosen]
    tokens: float = 1 + chosen.covered * sum(accumulate(chosen.acceptance.rates()[:depth], mul))
    rows, made = max(1, round(chosen.covered * batch)), chosen.cut_off.reached(depth)
    plain_s = costs.of(Kind.of(batch, num_context)).expect(batch)
    pass_s = max(plain_s, costs.of(Kind.of(batch, num_context, merged)).expect_between(batch + rows * sum(made)))
    if chosen.covered * batch < 1:  # in most rounds nothing is drafted
        pass_s = chosen.covered * pass_s + (1 - chosen.covered) * plain_s
    steps = 1 + sum(made[:-1])
    draft_s = min(1.0, chosen.covered * batch) * sum(member.cost_s(steps, rows, 0) for member in members)
    return tokens * plain_s / (pass_s + draft_s)


def measured(costs: PassCosts, arms: Arms, arm: int, depth: int, batch: int, num_context: int) -> bool:
    """Whether passes of this size were seen: between sizes, a target with experts costs more than a line says."""
    kind = Kind.of(batch, num_context, arms.is_mix and arm == len(arms.arms) - 1)
    num_tokens = batch + max(1, round(arms.arms[arm].covered * batch)) * depth
    return size_class(num_tokens) in costs.of(kind).sizes


def forecasts(costs: PassCosts, arms: Arms, most_rows: int) -> Sequence[Forecast]:
    """Those for few, some and many rows, as far as an engine with so many places has them."""
    sizes = sorted({min(batch, most_rows) for batch in BATCHES})
    return tuple(each for batch in sizes if (each := forecast(costs, arms, batch)) is not None)


def told(found: Sequence[Forecast]) -> str:
    """Them in one line."""
    if not any(each.depth for each in found):
        best = max(found, key=lambda each: each.gain)
        return f"drafting is not expected to pay: ×{best.gain:.2f} at best, at batch {best.batch}"
    plain = [f"plain decoding at batch {each.batch}" for each in found if not each.depth]
    return "expected on texts like the samples: " + ", ".join([*(str(each) for each in found if each.depth), *plain])
