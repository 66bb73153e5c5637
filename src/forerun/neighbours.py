"""Neighbours: what other programs take of this process's cores while something is measured.

This file decides when a measurement counts as disturbed. What is measured beside a busy program is off by half and
more, whatever is done with medians; so whoever measures says so beside the figure, and keeps nothing of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from forerun.kernels.threads import allowed_cores, free_cores

DISTURBING = 0.2  # cores that others keep busy: what a quiet system does by itself is a tenth of that
LEAST_S = 0.2  # the system counts in hundredths of a second: of a shorter time that says little


@dataclass(slots=True)
class Neighbours:
    """Other programs on this process's cores, from the moment on at which this was made.

    `clock` gives seconds, and `others_s` the processor time that others have used, None where the system does not tell.
    """

    clock: Callable[[], float] = time.monotonic
    others_s: Callable[[], float | None] = field(default_factory=lambda: partial(free_cores().others_s, stolen=True))
    began_s: float = field(init=False)
    before_s: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.began_s, self.before_s = self.clock(), self.others_s()

    def num_busy(self) -> float | None:
        """Cores that others kept busy since then, on average; None where that is not known, or the time was short."""
        taken_s, after_s = self.clock() - self.began_s, self.others_s()
        if self.before_s is None or after_s is None or taken_s < LEAST_S:
            return None
        return max(0.0, after_s - self.before_s) / taken_s


def disturbs(num_busy: float | None) -> bool:
    """Whether others, who kept so many cores busy, make a measurement worthless."""
    return num_busy is not None and num_busy >= DISTURBING


def disturbance(num_busy: float | None) -> str:
    """What to say of a measurement; empty where nothing disturbed it."""
    if num_busy is None or not disturbs(num_busy):
        return ""
    cores = f"{num_busy:.1f} of {len(allowed_cores())} cores"
    return f"disturbed: other programs kept {cores} busy meanwhile, so this is not to be trusted"
