"""Forecasts against the true speed-up of simulated rounds, and what the controller logs about drafting."""

import logging
import random

import pytest

from control.worlds import World, calibrated, share_of_best, simulate
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.control.choices import FAVOR
from forerun.control.forecast import Forecast, bounding, forecast, forecast_line, gain
from forerun.control.measured import MeasuredDepth
from forerun.control.trials import FEW, HOLD, TEXTS, WINDOW, Advice
from forerun.draft.base import Budget
from forerun.economy import Acceptance, likeness
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


def test_there_is_no_forecast_without_measurements() -> None:
    controller = MeasuredDepth()
    assert forecast(controller.costs, controller.drafters, 1) is None
    assert controller.plain_s(1) is None


def test_a_drafter_that_covers_a_tenth_of_rows_gains_a_tenth() -> None:
    """`covered` is the share of rows for which a drafter has draft tokens; drafting is free here."""
    world = World([0.9], [0.0])
    controller = calibrated(world, 1)
    full = forecast(controller.costs, controller.drafters, 1)
    controller.drafters.all[0].covered = 0.1
    tenth = forecast(controller.costs, controller.drafters, 1)
    assert full is not None
    assert tenth is not None
    assert tenth.gain - 1 == pytest.approx(0.1 * (full.gain - 1), rel=0.05)


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
    assert str(Forecast(1, "", 8, 2.67, 1.02, 3.4, 9)) == "×1.02 to ×3.40 at batch 1 (depth 8)"


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
