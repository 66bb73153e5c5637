"""Advice: which depth to serve at a load, by what was measured, and which others may be worth a measurement.

A depth is advised only where it was measured and the lower end of its range is at least 1; one that was not measured
may be named as worth a trial under the same condition.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.remote.depths import DepthRange
from forerun.remote.forecast import ServedCell

WORTH_CHANGING = 1.03  # times as fast, below which another depth is not advised


@dataclass(frozen=True, slots=True)
class DepthAdvice:
    """The depth to serve: None is "as it is served", 0 is plain decoding; `clear` is whether that is known to be right.

    `trial` was not measured and should be faster; `open_depth` was not measured and may be either, where no trial is.
    """

    depth: int | None
    clear: bool
    trial: DepthRange | None
    open_depth: DepthRange | None


def advice_of(cell: ServedCell) -> DepthAdvice | None:
    """What to serve at a load; None where there is nothing to compare with, or one repetition, which tells no noise."""
    if cell.speed_up is None or cell.likely is None or cell.num_repetitions < 2:
        return None
    asked = [each for each in cell.by_depth if each.measured and each.depth]
    choices: list[tuple[int | None, float, float]] = [(None, cell.speed_up.median, cell.likely[0])]
    choices += [(each.depth, each.middle / WORTH_CHANGING, each.low) for each in asked]
    faster = [(speed_up, depth) for depth, speed_up, low in choices if low >= 1]
    best, depth = max(faster, key=lambda each: each[0], default=(1.0, 0))
    clear = bool(faster) or all(speed_up <= 1 for _, speed_up, _ in choices)
    others = [each for each in cell.by_depth if not each.measured]
    trials = [each for each in others if each.low >= 1 and each.middle >= WORTH_CHANGING * best]
    trial = max(trials, key=lambda each: each.middle, default=None)
    may_be = [each for each in others if each.high >= WORTH_CHANGING * best and not trial]
    return DepthAdvice(depth, clear, trial, max(may_be, key=lambda each: each.middle, default=None))
