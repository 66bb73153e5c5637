"""The prediction: a round of a job is charged what its shape takes; the best depth is found by trying all of them."""

import math
import random

import pytest

from forerun.tune.predict import (
    DecodingJob,
    DraftOutcome,
    RoundShape,
    TextRounds,
    acceptance_at_depth,
    expect,
    interval,
    simulate,
    speed_up,
)


def round_s(drafter: str, shape: RoundShape) -> float:
    """A pass costs 1 and a little for each token; a draft, its depth; and 0.01 each token that a drafter reads."""
    return 1 + 0.02 * shape.num_tokens + 0.1 * shape.depth + 0.01 * shape.num_read


def text(num_right: int, depth: int = 8, num_tokens: int = 41, num_prompt: int = 5, category: str = "") -> TextRounds:
    """A text in which every draft has so many tokens accepted."""
    own = [DraftOutcome(each, min(each, num_right)) for each in range(1, depth + 1)]
    return TextRounds(category, num_prompt, num_tokens, [own] * num_tokens)


def noisy(rate: float, seed: int, num_tokens: int = 60) -> TextRounds:
    """A text whose draft tokens are accepted at this rate, independently."""
    rng = random.Random(seed)
    right = [rng.random() < rate for _ in range(num_tokens + 8)]

    def run(place: int) -> int:
        return next(n for n in range(9) if n == 8 or not right[place + n])

    return TextRounds(
        "", 5, num_tokens, [[DraftOutcome(d, min(d, run(g))) for d in range(1, 9)] for g in range(num_tokens)]
    )


def test_rounds_follow_each_other_where_the_one_before_ended() -> None:
    places = [
        [],
        [DraftOutcome(1, 1), DraftOutcome(2, 1)],
        [],
        [DraftOutcome(1, 0)],
        [],
        [DraftOutcome(1, 1), DraftOutcome(2, 2)],
        [],
        [],
    ]
    found = TextRounds("", 3, 8, places)
    assert found.at_depth(1) == [
        DraftOutcome(1, 1),
        DraftOutcome(1, 0),
        DraftOutcome(),
        DraftOutcome(1, 1),
        DraftOutcome(),
    ]
    assert (
        found.at_depth(2)
        == found.at_depth(5)
        == [DraftOutcome(2, 1), DraftOutcome(1, 0), DraftOutcome(), DraftOutcome(2, 2)]
    )
    assert found.at_depth(0) == [DraftOutcome()] * 7


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_job_costs_what_its_rounds_cost(batch: int) -> None:
    """Texts of equal prompts and equal rounds go in step, so the sum can be written down."""
    job = DecodingJob([text(3)] * 4, batch)
    found = simulate(job, 4)
    num_waves = 4 // batch
    first = RoundShape(batch, 5 * batch, 4, batch, 5 * batch)
    assert found.rounds == {first: num_waves, RoundShape(batch, 5 * batch, 4, batch): 9 * num_waves}
    assert found.num_decoded == 4 * 40
    drafted_s = num_waves * (10 * (1 + 0.02 * 5 * batch + 0.4) + 0.05 * batch)
    plain_s = num_waves * 40 * (1 + 0.02 * batch)
    assert speed_up(job, round_s, "", 4) == pytest.approx(plain_s / drafted_s)


def test_places_are_filled_as_soon_as_they_are_free_and_rounds_that_read_do_not_count() -> None:
    quick = TextRounds("", 5, 11, [[], [DraftOutcome(8, 8)]])  # nine tokens in a round, and then the last one
    job = DecodingJob([quick, text(0, num_tokens=11), text(0, num_tokens=4)], 2)
    found = simulate(job, 8)
    rows = sorted(shape.num_rows for shape, times in found.rounds.items() for _ in range(times))
    # The first ends after two rounds; the third begins in one that is not counted, and ends three later.
    assert rows == [1] * 4 + [2] * 5
    assert found.num_decoded == 10 + 9 + 3


def test_a_long_prompt_is_read_in_pieces_that_nothing_is_drawn_from() -> None:
    found = simulate(DecodingJob([text(0, num_tokens=3, num_prompt=21)], 1, chunk_tokens=8), 0)
    assert found.rounds == {RoundShape(1, 1): 2}


def test_a_long_prompt_that_a_shorter_one_has_delayed_is_read_next() -> None:
    """In turn: 8 tokens of a short prompt, of the long one, of the other short one, then the other 17 of the long one.

    After these six rounds the short ones have six and four of their ten tokens, and the long one its first.
    """
    texts = [text(0, num_tokens=10, num_prompt=num_prompt) for num_prompt in (26, 9, 9)]
    found = simulate(DecodingJob(texts, 3, chunk_tokens=8), 0)
    assert found.rounds == {RoundShape(3, 3): 4, RoundShape(2, 2): 2, RoundShape(1, 1): 3}


def test_a_round_is_as_deep_as_its_deepest_row() -> None:
    found = simulate(DecodingJob([text(0, depth=2, num_tokens=3), TextRounds("", 5, 3, [])], 2), 4)
    assert found.rounds == {RoundShape(2, 4, 2, 1, 5): 1, RoundShape(2, 4, 2, 1): 1}


def test_speed_ups_are_ratios_of_seconds_per_decoded_token() -> None:
    """Drafted runs decode fewer tokens outside of rounds with prefill here; without any there is no speed-up."""
    job = DecodingJob([text(3, num_tokens=num_tokens, num_prompt=30) for num_tokens in (30, 3, 12)], 2, chunk_tokens=8)
    runs = [simulate(job, depth) for depth in (0, 4)]
    assert runs[0].num_decoded != runs[1].num_decoded
    plain_s, drafted_s = (
        sum(times * round_s("", shape) for shape, times in run.rounds.items()) / run.num_decoded for run in runs
    )
    assert speed_up(job, round_s, "", 4) == pytest.approx(plain_s / drafted_s)
    assert speed_up(DecodingJob([text(3, num_tokens=1)], 1), round_s, "", 4) == 1.0


def test_the_best_depth_and_drafter_are_found_by_trying_all() -> None:
    jobs = {
        drafter: DecodingJob([noisy(rate, seed) for seed in range(4)], 2)
        for drafter, rate in (("bad", 0.3), ("good", 0.8))
    }
    found = expect(jobs, round_s, 8)
    gains = {
        (drafter, depth): speed_up(jobs[drafter], round_s, drafter, depth) for drafter in jobs for depth in range(1, 9)
    }
    assert (found.drafter, found.depth) == max(gains, key=gains.__getitem__)
    assert found.speed_up == max(gains.values())
    assert found.by_depth == tuple(max(gains[drafter, depth] for drafter in jobs) for depth in range(1, 9))
    assert found.drafter == "good"


def test_the_interval_is_that_of_resampled_prompts_widened_for_two_samples() -> None:
    """Of 16 prompts of two kinds a resample has between 5 and 11 of the better kind, with a probability of 90 %."""
    worse, better = text(0, num_tokens=6), text(4, num_tokens=6)

    def speed_up_with(num_better: int) -> float:
        return speed_up(DecodingJob([worse] * (16 - num_better) + [better] * num_better, 1), round_s, "", 4)

    found = interval(DecodingJob([worse, better] * 8, 1), round_s, "", 4)
    assert found is not None
    usual = speed_up_with(8)
    for end, fewest, most in ((found[0], 4, 6), (found[1], 10, 12)):
        least, greatest = (usual * (speed_up_with(num) / usual) ** math.sqrt(2) for num in (fewest, most))
        assert least <= end <= greatest
    assert interval(DecodingJob([better], 1), round_s, "", 4) is None
    assert interval(DecodingJob([better] * 2, 1), round_s, "", 4) == pytest.approx([speed_up_with(16)] * 2)


@pytest.mark.full
def test_the_interval_covers_what_other_draws_of_prompts_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of jobs with other texts of the kind nine in ten lie within it; a wrong one, of half the width, has fewer."""
    monkeypatch.setattr("forerun.tune.predict.RESAMPLES", 40)
    covered, narrow = 0, 0
    rng = random.Random(3)
    many = [noisy(rng.uniform(0.2, 0.9), rng.randrange(10**6), num_tokens=20) for _ in range(100)]
    for _ in range(20):
        found = interval(DecodingJob(rng.sample(many, 12), 1), round_s, "", 4)
        assert found is not None
        low, high = found
        middle, half = (low + high) / 2, (high - low) / 4
        others = [speed_up(DecodingJob(rng.sample(many, 12), 1), round_s, "", 4) for _ in range(5)]
        covered += sum(low <= other <= high for other in others)
        narrow += sum(middle - half <= other <= middle + half for other in others)
    assert covered >= 80
    assert narrow < 75


def test_acceptance_is_counted_over_the_rounds_of_the_greatest_depth() -> None:
    assert acceptance_at_depth([text(2, depth=4, num_tokens=31)], 4) == (1.0, 1.0, 0.0)
    assert acceptance_at_depth([text(2, num_tokens=8)], 4) == ()  # too few draft tokens for an estimate
    assert acceptance_at_depth([], 4) == ()
