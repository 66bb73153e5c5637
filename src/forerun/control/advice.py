"""Advice: what the log is told about drafting while the engine runs.

This file decides when drafting counts as given up because it costs more than it gives, and when a draft model looks
as if something were wrong with it. Each is told once, until it has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from forerun.accept.outcome import Outcome

PLANS = 8  # in a row that draft nothing, or something: this is how it is now
WINDOW = 512  # guesses of a draft model
FEW = 0.01  # of them
TEXTS = 4  # from which they must be: one text may repeat itself

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Advice:
    """What was told last, and what has been seen since."""

    off: bool = False
    num_otherwise: int = 0  # plans in a row that were not as `off` says
    num_offered: int = 0
    num_accepted: int = 0
    texts: set[int] = field(default_factory=set)
    suspected: bool = False

    def planned(self, drafting: bool) -> bool:
        """Note a plan of rows that could be drafted; whether that they are, or are not, is new."""
        self.num_otherwise = self.num_otherwise + 1 if drafting == self.off else 0
        if self.num_otherwise < PLANS:
            return False
        self.off, self.num_otherwise = not self.off, 0
        return True

    def suspect(self, outcome: Outcome) -> None:
        """Count the guesses of a draft model, and say so where all or hardly any of very many were accepted."""
        if self.suspected or not outcome.draft_pass_s:
            return
        for row in outcome.rows:
            if row.offered:
                self.num_offered += row.offered
                self.num_accepted += row.accepted
                self.texts.add(row.seq_id)
        if self.num_offered < WINDOW or len(self.texts) < TEXTS:
            return
        if self.num_accepted == self.num_offered:
            self.suspected = True
            log.warning(
                "All %d guesses of the draft model were accepted. Is it the target itself? A smaller model would draft "
                "faster.",
                self.num_offered,
            )
        elif self.num_accepted <= FEW * self.num_offered:
            self.suspected = True
            log.warning(
                "Of %d guesses of the draft model %d were accepted. It probably has the wrong weights, or the prompts "
                "have a chat template that it was not trained with.",
                self.num_offered,
                self.num_accepted,
            )
        self.num_offered, self.num_accepted, self.texts = 0, 0, set()


@contextmanager
def without_advice() -> Iterator[None]:
    """Within it the controller does not say that drafting does not pay, where that is being found out or no matter."""
    log = logging.getLogger("forerun.control.measured")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
