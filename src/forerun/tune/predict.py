"""Prediction: the speed-up that measured acceptance and measured costs lead one to expect.

A text that is drafted `d` deep gives G(d) = 1 + the mean of min(accepted, d) tokens in a round, counted over the rounds
of a run at a larger depth. So T tokens take T / G(d) rounds, and what a round takes depends on how many rows are in it.
A batch of rows is refilled while there are texts; texts that are done early leave smaller rounds behind at the end.
Before it drafts a text, a drafter reads its prompt, which counts as drafting; the target's reading counts on no side.
This file holds that arithmetic; `costs.py` tells what rounds take.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol, runtime_checkable

LEAST_SEEN = 5  # guesses, below which a share of them is not told


@dataclass(frozen=True, slots=True)
class TextRounds:
    """How one text was drafted: in how many rounds it had so many guesses, and so many of them were accepted."""

    category: str
    rounds: Mapping[tuple[int, int], int]

    @property
    def num_rounds(self) -> int:
        """Rounds in all."""
        return sum(self.rounds.values())

    def mean(self, figure: Callable[[int, int], int]) -> float:
        """A figure of guesses and accepted ones, on average over the rounds; 0 without any."""
        total = sum(times * figure(drafted, accepted) for (drafted, accepted), times in self.rounds.items())
        return total / self.num_rounds if self.rounds else 0.0

    def tokens(self, depth: int) -> float:
        """G: what a round gives where at most so many guesses are made."""
        return 1 + self.mean(lambda _, accepted: min(accepted, depth))


@dataclass(frozen=True, slots=True)
class Drafting:
    """What rounds of a depth are like for a row, on average: how many guesses it has, and how often it has any."""

    arm: str
    depth: int
    guesses: float
    covered: float


@runtime_checkable
class RoundCosts(Protocol):
    """What rounds take."""

    def plain_s(self, num_rows: int) -> float:
        """Seconds of a plain round of so many rows."""
        ...

    def drafted_s(self, num_rows: int, drafting: Drafting) -> float:
        """Seconds of a round in which all rows are drafted like this."""
        ...

    def reading_s(self, arm: str, num_tokens: float) -> float:
        """Seconds that what drafts takes to read a prompt of so many tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Prediction:
    """The best that is expected at a batch size: times as fast as plain decoding, by this arm, this far.

    `by_depth` is the most that is expected of any arm at depth 1, 2, and so on.
    """

    arm: str
    depth: int
    speed_up: float
    by_depth: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DecodingJob:
    """What is to be decoded: so many texts of so many tokens, in batches of so many, behind prompts."""

    num_texts: int
    num_tokens: float
    batch: int
    num_prompt_tokens: float = 0.0  # of a text


def predict(texts: Mapping[str, Sequence[TextRounds]], costs: RoundCosts, job: DecodingJob, deepest: int) -> Prediction:
    """The best depth for a job, at most `deepest`, given how each arm drafted the texts of a pilot."""
    gains = {
        (depth, arm): speed_up(rounds, costs, job, arm, depth)
        for depth in range(1, deepest + 1)
        for arm, rounds in texts.items()
    }
    by_depth = [max(gains[depth, arm] for arm in texts) for depth in range(1, deepest + 1)]
    depth, arm = max(gains, key=gains.__getitem__)
    return Prediction(arm, depth, gains[depth, arm], tuple(by_depth))


def speed_up(texts: Sequence[TextRounds], costs: RoundCosts, job: DecodingJob, arm: str, depth: int) -> float:
    """How many times as fast a job is expected to be, drafted by this arm, this far."""
    drafting = drafting_of(texts, arm, depth)
    lengths = [job.num_tokens / texts[number % len(texts)].tokens(depth) for number in range(job.num_texts)]
    plain_s = total_s([job.num_tokens] * job.num_texts, job.batch, costs.plain_s)
    drafted_s = total_s(lengths, job.batch, lambda num_rows: costs.drafted_s(num_rows, drafting))
    return plain_s / (drafted_s + job.num_texts * costs.reading_s(arm, job.num_prompt_tokens))


def drafting_of(texts: Sequence[TextRounds], arm: str, depth: int) -> Drafting:
    """What rounds of this depth are like, over all texts: those that take more rounds count more."""
    weights = [1 / text.tokens(depth) for text in texts]
    guesses = [text.mean(lambda drafted, _: min(drafted, depth)) for text in texts]
    covered = [text.mean(lambda drafted, _: drafted > 0) for text in texts]

    def over(values: Sequence[float]) -> float:
        return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)

    return Drafting(arm, depth, over(guesses), over(covered))


def total_s(lengths: Sequence[float], batch: int, round_s: Callable[[int], float]) -> float:
    """Seconds for texts that take so many rounds each."""
    return sum(num_rounds * round_s(num_rows) for num_rows, num_rounds in rounds_by_rows(lengths, batch).items())


def rounds_by_rows(lengths: Sequence[float], batch: int) -> dict[int, float]:
    """How many rounds have so many rows, where texts begin in order, each as soon as there is a place."""
    waiting, ends, now, found = list(reversed(lengths)), list[float](), 0.0, defaultdict[int, float](float)
    while waiting or ends:
        while waiting and len(ends) < batch:
            heappush(ends, now + waiting.pop())
        end = heappop(ends)
        if end > now:
            found[1 + len(ends)] += end - now
        now = end
    return dict(found)


def acceptance_at_depth(texts: Sequence[TextRounds]) -> tuple[float, ...]:
    """P(guess j accepted | those before it were, and it was on offer), from depth 1, over all rounds of all texts.

    It ends where fewer than LEAST_SEEN guesses were on offer, which would say little.
    """
    offered, accepted = Counter[int](), Counter[int]()
    for text in texts:
        for (num_drafted, num_accepted), times in text.rounds.items():
            for depth in range(1, min(num_drafted, num_accepted + 1) + 1):
                offered[depth] += times
                accepted[depth] += times * (depth <= num_accepted)
    return tuple(accepted[depth] / offered[depth] for depth in sorted(offered) if offered[depth] >= LEAST_SEEN)
