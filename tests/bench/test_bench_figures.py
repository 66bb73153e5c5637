"""Figures are as defined: recounted by hand from rounds whose every number is known."""

import random
import statistics

import pytest

from bench.synthetic import GROUP, even, random_rounds, taped, timed
from forerun.accept.outcome import RowOutcome
from forerun.bench.figures import Bandwidth, BenchReport, Mismatch, Spread, group_figures
from forerun.bench.plan import Group, Turn
from forerun.bench.run import NGRAM, TimedRound


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_a_run_is_a_recount_of_its_rounds(batch: int, depth: int, seed: int) -> None:
    rng = random.Random(seed)
    rounds = random_rounds(rng, batch, depth)
    answers = [[rng.randint(0, 1) for _ in range(60)], [7] * 5, list(range(30))][:batch]
    run = taped(rounds, Group("code", batch, 0.5), Turn(2, depth), answers)
    decoding = [r for r in rounds if not r.outcome.num_prompt_tokens]
    rows = [row for r in decoding for row in r.outcome.rows]
    assert run.num_passes == len(decoding)
    assert run.num_decoded == sum(len(d.token_ids) for r in decoding for d in r.deltas)
    assert run.decode_s == sum(r.step_s for r in decoding)
    assert run.total_s == sum(r.step_s for r in rounds)
    assert run.pass_s == sum(r.outcome.pass_s for r in decoding)
    assert run.draft_pass_s == sum(r.outcome.draft_pass_s for r in decoding)
    assert run.num_rounds == len(rows)
    assert run.num_drafted == sum(row.num_drafted for row in rows)
    assert run.num_accepted == sum(row.accepted for row in rows)
    for at in range(max((row.offered for row in rows), default=0)):
        assert run.offered_at_depth[at] == sum(row.offered > at for row in rows)
        assert run.accepted_at_depth[at] == sum(row.accepted > at for row in rows)
    full = [r.outcome for r in decoding if [row.num_drafted for row in r.outcome.rows] == [depth] * batch]
    assert run.full_pass_s == (statistics.median(o.pass_s for o in full) if full else None)
    assert run.full_draft_s == (statistics.median(o.draft_s for o in full) if full else None)
    assert run.first_s == sum(r.step_s for r in rounds[:2])
    grams = [tuple(a[i : i + NGRAM]) for a in answers for i in range(len(a)) if len(a[i : i + NGRAM]) == NGRAM]
    assert run.num_ngrams == len(grams)
    new = 0
    for answer in answers:
        seen = set()
        for i in range(len(answer) - NGRAM + 1):
            new += tuple(answer[i : i + NGRAM]) not in seen
            seen.add(tuple(answer[i : i + NGRAM]))
    assert run.num_distinct == new


@pytest.mark.parametrize("depth", [1, 3, 7])
@pytest.mark.parametrize("accepted", [0, 1])
@pytest.mark.parametrize(("v", "c"), [(1.0, 0.0625), (1.5, 0.25), (4.0, 1.0)])
def test_the_prediction_equals_the_measurement_where_a_round_is_only_its_passes(
    depth: int, accepted: int, v: float, c: float
) -> None:
    pass_s = 0.125
    plain = taped(even(0, 12, 0, pass_s, 0.0), GROUP, Turn(0, 0), [[1]])
    drafted = taped(even(depth, 6, accepted, v * pass_s, c * pass_s), GROUP, Turn(0, depth), [[1]])
    _, cell = group_figures(GROUP, [plain, drafted]).cells
    assert cell.tokens_per_round == 1 + accepted
    assert cell.acceptance_rate == accepted / depth
    assert cell.pass_ratio == Spread(v, v, v)
    assert cell.draft_step_ratio is not None
    assert cell.draft_step_ratio.median == pytest.approx(c)
    assert cell.predicted is not None
    assert cell.predicted.median == pytest.approx((1 + accepted) / (depth * c + v))
    assert cell.speed_up is not None
    assert cell.speed_up.median == pytest.approx(cell.predicted.median)
    assert cell.measured_over_predicted is not None
    assert cell.measured_over_predicted.median == pytest.approx(1.0)
    assert cell.engine_s is not None
    assert cell.engine_s.median == pytest.approx(0.0, abs=1e-12)


def test_empty_places_in_the_batch_count_in_the_prediction() -> None:
    """Sequences that accept more end sooner; a pass that costs the same without them is spent on fewer tokens."""
    group, left = Group("code", 3, 0.0), [3, 3, 2, 1, 1]

    def rounds(depth: int, accepted: int, taken: list[int], pass_s: float, draft_s: float) -> list[TimedRound]:
        row = [RowOutcome(i, depth, min(depth, accepted + 1), accepted, accepted + 1) for i in range(3)]
        return [timed(row[:n], 0, draft_s, pass_s, draft_s, 0.0) for n in taken]

    reading = timed([], 64, 0.0, 0.5, 0.0, 0.0)
    first = timed([RowOutcome(i, 0, 0, 0, 1) for i in range(3)], 7, 0.0, 0.5, 0.0, 0.0)
    answers = [[1]] * 3
    plain = taped([reading, first, *rounds(0, 0, [3] * 9 + [2], 0.125, 0.0)], group, Turn(0, 0), answers)
    drafted = taped([reading, first, *rounds(2, 1, left, 0.25, 0.125)], group, Turn(0, 2), answers)
    _, cell = group_figures(group, [plain, drafted]).cells
    assert cell.predicted is not None
    assert cell.predicted.median == pytest.approx(2 * (sum(left) / 5) / 2.9 / (2 * 0.5 + 2))
    assert cell.measured_over_predicted is not None
    assert cell.measured_over_predicted.median == pytest.approx(1.0)


def test_the_engines_own_time_is_reported_and_accounts_for_the_predictions_error() -> None:
    plain = taped(even(0, 12, 0, 0.125, 0.0, rest_s=0.125), GROUP, Turn(0, 0), [[1]])
    drafted = taped(even(2, 6, 2, 0.25, 0.0625, rest_s=0.25), GROUP, Turn(0, 2), [[1]])
    first, cell = group_figures(GROUP, [plain, drafted]).cells
    assert first.engine_s == Spread(0.125, 0.125, 0.125)
    assert cell.engine_s == Spread(0.25, 0.25, 0.25)
    assert cell.predicted == Spread(1.0, 1.0, 1.0)  # 3 tokens / (2 x 0.5 + 2)
    assert cell.speed_up == Spread(1.2, 1.2, 1.2)  # 3 / 0.625 against 1 / 0.25
    assert cell.measured_over_predicted == Spread(1.2, 1.2, 1.2)


def test_ratios_are_taken_within_repetitions_where_a_drifting_machine_cancels() -> None:
    runs = []
    for repetition, slow in enumerate((1.0, 8.0, 2.0, 4.0)):
        runs.append(taped(even(0, 12, 0, slow, 0.0), GROUP, Turn(repetition, 0), [[1]]))
        runs.append(taped(even(3, 4, 2, 2 * slow, 0.0), GROUP, Turn(repetition, 3), [[1]]))
    plain, drafted = group_figures(GROUP, runs).cells
    assert drafted.speed_up == Spread(1.5, 1.5, 1.5)
    assert drafted.pass_ratio == Spread(2.0, 2.0, 2.0)
    assert plain.speed_up == Spread(1.0, 1.0, 1.0)
    assert plain.tokens_per_s is not None
    assert plain.tokens_per_s.low < plain.tokens_per_s.median < plain.tokens_per_s.high


def test_quartiles_are_those_of_the_textbook() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert Spread.of(values) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([2.0, None]) == Spread(2.0, 2.0, 2.0)
    assert Spread.of([None]) is None


def test_a_plain_pass_at_the_limit_has_a_share_of_one() -> None:
    figures = group_figures(GROUP, [taped(even(0, 3, 0, 0.5, 0.0), GROUP, Turn(0, 0), [[1]])])
    for pass_bytes, share in ((10_000, 1.0), (5_000, 0.5)):
        report = BenchReport({}, Bandwidth(10_000.0, 20_000.0), pass_bytes, {}, (figures,))
        assert report.limit_share(figures) == share


def test_every_answer_that_differs_is_named() -> None:
    group = Group("code", 2, 0.0)
    answers = {(0, 0): [[1, 2], [3, 4]], (0, 3): [[1, 2], [3, 5]], (1, 0): [[1, 2], [3, 4]], (1, 3): [[1, 9], [3, 4]]}
    runs = [
        taped(even(depth, 2, 0, 1.0, 0.0), group, Turn(r, depth), outputs) for (r, depth), outputs in answers.items()
    ]
    figures = group_figures(group, runs)
    assert set(figures.differences) == {Mismatch(3, 0, 1), Mismatch(3, 1, 0)}
    assert not figures.same_tokens
    assert group_figures(group, runs[:1]).same_tokens


def test_a_replay_is_compared_with_the_record_even_where_all_depths_agree() -> None:
    runs = [taped(even(d, 2, 0, 1.0, 0.0), GROUP, Turn(0, d), [[1, 2], [1, 2]]) for d in (0, 3)]
    right = runs[0].answers[:1]
    assert group_figures(GROUP, runs, right).same_tokens
    assert len(group_figures(GROUP, runs, ["another"]).differences) == 4
