"""Pace: the totals of an engine's rounds, with decoding kept apart from reading prompts.

This file defines speed: tokens divided by the time of the rounds that read no prompt, so that the comparison is about
decoding. What the drafter spends on reading the prompt counts as decoding time, which is to its disadvantage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.accept.outcome import Outcome, Stats


@dataclass(slots=True)
class Pace:
    """Rounds added up. `stats` and `num_decoded` count the rounds of decoding only."""

    stats: Stats = field(default_factory=Stats)
    num_decoded: int = 0
    decode_s: float = 0.0
    num_read: int = 0
    read_s: float = 0.0

    def count(self, outcome: Outcome, round_s: float) -> None:
        """One more round, and the time it took in all."""
        if outcome.num_prompt_tokens:
            self.num_read += outcome.num_prompt_tokens
            self.read_s += round_s
        else:
            self.stats.record(outcome)
            self.num_decoded += sum(row.num_emitted for row in outcome.rows)
            self.decode_s += round_s

    @property
    def tokens_per_s(self) -> float:
        """Speed of decoding; 0 before any."""
        return self.num_decoded / self.decode_s if self.decode_s else 0.0

    @property
    def total_s(self) -> float:
        """All the time the rounds took."""
        return self.read_s + self.decode_s

    @property
    def pass_s(self) -> float:
        """The target's pass in a round of decoding, on average."""
        return self.stats.pass_s / self.stats.num_passes if self.stats.num_passes else 0.0
