"""TimeLimit: a deadline that can be divided among the parts of a task."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A deadline on the clock `time.monotonic`; none by default."""

    until_s: float = math.inf

    @classmethod
    def of(cls, seconds: float) -> TimeLimit:
        """The limit of `seconds` from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """The remaining seconds, at least 0."""
        return max(0.0, self.until_s - time.monotonic())

    @property
    def timeout_s(self) -> float | None:
        """The remaining seconds for asyncio.timeout; None for no limit."""
        return None if math.isinf(self.until_s) else self.left_s

    def part(self, share: float) -> TimeLimit:
        """A limit that ends after this share of the remaining time."""
        return TimeLimit.of(share * self.left_s)


NO_LIMIT = TimeLimit()
