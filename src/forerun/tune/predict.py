"""Prediction: the speed-up that recorded guesses and measured costs lead one to expect.

A pilot records at every place of every text what a drafter guesses there, and how far that is right. From this follow
the rounds of a run at any depth, exactly: sampling is coupled, so the text is the same whatever is drafted, and a round
begins where the one before it ended. A job is played round by round as the engine would run it: places of the batch
are filled from a queue, prompts are read, rows differ in guesses. Each round is charged what rounds of its shape take.
As in every measured run, rounds that read prompts count on no side. This file holds that arithmetic; `passes.py` tells
what rounds take.

Two things are approximated. What a drafter remembers of other texts depends on which of them are finished: with more
than one row at once, that differs a little from depth to depth. And a mix is replayed with a single drafter for all
rounds, its merged trees cut from those of the greatest depth.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from forerun.engine.scheduler import chunk_sizes

LEAST_SEEN = 5  # guesses, below which a share of them is not told
RESAMPLES = 200
LIKELY = 0.9  # of other prompts' speed-ups that lie in the interval
MOST_PLAYED = 400_000  # rounds of sequences that the resampling may play in all


class Guessed(NamedTuple):
    """What a drafter did in one round: how many guesses it made, and how many of them were accepted."""

    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class TextRounds:
    """How one text is drafted. `places[g]` is of a round that begins behind g tokens of the answer.

    It holds what is guessed there at depth 1, 2, and so on; deeper drafts are as the last of them, and an empty place
    is not drafted at all. The answer has `num_tokens`, and `num_prompt` tokens stand before it.
    """

    category: str
    num_prompt: int
    num_tokens: int
    places: Sequence[Sequence[Guessed]]

    def guessed(self, place: int, depth: int) -> Guessed:
        """The guesses of a round that begins there and drafts so far."""
        depths = self.places[place] if place < len(self.places) else ()
        return depths[min(depth, len(depths)) - 1] if depths and depth else Guessed()

    def at_depth(self, depth: int, place: int = 1) -> list[Guessed]:
        """The rounds of a run at this depth, in order, from a place on; the first token comes from the prompt."""
        guessed = []
        while place < self.num_tokens:
            guessed.append(self.guessed(place, depth))
            place += guessed[-1].accepted + 1
        return guessed


class RoundShape(NamedTuple):
    """What the cost of a round depends on.

    `num_rows` draw a token; `num_tokens` are in the target's pass, the roots among them; `num_drafted` rows have
    guesses, at most `depth` of them; drafters first read `num_read` tokens of prompts.
    """

    num_rows: int
    num_tokens: int
    depth: int = 0
    num_drafted: int = 0
    num_read: int = 0


RoundCost = Callable[[str, RoundShape], float]  # seconds of a round of this shape, drafted by this drafter


@dataclass(frozen=True, slots=True)
class Played:
    """The rounds of a job that read no prompts, by shape, and the tokens that they give."""

    rounds: Mapping[RoundShape, int]
    num_decoded: int


@dataclass(frozen=True, slots=True)
class Expected:
    """The best that is expected at a batch size: times as fast as plain decoding, by this drafter, this far.

    `by_depth` is the most that is expected of any drafter at depth 1, 2, and so on, by the costs before the runs. Other
    prompts of the same kind, as many of them, are expected between the two numbers of the `interval`; it is the chance
    of the draw of prompts alone.
    """

    drafter: str
    depth: int
    speed_up: float
    by_depth: tuple[float, ...]
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class DecodingJob:
    """What is run: texts, so many at once; a pass reads at most `chunk_tokens` of prompts."""

    texts: Sequence[TextRounds]
    batch: int
    chunk_tokens: int = 512


@dataclass(slots=True)
class PlayedRow:
    """One sequence of a job under way: where it is, and what of its prompt is still to be read."""

    text: TextRounds
    unread: int = field(init=False)
    said: int = 0
    drafted_before: bool = False

    def __post_init__(self) -> None:
        self.unread = self.text.num_prompt - 1  # the last token is the root


def played(job: DecodingJob, depth: int) -> Played:
    """The job at this depth, round by round: texts in order, each as soon as there is a place for it."""
    waiting, running = deque(PlayedRow(text) for text in job.texts), list[PlayedRow]()
    rounds, num_decoded, oldest_first = Counter[RoundShape](), 0, False
    while waiting or running:
        while waiting and len(running) < job.batch:
            running.append(waiting.popleft())
        chunks = chunk_sizes([row.unread for row in running], job.chunk_tokens, oldest_first)
        oldest_first = next((not chunk for row, chunk in zip(running, chunks, strict=True) if row.unread), False)
        drawing = [
            (row, Guessed() if chunk else row.text.guessed(row.said, depth))
            for row, chunk in zip(running, chunks, strict=True)
            if row.unread == chunk
        ]
        num_read = 0  # by drafters, of prompts
        for row, guessed in drawing:
            if guessed.drafted and not row.drafted_before:
                row.drafted_before = True
                num_read += row.text.num_prompt
        if not any(chunks):
            rounds[shape_of([guessed for _, guessed in drawing], num_read)] += 1
            num_decoded += sum(guessed.accepted + 1 for _, guessed in drawing)
        for row, chunk in zip(running, chunks, strict=True):
            row.unread -= chunk
        for row, guessed in drawing:
            row.said += guessed.accepted + 1
        running = [row for row in running if row.said < row.text.num_tokens]
    return Played(rounds, num_decoded)


def shape_of(guessed: Sequence[Guessed], num_read: int) -> RoundShape:
    """The shape of a round with these guesses."""
    sizes = [each.drafted for each in guessed]
    num_drafted = sum(size > 0 for size in sizes)
    return RoundShape(len(sizes), len(sizes) + sum(sizes), max(sizes), num_drafted, num_read)


def speed_up(job: DecodingJob, round_s: RoundCost, drafter: str, depth: int) -> float:
    """How many times as fast a job is expected to be, drafted by this drafter, this far; 1 where nothing is decoded."""

    def token_s(depth: int) -> float:
        """Of decoding alone; 0 where every round reads a prompt."""
        run = played(job, depth)
        taken_s = sum(times * round_s(drafter, shape) for shape, times in run.rounds.items())
        return taken_s / run.num_decoded if run.num_decoded else 0.0

    drafted_s = token_s(depth)
    return token_s(0) / drafted_s if drafted_s else 1.0


def expect(jobs: Mapping[str, DecodingJob], round_s: RoundCost, deepest: int) -> Expected:
    """The best depth, at most `deepest`, and drafter for a job, which is given for each drafter with its rounds."""
    depths = range(1, deepest + 1)
    gains = {
        (depth, drafter): speed_up(job, round_s, drafter, depth) for depth in depths for drafter, job in jobs.items()
    }
    depth, drafter = max(gains, key=gains.__getitem__)
    return Expected(
        drafter, depth, gains[depth, drafter], tuple(max(gains[each, drafter] for drafter in jobs) for each in depths)
    )


def interval(
    job: DecodingJob, round_s: RoundCost, drafter: str, depth: int, seed: int = 0
) -> tuple[float, float] | None:
    """Between which speed-ups most other draws of as many prompts lie; None of a single text.

    Drawing these texts anew shows by how much such a draw differs from the whole it is drawn from. Two draws differ by
    the root of 2 times as much.
    """
    if len(job.texts) < 2:
        return None
    rng = random.Random(seed)
    num_draws = max(20, min(RESAMPLES, MOST_PLAYED // sum(text.num_tokens for text in job.texts)))
    draws = (replace(job, texts=rng.choices(job.texts, k=len(job.texts))) for _ in range(num_draws))
    speed_ups = sorted(speed_up(draw, round_s, drafter, depth) for draw in draws)
    outside = round((1 - LIKELY) / 2 * (num_draws - 1))
    usual = speed_up(job, round_s, drafter, depth)
    low, high = (usual * (end / usual) ** math.sqrt(2) for end in (speed_ups[outside], speed_ups[-1 - outside]))
    return low, high


def acceptance_at_depth(texts: Iterable[TextRounds], deepest: int, least: int = LEAST_SEEN) -> tuple[float, ...]:
    """P(guess j accepted | those before it were, and it was on offer), from depth 1, over the rounds at `deepest`.

    It ends where fewer than `least` guesses were on offer, which would say little.
    """
    offered, accepted = Counter[int](), Counter[int]()
    for guessed in (guessed for text in texts for guessed in text.at_depth(deepest)):
        offered.update(range(1, min(guessed.drafted, guessed.accepted + 1) + 1))
        accepted.update(range(1, guessed.accepted + 1))
    return tuple(accepted[depth] / offered[depth] for depth in sorted(offered) if offered[depth] >= least)
