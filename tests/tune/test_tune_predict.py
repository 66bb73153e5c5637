"""The prediction is the expectation: against games that are played out draw by draw, and against enumeration."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from forerun.tune.predict import (
    DecodingJob,
    Drafting,
    TextRounds,
    acceptance_at_depth,
    drafting_of,
    predict,
    rounds_by_rows,
    speed_up,
)


@dataclass(frozen=True)
class MadeCosts:
    """A pass costs 1 and a little for each token; a draft, its depth, whoever makes it, and its prompt once."""

    token_s: float = 0.02
    draft_s: float = 0.1
    read_s: float = 0.01

    def plain_s(self, num_rows: int) -> float:
        return 1 + self.token_s * num_rows

    def drafted_s(self, num_rows: int, drafting: Drafting) -> float:
        return 1 + self.token_s * num_rows * (1 + drafting.guesses) + self.draft_s * drafting.depth

    def reading_s(self, arm: str, num_tokens: float) -> float:
        return self.read_s * num_tokens


def drawn(rates: Sequence[float], depth: int, rng: random.Random) -> int:
    """How many guesses of a round are accepted."""
    return next((place for place in range(depth) if rng.random() >= rates[place]), depth)


def counted(rates: Sequence[float], depth: int, num_rounds: int, rng: random.Random) -> TextRounds:
    """A pilot of one text."""
    return TextRounds("", Counter((depth, drawn(rates, depth, rng)) for _ in range(num_rounds)))


def played(
    rates: Sequence[Sequence[float]], job: DecodingJob, depth: int, costs: MadeCosts, rng: random.Random
) -> float:
    """Seconds of a job, round by round: rows emit what is accepted and one more, and give way to the next text."""
    waiting = [(job.num_tokens, rates[number % len(rates)]) for number in range(job.num_texts)][::-1]
    rows: list[tuple[float, Sequence[float]]] = []
    total_s = 0.0
    while waiting or rows:
        while waiting and len(rows) < job.batch:
            rows.append(waiting.pop())
            total_s += costs.reading_s("", job.num_prompt_tokens) if depth else 0.0
        total_s += (
            costs.drafted_s(len(rows), Drafting("", depth, float(depth), 1.0)) if depth else costs.plain_s(len(rows))
        )
        rows = [(left - 1 - drawn(own, depth, rng), own) for left, own in rows]
        rows = [row for row in rows if row[0] > 0]
    return total_s


def test_what_a_round_gives_is_the_expectation_over_all_outcomes() -> None:
    """Exact: a pilot whose counts are in proportion to the chances, against the sum over all outcomes."""
    rates = (0.5, 0.75, 0.25)
    rounds = Counter[tuple[int, int]]()
    for outcome in itertools.product((False, True), repeat=3):
        weight = 1.0
        for accepted, rate in zip(outcome, rates, strict=True):
            weight *= rate if accepted else 1 - rate
        num_accepted = outcome.index(False) if False in outcome else 3
        rounds[3, num_accepted] += round(weight * 32)
    text = TextRounds("", rounds)
    for depth in (1, 2, 3):
        expected = 1 + sum(0.5 * (1, 0.75, 0.75 * 0.25)[place] for place in range(depth))
        assert text.tokens(depth) == pytest.approx(expected)
    assert acceptance_at_depth([text]) == pytest.approx(rates)


@pytest.mark.parametrize(("batch", "num_texts"), [(1, 6), (4, 12), (8, 8)])
@pytest.mark.parametrize("depth", [1, 3, 6])
def test_the_predicted_speed_up_is_what_games_come_to(batch: int, num_texts: int, depth: int) -> None:
    rng, costs = random.Random(f"{batch} {num_texts} {depth}"), MadeCosts()
    rates = [[0.9] * 6, [0.7, 0.6, 0.5, 0.4, 0.3, 0.2], [0.2] * 6]
    job = DecodingJob(num_texts, 300.0, batch, num_prompt_tokens=900.0)
    texts = [counted(own, 6, 4000, rng) for own in rates]
    found = speed_up(texts, costs, job, "", depth)
    times = [played(rates, job, depth, costs, rng) for _ in range(8)]
    assert found == pytest.approx(played(rates, job, 0, costs, rng) / (sum(times) / len(times)), rel=0.04)


def test_the_best_depth_and_arm_are_found_by_trying_all() -> None:
    rng, costs = random.Random(1), MadeCosts()
    texts = {arm: [counted([rate] * 8, 8, 500, rng)] for arm, rate in (("bad", 0.3), ("good", 0.8))}
    job = DecodingJob(4, 100.0, 2)
    found = predict(texts, costs, job, 8)
    gains = {(arm, d): speed_up(texts[arm], costs, job, arm, d) for arm in texts for d in range(1, 9)}
    assert (found.arm, found.depth) == max(gains, key=gains.__getitem__)
    assert found.speed_up == max(gains.values()) == max(found.by_depth)
    assert found.arm == "good"


def test_rounds_without_guesses_count_as_such() -> None:
    text = TextRounds("", {(0, 0): 3, (4, 2): 1})
    drafting = drafting_of([text], "", 3)
    assert (drafting.guesses, drafting.covered) == (0.75, 0.25)
    assert text.tokens(3) == 1.5
    assert acceptance_at_depth([text]) == ()  # a single guess says nothing
    assert TextRounds("", {}).tokens(4) == 1


def test_places_are_filled_as_soon_as_they_are_free() -> None:
    assert rounds_by_rows([5.0, 1.0, 2.0], 2) == {2: 3, 1: 2}
    assert rounds_by_rows([4.0] * 4, 2) == {2: 8}
    assert rounds_by_rows([2.5], 8) == {1: 2.5}
