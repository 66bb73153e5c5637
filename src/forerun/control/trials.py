"""Trials: when to try plain decoding, another depth, or an unused drafter again, as its measurements may be outdated.

This file counts rounds since the last use of each alternative. `measured.py` computes what a trial costs, which decides
the interval to the next one, and plans the round of a trial.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from forerun.accept.outcome import Outcome

TRIES = 6  # rounds for which every drafter is tried at first, and the least time from a trial to the next
RETRY = 24  # unused rounds after which a drafter is tried again, before the cost of its trials is known
LONGEST = 256  # most rounds between trials, which otherwise follow from their cost
FIRST_DEPTH, TRIAL_DEPTH = 4, 2  # depth of a trial: of a new drafter, and of a known one
NOTHING, OTHER_DEPTH = -1, -2  # on trial instead of a drafter: plain decoding; half or twice the chosen depth
HOLD = 8  # rounds for which a plan is kept, and plans in a row after which the log reports drafting as on or off
WINDOW = 512  # draft tokens of a draft model, after which it is judged
FEW = 0.01  # acceptance rate below which it probably does not belong to the target
TEXTS = 4  # sequences that these draft tokens must come from: one text may repeat itself

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RetryTimer:
    """Counts the rounds in which an alternative was used, and those since; from these follows when its trial is due."""

    num_rounds: int = 0  # in use
    num_idle: int = 0  # rounds since the last use in which it could have been used
    patience: int = RETRY  # idle rounds until the next trial
    hopeful: bool = False  # the last trial went better than expected, so the next one follows after a round

    @property
    def new(self) -> bool:
        """Whether it was used too seldom for its measurements to count."""
        return self.num_rounds < TRIES

    @property
    def due(self) -> bool:
        """Whether it should be tried now."""
        return self.new or self.num_idle >= (1 if self.hopeful else self.patience)

    def wake(self) -> None:
        """Treat it as nearly new, since something has changed: it is tried once more."""
        self.patience = min(RETRY, self.patience)
        self.num_rounds = min(self.num_rounds, TRIES - 1)

    def count(self, used: bool, patience: int | None, hopeful: bool = False) -> None:
        """Learn from a round in which it was `used` or could have been.

        If that was a trial, `patience` is the number of rounds that its cost demands until the next one, else None; it
        is doubled.
        """
        if not used:
            self.num_idle += 1
            return
        self.num_rounds, self.num_idle = self.num_rounds + 1, 0
        longest = RETRY if self.hopeful else LONGEST  # one bad trial after good ones is not final
        self.patience = RETRY if patience is None else min(2 * max(TRIES, patience), longest)
        self.hopeful = hopeful


@dataclass(slots=True)
class Trials:
    """The timers of plain decoding and of other depths, and what was on trial in the last round."""

    plain: RetryTimer = field(default_factory=RetryTimer)
    other_depth: RetryTimer = field(default_factory=lambda: RetryTimer(num_rounds=TRIES))
    deeper: bool = False  # whether the last trial of another depth doubled the depth instead of halving it
    num_reading: int = 0  # rounds in a row with prefill
    tried: int | None = None  # on trial in the last round: a drafter's index, NOTHING, OTHER_DEPTH or None
    patience: int = 0  # rounds until the next trial of it, from its cost

    def begin(self) -> None:
        """Start after a calibration, which replaces the first trials."""
        self.plain, self.other_depth = RetryTimer(num_rounds=TRIES), RetryTimer(num_rounds=TRIES)

    def count(self, drafted: bool, cheap: bool) -> None:
        """Learn from a round, in which something was `drafted` or not; `cheap`: its pass took less than expected."""
        deeper, plain = self.tried == OTHER_DEPTH, self.tried == NOTHING
        self.other_depth.count(deeper, self.patience if deeper else None, cheap and deeper)
        self.plain.count(not drafted, self.patience if plain else None, cheap and plain)


@dataclass(slots=True)
class Advice:
    """What was logged last, and what has been counted since.

    The log reports when drafting is paused because it would cost more time than it saves, when it resumes, and when
    the acceptance rate of a draft model suggests that it is the wrong model.
    """

    off: bool = False  # whether drafting was last reported as paused
    warned: bool = False  # whether a pause was reported as a warning before
    num_otherwise: int = 0  # plans in a row that contradict `off`
    num_offered: int = 0
    num_accepted: int = 0
    texts: set[int] = field(default_factory=set)
    suspected: bool = False

    def planned(self, drafting: bool) -> bool:
        """Count a plan for sequences that could be drafted; returns whether `off` changes, after HOLD such plans."""
        self.num_otherwise = self.num_otherwise + 1 if drafting == self.off else 0
        if self.num_otherwise < HOLD:
            return False
        self.off, self.num_otherwise = not self.off, 0
        return True

    def suspect(self, outcome: Outcome) -> None:
        """Count the draft tokens of a draft model, and warn if all or hardly any of WINDOW tokens were accepted."""
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
            message = "All %d draft tokens of the draft model were accepted. Is it the target itself? A smaller model "
            log.warning(message + "would draft faster.", self.num_offered)
        elif few:
            message = "Of %d draft tokens of the draft model %d were accepted. It probably has the wrong weights, or "
            message += "the prompts use a chat template that it was not trained with."
            log.warning(message, self.num_offered, self.num_accepted)
        self.num_offered, self.num_accepted, self.texts = 0, 0, set()
