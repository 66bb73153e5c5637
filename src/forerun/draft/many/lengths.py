"""Lengths: how many guesses a cascade's judge is asked about at a time.

This module decides that by what the judge's rounds have cost and given so far: it takes the length at which a token of
the judge's takes the least time (`economy.py`). That time is all that the level above sees of this one, so if every
level keeps to it, the cascade as a whole is as fast as lengths can make it.

The judge may also draft by itself, in one call; that is what no guesses at all stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.economy import OTHERS_WEIGHT, Acceptance, LinearCost, best_depth

FIRST = 4  # guesses at a time, before anything was measured


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """How long a round took: `num_guesses` in a row, and the judge's pass over `num_tokens` with its verdict."""

    num_guesses: int
    draft_s: float
    num_tokens: int
    pass_s: float


@dataclass(slots=True)
class MeasuredLengths:
    """The best length by what was measured: acceptance by sequence, starting from that of all, and times of all.

    Counts fade with every round, also where it adds nothing to them: what was given up is tried again in time.
    """

    together: Acceptance = field(default_factory=Acceptance)
    apart: dict[int, Acceptance] = field(default_factory=dict)
    drafts: LinearCost = field(default_factory=lambda: LinearCost(flat=False))  # by guesses in a row
    passes: LinearCost = field(default_factory=LinearCost)  # by tokens in all
    alone: LinearCost = field(default_factory=LinearCost)  # by batch: a token each

    def best(self, seq_ids: Sequence[int], most: Sequence[int]) -> Sequence[int]:
        """How many guesses to ask for, for each of these sequences, of which `most[i]` are of use.

        The length with the least time per token, as if the others were asked for as much.
        """
        if self.drafts.weight == 0:
            return [min(FIRST, each) for each in most]
        batch, belief = len(seq_ids), self.together.overall()

        def round_s(length: int) -> float:
            if length == 0 and self.alone.weight > 0:
                return self.alone.expect(batch)
            return self.passes.expect(batch * (length + 1)) + (self.drafts.expect(length) if length else 0.0)

        rates = [self.apart.get(seq_id, Acceptance()).rates(belief, OTHERS_WEIGHT) for seq_id in seq_ids]
        return [best_depth(by_depth[:each], round_s) for by_depth, each in zip(rates, most, strict=True)]

    def count(self, seq_ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> None:
        """Learn from a round's verdicts: how many guesses each sequence had, and how many were accepted."""
        self.together.count(runs)
        for seq_id, run in zip(seq_ids, runs, strict=True):
            self.apart.setdefault(seq_id, Acceptance()).count([run])

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop what is known of these sequences alone."""
        for seq_id in seq_ids:
            self.apart.pop(seq_id, None)

    def time(self, timing: RoundTiming) -> None:
        """Learn from a round's times: a pass has its price by its tokens, and drafting by the guesses in a row."""
        self.passes.record(timing.num_tokens, timing.pass_s)
        if timing.num_guesses:
            self.drafts.record(timing.num_guesses, timing.draft_s)

    def went_alone(self, seq_ids: Sequence[int], depth: int, taken_s: float | None) -> None:
        """Learn what the judge took for chains of `depth` tokens by itself; None: that was not its usual price.

        Every token counts as a round without guesses.
        """
        if taken_s is not None:
            self.alone.record(len(seq_ids), taken_s / depth)
        for _ in range(depth):
            self.count(seq_ids, [(0, 0)] * len(seq_ids))
