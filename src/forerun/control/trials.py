"""Trials: when plain decoding, another depth, or a drafter that is not in use is tried again, and what hastens that.

This file counts rounds, and says when drafting counts as given up. `measured.py` says what trials cost and what came of
them, and draws up their rounds.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from forerun.accept.outcome import Outcome
from forerun.control.costs import LONG

TRIES = 6  # rounds in which every drafter is tried at first
RETRY = 24  # rounds out of use after which one is tried again
SHORTEST, LONGEST = 6, 256  # rounds behind a trial, by what it cost
AGAIN = 2  # rounds in which it is tried again where something has changed
MANY_ROWS = 3  # that count for a round each
SOON = 2  # rounds behind a trial that went well
FIRST_DEPTH, TRIAL_DEPTH = 4, 2  # guesses of a row for which a drafter is tried: at first, and later
NOTHING, OTHER_DEPTH = -1, -2  # on trial instead of a drafter: to draft nothing; what is drafted, half or twice as deep
HOLD = 8  # rounds for which a plan is held, and plans in a row that draft nothing, or something: so it is now
WINDOW = 512  # guesses of a draft model
FEW = 0.01  # of them
TEXTS = 4  # from which they must be: one text may repeat itself

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RetryTimer:
    """When something was last in use, and when it is due for a trial."""

    num_rounds: int = 0  # in use; with many rows a round counts as several
    num_idle: int = 0  # rounds since it was last in use, in which it could have been
    patience: int = RETRY
    hopeful: bool = False  # the next trial is soon

    @property
    def new(self) -> bool:
        """Whether it was not yet used often enough to be known."""
        return self.num_rounds < TRIES

    @property
    def due(self) -> bool:
        """Whether it should be tried."""
        return self.new or self.num_idle >= (SOON if self.hopeful else self.patience)

    def wake(self) -> None:
        """Something has changed: it is tried again as if it were new, in fewer rounds."""
        self.patience = min(RETRY, self.patience)
        self.num_rounds = min(self.num_rounds, TRIES - AGAIN)

    def count(self, num_rows: int, patience: int | None, hopeful: bool = False) -> None:
        """Learn from a round in which it drafted so many rows.

        Behind a trial the next one waits for `patience`, twice that unless it was `hopeful`: better than thought.
        """
        if num_rows == 0:
            self.num_idle += 1
            return
        self.num_rounds, self.num_idle = self.num_rounds + min(num_rows, MANY_ROWS), 0
        longest = RETRY if self.hopeful else LONGEST  # one bad trial behind good ones does not settle it
        self.patience = RETRY if patience is None else min(max(SHORTEST, patience) * (1 if hopeful else 2), longest)
        self.hopeful = hopeful


@dataclass(slots=True)
class Trials:
    """When plain decoding and another depth are tried again, and what is on trial in the last round."""

    plain: RetryTimer = field(default_factory=RetryTimer)
    other_depth: RetryTimer = field(default_factory=lambda: RetryTimer(num_rounds=TRIES))
    deeper: bool = False  # whether the last depth that was tried was twice what is drafted, not half of it
    num_reading: int = 0  # rounds in a row that read prompts
    tried: int | None = None  # a drafter, NOTHING or OTHER_DEPTH
    patience: int = 0  # rounds that the next trial of that has to wait
    awake: int = LONG  # rounds since something changed

    def begin(self) -> None:
        """Behind a calibration nothing needs a first trial."""
        self.plain, self.other_depth = RetryTimer(num_rounds=TRIES), RetryTimer(num_rounds=TRIES)

    def wake(self) -> bool:
        """Something has changed: try plain decoding soon. False where that was done a short while ago."""
        if self.awake < LONG:
            return False
        self.awake = 0
        self.plain.wake()
        return True

    def count(self, drafted: bool, cheap: bool) -> None:
        """Learn from a round in which something was `drafted`, or nothing; `cheap`: its pass took less than thought."""
        self.awake += 1
        deeper, plain = self.tried == OTHER_DEPTH, self.tried == NOTHING
        self.other_depth.count(int(deeper), self.patience if deeper else None, cheap and deeper)
        self.plain.count(int(not drafted), self.patience if plain else None, cheap and plain)


@dataclass(slots=True)
class Advice:
    """What the log was told last, and what has been seen since.

    It is told when drafting counts as given up, because it costs more than it gives, and when a draft model looks as if
    something were wrong with it.
    """

    off: bool = False
    num_otherwise: int = 0  # plans in a row that were not as `off` says
    num_offered: int = 0
    num_accepted: int = 0
    texts: set[int] = field(default_factory=set)
    suspected: bool = False

    def planned(self, drafting: bool) -> bool:
        """Note a plan of rows that could be drafted; whether that they are, or are not, is new."""
        self.num_otherwise = self.num_otherwise + 1 if drafting == self.off else 0
        if self.num_otherwise < HOLD:
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
        every, few = self.num_accepted == self.num_offered, self.num_accepted <= FEW * self.num_offered
        self.suspected = every or few
        if every:
            message = "All %d guesses of the draft model were accepted. Is it the target itself? A smaller model would "
            log.warning(message + "draft faster.", self.num_offered)
        elif few:
            message = "Of %d guesses of the draft model %d were accepted. It probably has the wrong weights, or the "
            message += "prompts have a chat template that it was not trained with."
            log.warning(message, self.num_offered, self.num_accepted)
        self.num_offered, self.num_accepted, self.texts = 0, 0, set()
