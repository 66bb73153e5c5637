"""RoundClock: where the time of one round goes, by the clock of the device that computes it."""

from __future__ import annotations

import time

import torch

from forerun.device import Captures, Timer
from forerun.draft.base import Draft


class RoundClock:
    """Begins with the round. Its times may be read after the round's synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.began_s = time.perf_counter()
        self.num_captures = Captures.num
        self.timer = Timer(device)
        self.drafting_s = 0.0

    def drafted(self) -> None:
        """All that drafts is on its way."""
        self.timer.mark()
        self.drafting_s = time.perf_counter() - self.began_s

    def passed(self) -> None:
        """The target's pass is on its way."""
        self.timer.mark()

    def times(self, draft: Draft) -> tuple[float, float, float, tuple[float, ...], float]:
        """Seconds of drafting, the pass, drafters' passes, each member of a mix, and the verdict: see Outcome."""
        draft_s, pass_s = self.timer.seconds()
        draft_pass_s = draft.pass_s + max(0.0, draft_s - self.drafting_s)  # a GPU's passes go on after the calls
        verdict_s = max(0.0, time.perf_counter() - self.began_s - draft_s - pass_s)
        return draft_s, pass_s, draft_pass_s, tuple(draft.arm_s), verdict_s

    @property
    def captured(self) -> bool:
        """Whether a pass was captured since it began."""
        return Captures.num > self.num_captures
