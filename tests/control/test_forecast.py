"""Forecasts against the true speed-up of simulated rounds, and what the controller logs about drafting."""

import logging
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.worlds import World, calibrated, share_of_best, simulate
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.config import AUTO_DEPTH
from forerun.control.choices import FAVOR
from forerun.control.costs import CostTable, Kind
from forerun.control.drafters import MeasuredDrafter, MeasuredDrafters
from forerun.control.forecast import SURE, Forecast, bounding, forecast, forecast_line, gain, without_advice
from forerun.control.measured import MeasuredDepth
from forerun.control.trials import FEW, HOLD, TEXTS, WINDOW, Advice
from forerun.draft.base import MERGED, Budget
from forerun.economy import WEIGHT, Acceptance, likeness
from forerun.models.experts_config import expected_distinct

WORLDS = {
    "drafting pays": World([0.8], [0.002], lambda n: 0.1 + 0.001 * n),
    "drafting pays in small batches": World([0.75], [0.005], lambda n: 0.1 + 0.004 * n),
    "drafting never pays": World([0.3], [0.05]),
    "one of two drafters pays": World([0.2, 0.85], [0.001, 0.01], merged_rate=0.85),
    "the merged tree pays": World([0.5, 0.5], [0.003, 0.005], merged_rate=0.85),
}


@pytest.mark.full
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("name", WORLDS)
def test_the_forecast_is_within_10_percent_of_the_true_speed_up(name: str, batch: int) -> None:
    """The median forecast of five controllers after 200 rounds, against the best fixed choice in the same world."""
    world, forecasts = WORLDS[name], []
    for seed in range(5):
        controller = calibrated(world, batch)
        list(simulate(controller, world, 200, batch, seed=seed))
        forecasts.append(forecast(controller.costs, controller.drafters, batch))
    median = sorted((each for each in forecasts if each is not None), key=lambda each: each.gain)[2]
    plain = world.speed([Budget(0)] * batch)
    best = max(
        world.speed([Budget(depth, 1, depth, drafter)] * batch) / plain
        for depth in range(1, 17)
        for drafter in range(len(world.rates) + world.is_mix)
    )
    assert median.gain == pytest.approx(best, rel=0.1)
    assert (median.depth > 0) == (median.gain >= 1 + FAVOR)


@pytest.mark.parametrize("drafter", [0, 1, 2])
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize(("batch", "covered"), [(1, 1.0), (1, 0.25), (8, 1.0), (8, 0.25), (8, 0.1)])
def test_gains_are_those_of_rounds_in_which_the_covered_share_of_rows_is_drafted(
    batch: int, covered: float, depth: int, drafter: int
) -> None:
    """With exact costs. If less than one row is covered, one row is drafted in this share of the rounds."""
    world = World([0.8, 0.6], [0.002, 0.01], lambda n: 0.1 + 0.004 * n, 0.85, noise=0.0, unmerged_pass_s=lambda n: 0.1)
    controller = calibrated(world, batch)
    for record in controller.drafters.all:
        record.covered = covered
    num_drafted, share = max(1, round(covered * batch)), min(1.0, covered * batch)
    drafted, plain = [Budget(depth, 1, depth, drafter)] * num_drafted, [Budget(0)]
    rounds = (share, [*drafted, *plain * (batch - num_drafted)]), (1 - share, plain * batch)
    tokens = sum(part * sum(map(world.tokens, budgets)) for part, budgets in rounds)
    seconds = [(part, *world.round_s(budgets)) for part, budgets in rounds]
    speed = tokens / sum(part * (pass_s + sum(draft_s)) for part, pass_s, draft_s in seconds)
    rates = [world.rate(drafter)] * depth + [1.0]
    expected = gain(controller.costs, controller.drafters, drafter, depth, rates, batch, 0)
    assert expected == pytest.approx(speed / world.speed(plain * batch))


def test_there_is_no_forecast_without_measured_costs_or_verified_draft_tokens() -> None:
    controller = MeasuredDepth()
    assert controller.plain_s(1) is None
    costs, drafters = CostTable(), MeasuredDrafters([MeasuredDrafter()], [""])
    assert forecast(costs, drafters, 1) is None
    costs.record(Kind.of(1), 1, 0.1)
    assert forecast(costs, MeasuredDrafters(), 1) is None
    assert forecast(costs, drafters, 1) is None
    drafters.all[0].acceptance.count([(1, 1)])
    assert forecast(CostTable(), drafters, 1) is None
    alone = forecast(costs, drafters, 1)
    assert alone is not None
    assert alone.num_drafted == 1
    drafters.all[0].acceptance = Acceptance()
    drafters.all[0].acceptance.count([(4, 4)] * 10)
    several = forecast(costs, drafters, 1)
    assert several is not None
    assert several.num_drafted == 40


def test_forecasts_are_of_passes_whose_sizes_were_measured() -> None:
    """A quarter of eight rows is drafted. Draft tokens are free, so of all depths the deepest would be the fastest."""
    costs = CostTable()
    drafters = MeasuredDrafters([MeasuredDrafter(covered=0.25) for _ in range(3)], ["a", "b", MERGED])
    for record, accepted in zip(drafters.all, (10, 12, 16), strict=True):
        record.acceptance.count([(16, accepted)] * 50)
    for kind, num_tokens, best in (
        (Kind.of(8), 8, (MERGED, AUTO_DEPTH)),  # no pass with draft tokens
        (Kind.of(8, 0, merged=True), 8 + 2 * 1, (MERGED, 1)),
        (Kind.of(8), 8 + 2 * 3, ("b", 3)),
        (Kind.of(8, 0, merged=True), 8 + 2 * 5, (MERGED, 5)),
    ):
        costs.record(kind, num_tokens, 0.1)
        found = forecast(costs, drafters, 8)
        assert found is not None
        assert (found.drafter, found.depth) == best


@pytest.mark.parametrize("covered", [1.0, 0.1, 0.004, 0.0015])
def test_what_a_drafter_gains_is_in_proportion_to_the_share_of_rows_that_it_covers(covered: float) -> None:
    """Drafting is free here. Below a gain of FAVOR the forecast is plain decoding."""
    world = World([0.9], [0.0])
    controller = calibrated(world, 1)
    full = forecast(controller.costs, controller.drafters, 1)
    controller.drafters.all[0].covered = covered
    part = forecast(controller.costs, controller.drafters, 1)
    assert full is not None
    assert part is not None
    assert part.gain - 1 == pytest.approx(covered * (full.gain - 1), rel=0.05)
    assert (part.depth > 0) == (part.gain >= 1 + FAVOR) == (covered > 0.003)


@pytest.mark.parametrize(("count", "active"), [(8, 2), (128, 8)])
def test_drafting_is_off_if_draft_tokens_make_passes_read_more_experts(count: int, active: int) -> None:
    """The same draft tokens pay for a dense target, whose passes all cost the same, but not for mixtures of experts.

    For these the forecast line says so, and in simulated rounds hardly anything is drafted.
    """
    dense = World([0.6], [0.002])
    sparse = World([0.6], [0.002], lambda num_tokens: 0.4 * expected_distinct(count, active, num_tokens) / count)
    controllers = calibrated(dense, 1), calibrated(sparse, 1)
    of_dense, of_sparse = (forecast(each.costs, each.drafters, 1) for each in controllers)
    assert of_dense is not None
    assert of_dense.depth > 1
    assert of_sparse is not None
    assert of_sparse.depth == 0
    assert forecast_line([of_sparse]).startswith("drafting is not expected to save time (")
    played = list(simulate(calibrated(sparse, 1), sparse, 200, 1))
    assert share_of_best(sparse, played) > 0.95
    assert sum(any(budget.depth for budget in budgets) for budgets in played) < 20


def test_forecasts_are_logged_in_one_line_with_their_number_of_draft_tokens() -> None:
    """If few draft tokens make a forecast uncertain, its bounds are given instead of its value."""
    pays, plain = Forecast(1, "", 5, 1.912, 1.8, 2.0, 300), Forecast(32, "", 0, 0.8, 0.7, 0.8, 300)
    basis = "(estimated from 300 draft tokens on built-in sample prompts)"
    paying = f"expected speed-up {basis}: ×1.91 at batch 1 (depth 5), plain decoding at batch 32"
    assert forecast_line([pays, plain]) == paying
    useless = f"drafting is not expected to save time {basis}: ×0.97 at batch 1 at best"
    assert forecast_line([Forecast(1, "b", 0, 0.97, 0.95, 1.0, 300), plain]) == useless
    assert "(estimated from 1 draft token on" in forecast_line([Forecast(1, "", 5, 1.912, 1.8, 2.0, 1)])
    assert "(estimated from 9 draft tokens on" in forecast_line([pays, Forecast(8, "", 5, 1.9, 1.8, 2.0, 9), plain])
    assert str(Forecast(1, "", 8, 2.67, 1.02, 3.4, 9)) == "×1.02 to ×3.40 at batch 1 (depth 8)"
    assert str(Forecast(8, "b", 8, 2.67, 2.6, 2.7, 900)) == "×2.67 at batch 8 (b, depth 8)"


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("num", [2, 5, 40, 400])
def test_forecast_bounds_contain_the_true_speed_up_and_narrow_with_more_draft_tokens(rate: float, num: int) -> None:
    """The bounds of 34 of 40 forecasts contain it, each from `num` drafts of depth 4 at this acceptance rate."""
    world, num_within = World([rate], [0.001]), 0
    true_gain = world.speed([Budget(4)]) / world.speed([Budget(0)])
    controller = calibrated(world, 1)
    (record,) = controller.drafters.all
    for seed in range(40):
        dice = random.Random(seed)
        record.sampled, record.acceptance = Acceptance(), Acceptance()
        for _ in range(num):
            accepted = next((i for i in range(4) if dice.random() >= rate), 4)
            record.sampled.count([(min(4, accepted + 1), accepted)])
            record.sampled.unit = 1.0  # as a calibration counts
        bounds = bounding(record.evidence)
        least, most = (gain(controller.costs, controller.drafters, 0, 4, rates, 1, 0) for rates in bounds)
        # The measured costs deviate a little from the true ones too.
        num_within += least <= 1.06 * true_gain and true_gain <= 1.06 * most
        assert most / least < (6.0 if num < 40 else 2.0 if num < 400 else 1.3)
    assert num_within >= 34


@given(st.lists(st.tuples(st.integers(1, 16), st.integers(0, 16)), min_size=1, max_size=40))
def test_forecast_bounds_are_where_the_measured_rate_is_two_standard_errors_away(runs: list[tuple[int, int]]) -> None:
    """All depths have the same distance to their rates, unless a rate would be below 0 or above 1."""
    counts = Acceptance()
    for num_drafted, num_accepted in runs:
        counts.count([(num_drafted, min(num_drafted, num_accepted))])
    share, num = counts.overall(), sum(counts.offered) / counts.unit + WEIGHT
    lower, upper = bounding(counts)
    for rates, sign in ((lower, -1), (upper, 1)):
        inside = [(bound, rate) for bound, rate in zip(rates, counts.rates(), strict=True) if 0 < bound < 1]
        assert all(bound == 0 if sign < 0 else bound == 1 for bound in rates if not 0 < bound < 1)
        for bound, rate in inside:
            true = share + bound - rate
            assert sign * (bound - rate) == pytest.approx(SURE * math.sqrt(true * (1 - true) / num))


def test_no_advice_is_logged_during_measurements(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("forerun.control.measured")
    for _ in range(2):
        with without_advice():
            log.warning("during")
        log.warning("after")
    assert [record.getMessage() for record in caplog.records] == ["after"] * 2


def test_pausing_and_resuming_of_drafting_are_each_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A line when draft tokens begin to be rejected, and when they are accepted again; the first is a warning."""
    good, bad = World([0.9], [0.01]), World([0.0], [0.05])
    controller = calibrated(good, 1)
    with caplog.at_level(logging.INFO, logger="forerun.control.measured"):
        for number, world in enumerate((good, bad, good, bad)):
            list(simulate(controller, world, 1200, 1, seed=number))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO"]
    assert "Drafting is paused, as it would save too little time or none: ×" in caplog.records[0].getMessage()
    assert "at batch 1" in caplog.records[0].getMessage()


def test_fewer_than_hold_plans_in_a_row_without_drafts_do_not_report_drafting_as_paused() -> None:
    advice, dice = Advice(), random.Random(0)
    for _ in range(200):
        run = dice.randint(1, HOLD - 1)
        assert not any(advice.planned(drafting=False) for _ in range(run))
        assert not advice.planned(drafting=True)


def outcome(seq_id: int, offered: int, accepted: int, pass_s: float = 0.1) -> Outcome:
    return Outcome([RowOutcome(seq_id, 4, offered, accepted, accepted + 1)], 0, 0.2, 0.1, pass_s)


@pytest.mark.parametrize(("accepted", "word"), [(4, "the target itself"), (0, "wrong weights")])
def test_a_draft_model_that_seems_to_be_the_wrong_one_is_warned_about_once(
    accepted: int, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If all of its draft tokens are accepted it seems to be the target itself; if none are, its weights seem wrong."""
    advice = Advice()
    for number in range(WINDOW):
        advice.suspect(outcome(number % TEXTS, 4 if accepted else 1, accepted))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert word in record.getMessage()


def test_usual_drafters_are_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """A draft model of low acceptance, a drafter without a model, and one sequence that repeats itself."""
    dice = random.Random(1)
    poor, without_model, one_sequence = Advice(), Advice(), Advice()
    for number in range(4 * WINDOW):
        accepted = 4 if dice.random() < 4 * FEW else 0
        poor.suspect(outcome(number % TEXTS, accepted or 1, accepted))
        without_model.suspect(outcome(number % TEXTS, 1, 0, pass_s=0.0))
        one_sequence.suspect(outcome(7, 4, 4))
    assert caplog.records == []


@pytest.mark.parametrize("num", [2, 8, 32])
def test_sequences_with_different_acceptance_rates_count_as_less_alike(num: int) -> None:
    """`likeness`, the weight of the rates of all rows for one of them, from 400 draft tokens of each row.

    Rows with the same acceptance rate get more than 40 times the weight of rows whose rates are far apart.
    """
    dice = random.Random(num)

    def measured_likeness(rates: list[float]) -> float:
        counts = [Acceptance() for _ in rates]
        for row_counts, rate in zip(counts, rates, strict=True):
            for _ in range(400):
                row_counts.count([(1, int(dice.random() < rate))])
        return likeness(counts, 24.0)

    same = sorted(measured_likeness([0.7] * num) for _ in range(9))[4]
    apart = sorted(measured_likeness([0.2, 0.95] * (num // 2)) for _ in range(9))[4]
    assert same > 40 * apart
    assert apart < 12
    assert likeness([], 24.0) == likeness([Acceptance()], 24.0) == 24.0
