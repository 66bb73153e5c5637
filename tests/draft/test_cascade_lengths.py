"""The lengths that a cascade measures and chooses, compared with the best ones in simulated rounds of known costs."""

import random
import statistics
from collections.abc import Sequence

import pytest

from forerun.draft.many.cascade import FIRST_LENGTH, MeasuredLengths, RoundTiming
from forerun.economy import FADING, MOST, best_depth, cost_per_token


def run_of(dice: random.Random, num: int, chance: float) -> tuple[int, int]:
    """A number of draft tokens, and how many of them are accepted."""
    return num, next((i for i in range(num) if dice.random() >= chance), num)


def simulated(
    lengths: MeasuredLengths, rounds: int, chance: float, costs_s: tuple[float, float, float], batch: int = 1
) -> Sequence[Sequence[int]]:
    """Simulate rounds with this acceptance rate and these costs; the lengths chosen in each round."""
    dice, (draft_s, pass_s, token_s), found = random.Random(3), costs_s, []
    for _ in range(rounds):
        length, *others = lengths.best(range(batch), [MOST] * batch)
        found.append([length, *others])
        assert len(others) == batch - 1
        cut = [dice.randint(0, length) for _ in range(batch)]  # as where chains end
        lengths.count(range(batch), [run_of(dice, num, chance) for num in cut])
        noise, num_tokens = dice.uniform(0.9, 1.1), sum(cut) + batch
        read_s = pass_s + token_s * num_tokens
        lengths.time(RoundTiming(max(cut), max(cut) * draft_s * noise, num_tokens, read_s * noise))
    return [*found, lengths.best(range(batch), [MOST] * batch)]


@pytest.mark.short("costs_s0-0.3-1", "costs_s0-0.9-4", "costs_s1-0.6-4", "costs_s2-0.8-1", "costs_s3-0.9-1")
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.9])
@pytest.mark.parametrize("costs_s", [(0.01, 0.1, 0.0), (0.03, 0.1, 0.002), (0.001, 0.1, 0.02), (0.2, 0.1, 0.0)])
def test_measured_lengths_cost_at_most_a_tenth_more_than_the_best(
    batch: int, chance: float, costs_s: tuple[float, float, float]
) -> None:
    found = simulated(MeasuredLengths(), 600, chance, costs_s, batch)
    draft_s, pass_s, token_s = costs_s
    chances = [chance] * MOST

    def round_s(k: int) -> float:
        return pass_s + token_s * batch * (k + 1) + draft_s * k

    best = best_depth(chances, round_s)
    costs = [cost_per_token(length, chances, round_s) for lengths in found[-200:] for length in lengths]
    assert statistics.mean(costs) <= 1.1 * cost_per_token(best, chances, round_s), (found[-200:], best)


def test_longer_lengths_are_retried_when_acceptance_rises() -> None:
    lengths = MeasuredLengths()
    costs_s = (0.05, 0.1, 0.0)
    assert simulated(lengths, 200, 0.02, costs_s)[-1][0] <= 1
    assert simulated(lengths, 600, 0.95, costs_s)[-1][0] >= 4


def test_the_first_length_is_fixed_before_anything_is_measured() -> None:
    lengths = MeasuredLengths()
    assert lengths.best(range(3), [MOST, MOST, 2]) == [FIRST_LENGTH, FIRST_LENGTH, 2]
    lengths.time(RoundTiming(0, 0.0, 3, 0.1))
    assert lengths.best(range(3), [MOST, MOST, 2]) == [FIRST_LENGTH, FIRST_LENGTH, 2]
    assert len(lengths.overall.rates()) == MOST


def test_lengths_are_at_most_what_the_caller_can_use() -> None:
    lengths = MeasuredLengths()
    assert simulated(lengths, 100, 0.9, (0.01, 0.1, 0.0))[-1][0] > 4
    assert [lengths.best([0], [most])[0] for most in range(4)] == [0, 1, 2, 3]


def test_each_sequence_has_a_length_by_its_own_acceptance() -> None:
    """One sequence's drafts are accepted and another's rejected; a new third one gets a length between theirs."""
    lengths, dice = MeasuredLengths(), random.Random(1)
    for _ in range(60):
        asked = lengths.best([0, 1], [MOST, MOST])
        lengths.count([0, 1], [run_of(dice, *each) for each in zip(asked, (0.95, 0.05), strict=True)])
        lengths.time(RoundTiming(max(asked), 0.03 * max(asked), sum(asked) + 2, 0.1))
    good, bad, new = lengths.best([0, 1, 2], [MOST] * 3)
    assert bad <= 1
    assert bad <= new <= good
    assert good >= 6
    lengths.forget([1])
    assert lengths.best([1], [MOST])[0] == new


def test_a_new_sequence_gets_the_length_for_the_acceptance_of_others() -> None:
    """Drafting takes no time, but passes over draft tokens do: drafts pay only if they are accepted."""
    lengths = MeasuredLengths()
    for seq_id in range(40):
        lengths.count([seq_id], [(MOST, 0)])
        for size in (1, MOST):
            lengths.time(RoundTiming(1, 0.0, size, 0.1 + 0.02 * size))
    assert lengths.best([99], [MOST]) == [0]
    for seq_id in range(40):
        lengths.count([seq_id], [(MOST, MOST)])
    assert lengths.best([99], [MOST])[0] > 4


def test_a_pass_over_a_draft_also_reads_the_token_before_it() -> None:
    """A pass takes a second per token, so no draft token pays, even if most are accepted."""
    lengths = MeasuredLengths()
    for size in (1, 2, 4, 8):
        lengths.count([0], [(4, 3)])
        lengths.time(RoundTiming(size, 0.0, size, float(size)))
    lengths.record_alone([0], 1, 1.0)
    assert lengths.best([0], [MOST]) == [0]


def test_the_judge_drafts_alone_where_that_costs_less() -> None:
    """A chain drafted by the judge in one call may cost less per token than rounds of length 0: rounds must beat it."""
    lengths = MeasuredLengths()
    for _ in range(50):
        lengths.count([0], [(1, 0 if _ % 2 else 1)])
        lengths.time(RoundTiming(1, 0.04, 2, 0.1))
    assert lengths.best([0], [MOST])[0] >= 1  # 0.14 for 1.5 tokens
    for _ in range(3):
        lengths.record_alone([0], 10, 0.8)
    assert lengths.best([0], [MOST])[0] == 0


def test_chains_by_the_judge_alone_count_as_rounds_and_by_batch_size() -> None:
    """Each token is a round without draft tokens; chains that were not timed count too."""
    lengths = MeasuredLengths()
    for seq_ids, draft_s in (([0], 0.3), ([1, 2, 3], 0.9), ([0], None)):
        lengths.record_alone(seq_ids, 3, draft_s)
    assert [lengths.alone.expect(batch) for batch in (1, 3)] == pytest.approx([0.1, 0.3])
    assert lengths.overall.unit == pytest.approx(FADING**-9)
    assert {seq_id: counts.unit for seq_id, counts in lengths.by_sequence.items()} == pytest.approx(
        {0: FADING**-6, 1: FADING**-3, 2: FADING**-3, 3: FADING**-3}
    )
