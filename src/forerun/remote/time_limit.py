"""A time limit, of which each part of a task may take a share of what is left."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Until when something may take, on the clock `time.monotonic`; for ever unless told."""

    until_s: float = math.inf

    @classmethod
    def of(cls, seconds: float) -> TimeLimit:
        """So many seconds from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """The seconds that are left, 0 where it is over."""
        return max(0.0, self.until_s - time.monotonic())

    @property
    def timeout_s(self) -> float | None:
        """The seconds that are left, as asyncio wants them: None is for ever."""
        return None if math.isinf(self.until_s) else self.left_s

    def part(self, share: float) -> TimeLimit:
        """A share of what is left, from now."""
        return TimeLimit.of(share * self.left_s)


NO_LIMIT = TimeLimit()
