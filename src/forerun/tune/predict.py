"""Prediction of the speed-up from recorded drafts and measured costs.

A pilot run records at every position of every text what a drafter drafts there, and how much of it is accepted. These
records determine the rounds of a run at any depth exactly: with coupled sampling the text does not depend on drafts,
and a round starts where the one before ended. A job is simulated round by round as the engine would run it (continuous
batching, prefill, rows with different drafts), and each round costs what was measured for its shape (`passes.py`). As
in measured runs, rounds with prefill do not count.

Two things are approximated. Drafts from past answers depend on which texts are finished, which differs slightly with
depth at batch sizes above 1. And a mix is simulated with one drafter for all rounds, and its merged trees are cut from
those of maximum depth.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from forerun.engine.scheduler import chunk_sizes

LEAST_DRAFTED = 5  # minimum number of draft tokens for an acceptance rate
RESAMPLES = 200
LIKELY = 0.9  # probability of the interval
MOST_PLAYED = 400_000  # limit of simulated rounds for resampling


class DraftOutcome(NamedTuple):
    """The outcome of a draft: the numbers of its tokens and of the accepted ones."""

    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class TextRounds:
    """The draft outcomes of one text. `places[g]` is for a round that starts after g tokens of the answer.

    It has the outcomes at depth 1, 2, ...; the last one is also that of deeper drafts, and an empty entry means that
    nothing is drafted there. The answer has `num_tokens`, its prompt `num_prompt` tokens.
    """

    category: str
    num_prompt: int
    num_tokens: int
    places: Sequence[Sequence[DraftOutcome]]

    def outcome(self, place: int, depth: int) -> DraftOutcome:
        """The outcome of a round that starts at `place` with this depth."""
        depths = self.places[place] if place < len(self.places) else ()
        return depths[min(depth, len(depths)) - 1] if depths and depth else DraftOutcome()

    def at_depth(self, depth: int, place: int = 1) -> list[DraftOutcome]:
        """The rounds of a run at this depth, in order, from `place` on; the first token comes from prefill."""
        outcomes = []
        while place < self.num_tokens:
            outcomes.append(self.outcome(place, depth))
            place += outcomes[-1].accepted + 1
        return outcomes


class RoundShape(NamedTuple):
    """What the cost of a round depends on.

    It has `num_rows` rows, `num_tokens` tokens in the target's pass including roots, `num_drafted` rows with a draft of
    at most `depth` tokens, and `num_read` prompt tokens in the drafter's prefill.
    """

    num_rows: int
    num_tokens: int
    depth: int = 0
    num_drafted: int = 0
    num_read: int = 0


RoundCost = Callable[[str, RoundShape], float]  # (drafter, shape) -> seconds


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The rounds of a job without prefill, counted by shape, and the number of tokens that they emit."""

    rounds: Mapping[RoundShape, int]
    num_decoded: int


@dataclass(frozen=True, slots=True)
class Expected:
    """The best predicted speed-up at a batch size, with its drafter and depth.

    `by_depth` has the best speed-up of any drafter at depth 1, 2, ..., from the costs before the runs. The speed-up on
    as many other prompts of the same kind is expected in `interval`, which covers the random choice of prompts only.
    `num_busy`: the maximum number of cores that other programs used while the costs were measured.
    """

    drafter: str
    depth: int
    speed_up: float
    by_depth: tuple[float, ...]
    interval: tuple[float, float] | None = None
    num_busy: float | None = None


@dataclass(frozen=True, slots=True)
class DecodingJob:
    """Texts to decode, the batch size, and the prefill chunk size."""

    texts: Sequence[TextRounds]
    batch: int
    chunk_tokens: int = 512


@dataclass(slots=True)
class SimulatedRow:
    """A running sequence of a simulated job: its unread prompt tokens, and the tokens emitted so far."""

    text: TextRounds
    unread: int = field(init=False)
    emitted: int = 0
    drafted_before: bool = False

    def __post_init__(self) -> None:
        self.unread = self.text.num_prompt - 1  # the last token is the first root


def simulate(job: DecodingJob, depth: int) -> SimulatedRun:
    """Simulate a job at this depth, with continuous batching in the order of its texts."""
    waiting, running = deque(SimulatedRow(text) for text in job.texts), list[SimulatedRow]()
    rounds, num_decoded, oldest_first = Counter[RoundShape](), 0, False
    while waiting or running:
        while waiting and len(running) < job.batch:
            running.append(waiting.popleft())
        chunks = chunk_sizes([row.unread for row in running], job.chunk_tokens, oldest_first)
        oldest_first = next((not chunk for row, chunk in zip(running, chunks, strict=True) if row.unread), False)
        drawing = [
            (row, DraftOutcome() if chunk else row.text.outcome(row.emitted, depth))
            for row, chunk in zip(running, chunks, strict=True)
            if row.unread == chunk
        ]
        num_read = 0  # the drafter's prefill
        for row, outcome in drawing:
            if outcome.drafted and not row.drafted_before:
                row.drafted_before = True
                num_read += row.text.num_prompt
        if not any(chunks):
            rounds[shape_of([outcome for _, outcome in drawing], num_read)] += 1
            num_decoded += sum(outcome.accepted + 1 for _, outcome in drawing)
        for row, chunk in zip(running, chunks, strict=True):
            row.unread -= chunk
        for row, outcome in drawing:
            row.emitted += outcome.accepted + 1
        running = [row for row in running if row.emitted < row.text.num_tokens]
    return SimulatedRun(rounds, num_decoded)


def shape_of(outcomes: Sequence[DraftOutcome], num_read: int) -> RoundShape:
    """The shape of a round with these drafts."""
    sizes = [outcome.drafted for outcome in outcomes]
    num_drafted = sum(size > 0 for size in sizes)
    return RoundShape(len(sizes), len(sizes) + sum(sizes), max(sizes), num_drafted, num_read)


def speed_up(job: DecodingJob, round_s: RoundCost, drafter: str, depth: int) -> float:
    """The predicted speed-up of a job with this drafter and depth; 1 if nothing is decoded."""

    def token_s(depth: int) -> float:
        """Seconds per decoded token; 0 if every round has prefill."""
        run = simulate(job, depth)
        taken_s = sum(times * round_s(drafter, shape) for shape, times in run.rounds.items())
        return taken_s / run.num_decoded if run.num_decoded else 0.0

    drafted_s = token_s(depth)
    return token_s(0) / drafted_s if drafted_s else 1.0


def expect(jobs: Mapping[str, DecodingJob], round_s: RoundCost, deepest: int) -> Expected:
    """The best drafter and depth, at most `deepest`; `jobs` has for each drafter the job with its outcomes."""
    depths = range(1, deepest + 1)
    gains = {
        (depth, drafter): speed_up(job, round_s, drafter, depth) for depth in depths for drafter, job in jobs.items()
    }
    depth, drafter = max(gains, key=gains.__getitem__)
    return Expected(
        drafter, depth, gains[depth, drafter], tuple(max(gains[each, drafter] for drafter in jobs) for each in depths)
    )


def interval(job: DecodingJob, round_s: RoundCost, drafter: str, depth: int) -> tuple[float, float] | None:
    """The interval in which the speed-up on as many other prompts lies with probability LIKELY; None for one text.

    Bootstrap resampling of these texts estimates the deviation of a sample from the population, and two samples differ
    by sqrt(2) times as much.
    """
    if len(job.texts) < 2:
        return None
    rng = random.Random(0)
    num_draws = max(20, min(RESAMPLES, MOST_PLAYED // sum(text.num_tokens for text in job.texts)))
    draws = (replace(job, texts=rng.choices(job.texts, k=len(job.texts))) for _ in range(num_draws))
    speed_ups = sorted(speed_up(draw, round_s, drafter, depth) for draw in draws)
    outside = round((1 - LIKELY) / 2 * (num_draws - 1))
    usual = speed_up(job, round_s, drafter, depth)
    low, high = (usual * (end / usual) ** math.sqrt(2) for end in (speed_ups[outside], speed_ups[-1 - outside]))
    return low, high


def acceptance_at_depth(texts: Iterable[TextRounds], deepest: int, least: int = LEAST_DRAFTED) -> tuple[float, ...]:
    """P(token j accepted | those before it were, and it was drafted), from depth 1, over the rounds at `deepest`.

    It ends at the first depth with fewer than `least` judged tokens.
    """
    judged, accepted = Counter[int](), Counter[int]()
    for outcome in (outcome for text in texts for outcome in text.at_depth(deepest)):
        judged.update(range(1, min(outcome.drafted, outcome.accepted + 1) + 1))
        accepted.update(range(1, outcome.accepted + 1))
    return tuple(accepted[depth] / judged[depth] for depth in sorted(judged) if judged[depth] >= least)
