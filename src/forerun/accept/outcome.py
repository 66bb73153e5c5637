"""Outcome, Counts and Stats: the results of rounds, counted by depth.

This file decides what is counted, and defines the acceptance rate, the acceptance by depth and the tokens per round.
An engine is counted in Stats and a request in its metrics, both with the same Counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from forerun.device import Captures, DeviceSpan, pins

LEAST_MEASURED = 16  # tokens, below which a gain would mostly tell what the first rounds took


class RowOutcome(NamedTuple):
    """One sequence's round: guesses in its tree, guesses on offer along its path, guesses accepted.

    `offered` is the number of depths at which the walk had a guess to accept: one more than `accepted` where it
    stopped at a rejection, the same where the path ended. `drafter` is the number of the one of a mix that drafted it,
    -1 for none; `by_drafter` how many guesses each of them made, and how many of those were accepted. `num_cut` of the
    guesses were never read, since a grammar forbids them; they count as rejected. `num_forced` tokens in the place of
    guesses were a grammar's, which leaves no choice, and count as none.
    """

    seq_id: int
    num_drafted: int
    offered: int
    accepted: int
    num_emitted: int
    drafter: int = -1
    by_drafter: Mapping[int, tuple[int, int]] = {}
    num_cut: int = 0
    num_forced: int = 0

    @property
    def num_read(self) -> int:
        """Tokens of the target's pass: the root, and what was guessed or forced behind it."""
        return 1 + self.num_drafted - self.num_cut + self.num_forced


@dataclass(frozen=True, slots=True)
class Outcome:
    """One round: its sequences, and where its time went.

    `draft_pass_s`, part of `draft_s`, is in drafters' passes; `drafter_s`, part of it too, in each member of a mix.
    `verdict_s` is what verifying and accepting took. `plain_s` is what the round would have taken without drafts, None
    where that is not known or prompts were read beside. `num_queried` tokens of prompts were looked up in the cache,
    and `num_hits` of them were known and not read. `captured`: a graph was, once, so its times are not those of others.
    """

    rows: Sequence[RowOutcome]
    num_prompt_tokens: int
    draft_s: float
    pass_s: float
    draft_pass_s: float = 0.0
    drafter_s: Sequence[float] = ()
    verdict_s: float = 0.0
    plain_s: float | None = None
    num_queried: int = 0
    num_hits: int = 0
    captured: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the target's pass, without those of prompts."""
        return sum(row.num_read for row in self.rows)

    @property
    def round_s(self) -> float:
        """Seconds of the whole round."""
        return self.draft_s + self.pass_s + self.verdict_s


class RoundClock:
    """Where the time of a round goes: begun with it, marked when its draft and when its pass are on their way.

    A GPU does its work after the calls, so its marks are events, but on MPS. `times` waits for them; a round may draw
    nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_captures = Captures.num
        self.called_s: list[float] = []
        self.events: list[torch.cuda.Event] = []
        self.ahead: DeviceSpan | None = None
        self.mark()

    def mark(self, ahead: DeviceSpan | None = None) -> None:
        """All that the round has asked for so far is on its way; the pass, or it was `ahead` of the round."""
        self.ahead = ahead
        self.called_s.append(time.perf_counter())
        if pins(self.device):
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self.events.append(event)

    def times(self, draft_pass_s: float) -> tuple[float, float, float, float]:
        """Seconds of drafting, of drafters' passes in it, of the target's pass, and of the verdict until now.

        `draft_pass_s` is what the calls of drafters' passes took.
        """
        draft_s, pass_s = (later - each for each, later in pairwise(self.called_s))
        if self.events:
            self.events[-1].synchronize()
            drafting_s = draft_s
            draft_s, pass_s = (each.elapsed_time(later) / 1000 for each, later in pairwise(self.events))
            draft_pass_s += max(0.0, draft_s - drafting_s)
        if self.ahead is not None:
            pass_s = self.ahead.taken_s
        return draft_s, draft_pass_s, pass_s, max(0.0, time.perf_counter() - self.called_s[0] - draft_s - pass_s)

    @property
    def captured(self) -> bool:
        """Whether a graph was captured since it began."""
        return Captures.num > self.num_captures


@dataclass(slots=True)
class DrafterStats:
    """Counters of one drafter of a mix: rounds in which it drafted a sequence, and guesses that it made.

    Guesses of a merged tree are those of the members that made them first; the drafter that merges makes none.
    """

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class LiveGain:
    """The time that rounds took, and the time that plain decoding would have taken for their tokens, by measurement."""

    round_s: float = 0.0
    plain_s: float = 0.0
    num_tokens: int = 0

    def add(self, round_s: float, plain_s: float, num_tokens: int) -> None:
        """Add a round that gave so many tokens."""
        self.round_s += round_s
        self.plain_s += plain_s
        self.num_tokens += num_tokens

    def join(self, other: LiveGain) -> None:
        """Add the rounds of another one."""
        self.add(other.round_s, other.plain_s, other.num_tokens)

    @property
    def gain(self) -> float | None:
        """How many times as fast it was as plain decoding would have been; None where too little was measured."""
        known = self.round_s and self.plain_s and self.num_tokens >= LEAST_MEASURED
        return self.plain_s / self.round_s if known else None


@dataclass(slots=True)
class Counts:
    """What became of guesses, over rounds. Only rounds in which a sequence drew tokens count, once per sequence.

    `pace` is of the rounds that read no prompts beside, where it is known what plain ones would take. `num_forced`
    tokens were those of grammars that left no choice: they were no guesses.
    """

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_forced: int = 0
    offered_at_depth: list[int] = field(default_factory=list)
    accepted_at_depth: list[int] = field(default_factory=list)
    drafters: dict[int, DrafterStats] = field(default_factory=dict)  # of a mix's, by number
    pace: LiveGain = field(default_factory=LiveGain)

    def count(self, row: RowOutcome) -> None:
        """Add one sequence's round."""
        self.num_rounds += 1
        self.num_drafted += row.num_drafted
        self.num_accepted += row.accepted
        self.num_emitted += row.num_emitted
        self.num_forced += row.num_forced
        missing = row.offered - len(self.offered_at_depth)
        self.offered_at_depth += [0] * missing
        self.accepted_at_depth += [0] * missing
        for depth in range(row.offered):
            self.offered_at_depth[depth] += 1
            self.accepted_at_depth[depth] += depth < row.accepted
        if row.drafter >= 0:
            self.count_drafters(row)

    def count_drafters(self, row: RowOutcome) -> None:
        """Add what the drafters of a mix did for one sequence."""
        self.drafters.setdefault(row.drafter, DrafterStats()).num_rounds += 1
        for drafter, (num_drafted, num_accepted) in row.by_drafter.items():
            stats = self.drafters.setdefault(drafter, DrafterStats())
            stats.num_drafted += num_drafted
            stats.num_accepted += num_accepted

    @property
    def gain(self) -> float | None:
        """How many times as fast as plain decoding, by measured rounds; None where too little was measured."""
        return self.pace.gain

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted; None where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def acceptance_at_depth(self) -> tuple[float, ...]:
        """P(depth j accepted | depth j - 1 accepted, and a guess on offer), from depth 1."""
        return tuple(a / o for a, o in zip(self.accepted_at_depth, self.offered_at_depth, strict=True))

    @property
    def tokens_per_round(self) -> float | None:
        """Accepted + 1, on average over sequences and rounds, as verified: before a stop cuts the run.

        Forced tokens count too.
        """
        num_known = self.num_accepted + self.num_forced
        return (num_known + self.num_rounds) / self.num_rounds if self.num_rounds else None


@dataclass(slots=True)
class Stats(Counts):
    """Counters of an engine since its start; a round that only reads prompts does not count as a round.

    `num_prompt_tokens` were read, `num_prefix_queries` looked up in the cache, where `num_prefix_hits` were known.
    """

    num_passes: int = 0
    num_prompt_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    draft_s: float = 0.0
    pass_s: float = 0.0
    draft_pass_s: float = 0.0

    @property
    def prefix_hit_rate(self) -> float | None:
        """Tokens of prompts that were known over those looked up; None where none were."""
        return self.num_prefix_hits / self.num_prefix_queries if self.num_prefix_queries else None

    def record(self, outcome: Outcome) -> None:
        """Count a round, with all of its rows."""
        self.num_passes += 1
        self.num_prompt_tokens += outcome.num_prompt_tokens
        self.num_prefix_queries += outcome.num_queried
        self.num_prefix_hits += outcome.num_hits
        self.draft_s += outcome.draft_s
        self.pass_s += outcome.pass_s
        self.draft_pass_s += outcome.draft_pass_s
        for row in outcome.rows:
            self.count(row)
        if outcome.plain_s is not None:
            num_tokens = sum(row.num_emitted for row in outcome.rows)
            self.pace.add(outcome.round_s, outcome.plain_s * num_tokens / len(outcome.rows), num_tokens)
