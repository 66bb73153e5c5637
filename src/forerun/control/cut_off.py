"""Cut-offs: the survival below which a guess ends its chain, since it would cost more time than it would save.

This file decides what that survival is. A guess pays where its chance to be accepted, times the tokens per second of
rounds as they are, is more than the seconds that a guess takes. A drafter's own estimate stands for the chance, set
right by how often guesses that it held unlikely were accepted; so drafters that are too modest lose nothing. Only a row
that is drafted alone is cut: a guess more of one row among several costs little, since the others are drafted on and
passes of some sizes cost the same, so that cuts were measured to lose there. Where guesses are judged by equality any
cut is exact; where they are judged by their law, `draft/model/grower.py` sees to it that a cut never looks at the guess
that it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from forerun.economy import Acceptance

UNLIKELY = 0.5  # chances below which estimates are compared with what came of them
MODEST = 2.0  # times as often as estimated unlikely guesses are accepted, as long as nothing was seen
MODEST_WEIGHT = 1.0  # accepted guesses, as estimated, that this belief counts as
NO_PRICE = 1e-9  # cuts nothing, and has the drafter tell what it thinks of its guesses
SLOWLY = 0.99  # what counts of earlier rounds
HIGHEST = 0.9  # survival above which no guess is cut


@dataclass(slots=True)
class CutOff:
    """Of one drafter. `made` counts by depth how many of the guesses that were planned it went on to make."""

    price: float = NO_PRICE
    made: Acceptance = field(default_factory=Acceptance)
    told: float = 0.0
    came: float = 0.0

    @property
    def modesty(self) -> float:
        """How many times as often as it estimates guesses are accepted that it holds unlikely."""
        return (self.came + MODEST_WEIGHT * MODEST) / (self.told + MODEST_WEIGHT)

    def aim(self, tokens_per_s: float, guess_s: float) -> None:
        """Set the price by what rounds are worth, and by what a guess takes."""
        self.price = min(HIGHEST, max(NO_PRICE, tokens_per_s * guess_s / self.modesty))

    def reached(self, depth: int) -> list[float]:
        """By depth the chance that a guess is made at all."""
        return list(accumulate(self.made.rates(belief=1.0)[:depth], mul))

    def learn(self, survival: Sequence[float], num_offered: int, num_accepted: int) -> None:
        """Compare what was told of a chain's guesses with how many were accepted of those that were judged."""
        before = 1.0
        self.told, self.came = SLOWLY * self.told, SLOWLY * self.came
        for depth, chance in enumerate(survival[:num_offered]):
            share = chance / before if before > 0 else 0.0
            if share < UNLIKELY:
                self.told += share
                self.came += depth < num_accepted
            before = chance
