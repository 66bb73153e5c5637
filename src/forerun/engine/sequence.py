"""Sequence: one text being generated, with its tokens and status.

A sequence holds the state of one sample of one request and makes no decisions. Keys and values belong to the cache,
indexes and head states to the drafter; both are keyed by the sequence's id.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum

from forerun.accept.outcome import LiveGain
from forerun.accept.stop import StopChecker
from forerun.config import Speculation
from forerun.sampling.constraint import Constraint
from forerun.sampling.draws import RowSampling
from forerun.sampling.edits import TextEdits
from forerun.sampling.logprobs import TokenLogprobs
from forerun.sampling.params import SamplingParams


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # not in the batch: new, or preempted
    RUNNING = "running"
    FINISHED = "finished"


class Origin(Enum):
    """How a token came about; every token is the target's own choice, whatever its origin."""

    TARGET = "target"  # drawn with nothing drafted
    DRAFTED = "drafted"  # drafted and accepted
    RECOVERED = "recovered"  # drawn where all guesses were rejected
    BONUS = "bonus"  # drawn behind a draft that was accepted to its end

    def __repr__(self) -> str:
        return self.value  # results hold one for each token


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of one request; equal to itself alone, whatever it holds.

    `tokens` is prompt and output, the last one (the root) not yet read by the target; `num_read` of them are in the
    target's cache. `max_length` is the context limit. What a tenant's sequences say never drafts for another tenant's.
    """

    id: int
    request_id: int
    sample: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    eos_ids: tuple[int, ...]
    max_length: int
    speculation: Speculation
    stop: StopChecker
    tenant: str | None = ""  # None: nobody may be drafted with it
    bad_words: Seq[Seq[int]] = ()
    constraint: Constraint | None = None  # the grammar's
    draft_details: bool = False  # whether its deltas tell what was drafted
    status: Status = Status.WAITING
    num_read: int = 0
    num_cached: int | None = None  # tokens of the prompt that were not read, as they were known; None before it began
    origins: list[Origin] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_preempted: int = 0
    started_s: float | None = None  # when it first had a place in the batch, by time.perf_counter
    pace: LiveGain = field(default_factory=LiveGain)
    edits: TextEdits | None = None  # of the text as it was when `sampling` was last called

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def unread(self) -> list[int]:
        """Tokens before the root that the target has not read: the prompt at first, all of them after preemption."""
        return self.tokens[self.num_read : -1]

    @property
    def room(self) -> int:
        """Tokens that may still be generated."""
        asked = self.params.max_tokens
        limit = self.max_length - len(self.tokens)
        return limit if asked is None else min(limit, asked - self.num_output)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be recorded."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    def extend(self, place: int, tokens: Seq[int], origins: Seq[Origin]) -> None:
        """Set the tokens from `place` on; repeating it changes nothing."""
        self.tokens[place:] = tokens
        self.origins[place - self.num_prompt :] = origins

    def restart(self) -> None:
        """Wait to be read again from the first token on. The tokens stay."""
        self.status, self.num_read = Status.WAITING, 0
        self.stop = self.stop.anew(self.tokens[self.num_prompt :])

    def sampling(self) -> RowSampling:
        """What a round's draws need of this sequence."""
        if self.edits is None:
            self.edits = TextEdits.of(self.params, self.tokens, self.num_prompt, self.eos_ids, self.bad_words)
        self.edits = self.edits.at(self.tokens)
        if self.constraint is not None:
            self.constraint.follow(self.tokens)
        return RowSampling(
            seq_id=self.id,
            params=self.params,
            seed=self.seed,
            sample=self.sample,
            tokens=self.tokens,
            num_prompt=self.num_prompt,
            eos_ids=self.eos_ids,
            bad_words=self.bad_words,
            edits=self.edits,
            constraint=self.constraint,
        )
