"""Outcome, Counts and Stats: the results and times of rounds, and their sums.

This file defines the acceptance rate, the acceptance by depth and the tokens per round, for an engine (`Stats`) and for
a request's metrics alike (`Counts`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from forerun.device import Captures, DeviceSpan, pins

MIN_GAIN_TOKENS = 16  # over fewer tokens, a speed-up would mostly reflect the first rounds


class RowOutcome(NamedTuple):
    """One sequence's round: how many tokens were drafted, judged along the path (`offered`), and accepted.

    `offered` is the number of depths at which a draft token was judged: one more than `accepted` after a rejection,
    else equal. `drafter` is the index of the mix's drafter that drafted the sequence, -1 for none; `by_drafter` maps
    each drafter to its numbers of drafted and accepted tokens. `num_cut` draft tokens were removed before the pass
    because a grammar forbids them; they count as rejected. `num_forced` tokens were forced by a grammar; they do not
    count as drafted.
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
        """Tokens of the target's pass: the root, and the draft tokens or forced tokens after it."""
        return 1 + self.num_drafted - self.num_cut + self.num_forced


@dataclass(frozen=True, slots=True)
class Outcome:
    """One round: its rows, and its times in seconds.

    `draft_pass_s`, part of `draft_s`, is the time of the drafters' passes; `drafter_s` that of each member of a mix.
    `verdict_s` is the time of verification and acceptance. `expected_plain_s` is the estimated time of the round
    without drafting, None if unknown or if prompts were read too. `num_queried` prompt tokens were looked up in the
    prefix cache, and `num_hits` found. `captured`: a CUDA graph was captured, so the times are not typical.
    """

    rows: Sequence[RowOutcome]
    num_prompt_tokens: int
    draft_s: float
    pass_s: float
    draft_pass_s: float = 0.0
    drafter_s: Sequence[float] = ()
    verdict_s: float = 0.0
    expected_plain_s: float | None = None
    num_queried: int = 0
    num_hits: int = 0
    captured: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the target's pass, prompt chunks excluded."""
        return sum(row.num_read for row in self.rows)

    @property
    def round_s(self) -> float:
        """Seconds of the round."""
        return self.draft_s + self.pass_s + self.verdict_s

    @property
    def plain_s(self) -> float | None:
        """Seconds of the round without drafting: the measured ones if nothing was drafted, else the estimate."""
        if self.expected_plain_s is None or any(row.num_drafted or row.num_forced for row in self.rows):
            return self.expected_plain_s
        return self.pass_s + self.verdict_s


class RoundClock:
    """Measures drafting, pass and verdict of a round. It starts when it is created; `mark` is called after the draft
    and after the pass.

    On CUDA the marks are events, since a GPU works asynchronously. `times` waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_captures = Captures.num
        self.called_s: list[float] = []
        self.events: list[torch.cuda.Event] = []
        self.ahead: DeviceSpan | None = None
        self.mark()

    def mark(self, ahead: DeviceSpan | None = None) -> None:
        """End the current part of the round; `ahead` is the time span of a pass that was launched in advance."""
        self.ahead = ahead
        self.called_s.append(time.perf_counter())
        if pins(self.device):
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self.events.append(event)

    def times(self, draft_pass_s: float) -> tuple[float, float, float, float]:
        """Seconds of drafting, of the drafters' passes within it, of the target's pass, and from there until now.

        `draft_pass_s` is the host's time in calls of the drafters' passes; a GPU's time beyond the host's is added.
        """
        draft_s, pass_s = (later - each for each, later in pairwise(self.called_s))
        if self.events:
            self.events[-1].synchronize()
            host_s = draft_s
            draft_s, pass_s = (each.elapsed_time(later) / 1000 for each, later in pairwise(self.events))
            draft_pass_s += max(0.0, draft_s - host_s)
        if self.ahead is not None:
            pass_s = self.ahead.taken_s
        return draft_s, draft_pass_s, pass_s, max(0.0, time.perf_counter() - self.called_s[0] - draft_s - pass_s)

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph was captured during the round."""
        return Captures.num > self.num_captures


@dataclass(slots=True)
class DrafterStats:
    """Counters of one drafter of a mix: rounds in which it drafted a sequence, and its draft tokens.

    A draft token of a merged tree counts for the member that drafted it first; MERGED has rounds only.
    """

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class LiveGain:
    """The measured time of rounds, and the estimated time of plain decoding for the same tokens."""

    round_s: float = 0.0
    plain_s: float = 0.0
    num_tokens: int = 0

    def add(self, round_s: float, plain_s: float, num_tokens: int) -> None:
        """Add a round that emitted `num_tokens` tokens."""
        self.round_s += round_s
        self.plain_s += plain_s
        self.num_tokens += num_tokens

    def join(self, other: LiveGain) -> None:
        """Add the rounds of another LiveGain."""
        self.add(other.round_s, other.plain_s, other.num_tokens)

    @property
    def gain(self) -> float | None:
        """The speed-up over plain decoding; None if too little was measured."""
        known = self.round_s and self.plain_s and self.num_tokens >= MIN_GAIN_TOKENS
        return self.plain_s / self.round_s if known else None


@dataclass(slots=True)
class Counts:
    """Draft tokens and accepted tokens over rounds. Each sequence that sampled tokens counts once per round.

    `pace` covers the rounds without prompts for which the time of plain decoding is known. `num_forced` tokens were
    forced by a grammar and do not count as drafted.
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
        """Add a row's counts to the drafters of a mix."""
        self.drafters.setdefault(row.drafter, DrafterStats()).num_rounds += 1
        for drafter, (num_drafted, num_accepted) in row.by_drafter.items():
            stats = self.drafters.setdefault(drafter, DrafterStats())
            stats.num_drafted += num_drafted
            stats.num_accepted += num_accepted

    @property
    def gain(self) -> float | None:
        """The measured speed-up over plain decoding; None if too little was measured, or nothing was to be drafted."""
        return self.pace.gain

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def acceptance_at_depth(self) -> tuple[float, ...]:
        """P(depth j accepted | depth j - 1 accepted and a draft token at depth j), from depth 1."""
        return tuple(a / o for a, o in zip(self.accepted_at_depth, self.offered_at_depth, strict=True))

    @property
    def tokens_per_round(self) -> float | None:
        """Accepted tokens + 1, averaged over sequences and rounds; tokens after a stop and forced tokens count too."""
        num_known = self.num_accepted + self.num_forced
        return (num_known + self.num_rounds) / self.num_rounds if self.num_rounds else None


@dataclass(slots=True)
class Stats(Counts):
    """Counters of an engine since its start; a round of prefill only does not count as a round.

    `num_prompt_tokens` were prefilled, `num_prefix_queries` looked up in the prefix cache, `num_prefix_hits` found
    there.
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
        """Prompt tokens found in the prefix cache over those looked up; None if none were looked up."""
        return self.num_prefix_hits / self.num_prefix_queries if self.num_prefix_queries else None

    def record(self, outcome: Outcome) -> None:
        """Count a round and its rows."""
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
