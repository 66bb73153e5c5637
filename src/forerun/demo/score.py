"""The score of races: speeds, tokens per round, costs, and whether speculation pays.

This file decides what is compared: the speed of decoding, without the reading of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forerun.bench.pace import Pace
from forerun.demo.race import RaceStep, Side

LEAST_TOKENS = 8  # an answer shorter than this shows nothing


@dataclass(slots=True)
class Tally(Pace):
    """The totals of one side's steps, in one race or many, and their texts."""

    token_ids: list[int] = field(default_factory=list)

    def add(self, step: RaceStep) -> None:
        """One more step."""
        self.token_ids += step.delta.token_ids if step.delta else ()
        self.count(step.outcome, step.step_s)

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "num_tokens": len(self.token_ids),
            "token_ids": self.token_ids,
            "tokens_per_s": self.tokens_per_s,
            "decode_s": self.decode_s,
            "read_s": self.read_s,
            "num_rounds": self.stats.num_rounds,
            "draft_s": self.stats.draft_s,
            "pass_s": self.stats.pass_s,
        }


@dataclass(slots=True)
class Score:
    """Both sides of one race, or of many added up."""

    plain: Tally = field(default_factory=Tally)
    speculative: Tally = field(default_factory=Tally)

    def add(self, step: RaceStep) -> None:
        """One more step of either side."""
        self.of(step.side).add(step)

    def of(self, side: Side) -> Tally:
        """One side."""
        return self.plain if side is Side.PLAIN else self.speculative

    @property
    def speed_up(self) -> float:
        """How many times as fast speculation decodes; 0 before there is something to compare."""
        return self.speculative.tokens_per_s / self.plain.tokens_per_s if self.plain.tokens_per_s else 0.0

    @property
    def pays(self) -> bool:
        """Whether speculation is faster."""
        return self.speed_up > 1

    @property
    def same_tokens(self) -> bool:
        """Whether both sides gave the same tokens, all of them."""
        return self.plain.token_ids == self.speculative.token_ids

    @property
    def pass_cost(self) -> float:
        """A drafted pass in units of a plain one; 0 before there is something to compare."""
        return self.speculative.pass_s / self.plain.pass_s if self.plain.pass_s else 0.0

    @property
    def pass_tokens(self) -> float:
        """Tokens in a drafted pass, on average: the root and its guesses."""
        stats = self.speculative.stats
        return 1 + stats.num_drafted / stats.num_rounds if stats.num_rounds else 1.0

    @property
    def draft_share(self) -> float:
        """The drafter's part of the speculative side's time."""
        return self.speculative.stats.draft_s / self.speculative.decode_s if self.speculative.decode_s else 0.0

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        stats = self.speculative.stats
        return {
            "plain": self.plain.as_object(),
            "speculative": self.speculative.as_object(),
            "speed_up": self.speed_up,
            "pays": self.pays,
            "same_tokens": self.same_tokens,
            "tokens_per_round": stats.tokens_per_round,
            "acceptance_rate": stats.acceptance_rate,
            "acceptance_at_depth": list(stats.acceptance_at_depth),
            "pass_cost": self.pass_cost,
            "pass_tokens": self.pass_tokens,
            "draft_share": self.draft_share,
        }


def verdict(score: Score) -> str:
    """Whether speculation pays on this machine."""
    if not score.speed_up:
        return "There is too little text to compare speeds."
    plain, speculative = score.plain.tokens_per_s, score.speculative.tokens_per_s
    speeds = f"{score.speed_up:.2f} times as fast, {speculative:.1f} instead of {plain:.1f} tokens/s"
    return f"Speculation {'pays' if score.pays else 'does not pay'} on this machine with these models: {speeds}."


def costs(score: Score) -> str:
    """What a round costs and gives: a drafted pass against a plain one, the drafter's share, the tokens."""
    return (
        f"a pass over {score.pass_tokens:.1f} tokens takes {score.pass_cost:.2f} times as long as over one, "
        f"the drafter {score.draft_share:.0%} of the time; "
        f"a round gives {score.speculative.stats.tokens_per_round or 0:.2f} tokens"
    )


def affordable_tokens(seen: Score, num_prompt_tokens: int, left_s: float, most: int) -> int:
    """How long an answer may be, at most `most`, if reading and both sides' decoding are to end in `left_s` seconds.

    Judged by the speeds of `seen`; never less than LEAST_TOKENS, unless `most` is.
    """
    per_token_s = per_read_s = 0.0
    for tally in (seen.plain, seen.speculative):
        per_token_s += tally.decode_s / max(1, tally.num_decoded)
        per_read_s += tally.read_s / max(1, tally.num_read)
    left_s -= per_read_s * num_prompt_tokens
    affordable = int(left_s / per_token_s) if per_token_s else most
    return min(most, max(LEAST_TOKENS, affordable))
