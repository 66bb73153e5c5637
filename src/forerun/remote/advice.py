"""Advice: the best measured depth at a load, and other depths that are worth measuring.

A depth is advised only if it was measured and the lower end of its interval is at least 1. An unmeasured depth can be
suggested for a trial under the same condition.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.remote.depths import DepthRange
from forerun.remote.forecast import ServedCell

WORTH_CHANGING = 1.03  # minimum improvement for which another depth is advised


@dataclass(frozen=True, slots=True)
class DepthAdvice:
    """The advised depth: None is the current setting, 0 plain decoding; `clear`: whether the measurements support it.

    `trial`: an unmeasured depth that should be faster; `open_depth`: if there is none, one that may be faster.
    """

    depth: int | None
    clear: bool
    trial: DepthRange | None
    open_depth: DepthRange | None


def advice_of(cell: ServedCell) -> DepthAdvice | None:
    """The advice for a load; None without a comparison, or with a single repetition, which gives no noise estimate."""
    if cell.speed_up is None or cell.likely is None or cell.num_repetitions < 2:
        return None
    measured = [each for each in cell.by_depth if each.measured and each.depth]
    choices: list[tuple[int | None, float, float]] = [(None, cell.speed_up.median, cell.likely[0])]
    choices += [(each.depth, each.middle / WORTH_CHANGING, each.low) for each in measured]
    faster = [(speed_up, depth) for depth, speed_up, low in choices if low >= 1]
    best, depth = max(faster, key=lambda each: each[0], default=(1.0, 0))
    clear = bool(faster) or all(speed_up <= 1 for _, speed_up, _ in choices)
    others = [each for each in cell.by_depth if not each.measured]
    trials = [each for each in others if each.low >= 1 and each.middle >= WORTH_CHANGING * best]
    trial = max(trials, key=lambda each: each.middle, default=None)
    may_be = [each for each in others if each.high >= WORTH_CHANGING * best and not trial]
    return DepthAdvice(depth, clear, trial, max(may_be, key=lambda each: each.middle, default=None))
