"""The forecast against simulated rounds, and what the log is told while an engine runs."""

import logging
import random

import pytest

from control.worlds import World, calibrated, share_of_best, simulate
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.control.choices import FAVOR
from forerun.control.forecast import (
    Forecast,
    bounding,
    forecast,
    forecast_line,
    gain,
)
from forerun.control.measured import MeasuredDepth
from forerun.control.trials import FEW, HOLD, TEXTS, WINDOW, Advice
from forerun.draft.base import Budget
from forerun.economy import Acceptance, likeness
from forerun.models.experts_config import expected_distinct

WORLDS = {
    "pays": World([0.8], [0.002], lambda n: 0.1 + 0.001 * n),
    "pays in small batches": World([0.75], [0.005], lambda n: 0.1 + 0.004 * n),
    "never pays": World([0.3], [0.05]),
    "one of two": World([0.2, 0.85], [0.001, 0.01], merged_rate=0.85),
    "together": World([0.5, 0.5], [0.003, 0.005], merged_rate=0.85),
}


@pytest.mark.full
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("name", WORLDS)
def test_what_is_forecast_comes_true(name: str, batch: int) -> None:
    """Against the true mean of the same world, of a batch's guesses of late: the median of five within a tenth."""
    world, seen = WORLDS[name], []
    for seed in range(5):
        controller = calibrated(world, batch)
        list(simulate(controller, world, 200, batch, seed=seed))
        seen.append(forecast(controller.costs, controller.drafters, batch))
    found = sorted((each for each in seen if each is not None), key=lambda each: each.gain)[2]
    plain = world.speed([Budget(0)] * batch)
    best = max(
        world.speed([Budget(depth, 1, depth, drafter)] * batch) / plain
        for depth in range(1, 17)
        for drafter in range(len(world.rates) + world.is_mix)
    )
    assert found.gain == pytest.approx(best, rel=0.1)
    assert (found.depth > 0) == (found.gain >= 1 + FAVOR)


def test_nothing_is_forecast_without_measurements() -> None:
    controller = MeasuredDepth()
    assert forecast(controller.costs, controller.drafters, 1) is None
    assert controller.plain_s(1) is None


def test_an_arm_that_seldom_has_anything_to_say_gains_seldom() -> None:
    world = World([0.9], [0.0])
    controller = calibrated(world, 1)
    full = forecast(controller.costs, controller.drafters, 1)
    controller.drafters.all[0].covered = 0.1
    seldom = forecast(controller.costs, controller.drafters, 1)
    assert full is not None
    assert seldom is not None
    assert seldom.gain - 1 == pytest.approx(0.1 * (full.gain - 1), rel=0.05)


@pytest.mark.parametrize(("count", "active"), [(8, 2), (128, 8)])
def test_experts_that_guesses_read_are_paid_for(count: int, active: int) -> None:
    """The same good guesses that pay where a pass costs the same for any few tokens do not where each reads experts."""
    dense = World([0.6], [0.002])
    sparse = World([0.6], [0.002], lambda num_tokens: 0.4 * expected_distinct(count, active, num_tokens) / count)
    pays, does_not = (forecast(each.costs, each.drafters, 1) for each in (calibrated(dense, 1), calibrated(sparse, 1)))
    assert pays is not None
    assert pays.depth > 1
    assert does_not is not None
    assert does_not.depth == 0
    assert forecast_line([does_not]).startswith("drafting is not expected to save time, by ")
    played = list(simulate(calibrated(sparse, 1), sparse, 200, 1))
    assert share_of_best(sparse, played) > 0.95
    assert sum(any(budget.depth for budget in budgets) for budgets in played) < 20


def test_it_is_told_in_a_line() -> None:
    """With how many guesses it rests on; where these leave much open, the bounds stand in for the gain."""
    pays, plain = Forecast(1, "", 5, 1.912, 1.8, 2.0, 300), Forecast(32, "", 0, 0.8, 0.7, 0.8, 300)
    by = "by 300 draft tokens on built-in sample prompts"
    paying = f"expected speed-up, {by}: ×1.91 at batch 1 (depth 5), plain decoding at batch 32"
    assert forecast_line([pays, plain]) == paying
    useless = f"drafting is not expected to save time, {by}: ×0.97 at batch 1 at best"
    assert forecast_line([Forecast(1, "b", 0, 0.97, 0.95, 1.0, 300), plain]) == useless
    assert str(Forecast(1, "", 8, 2.67, 1.02, 3.4, 9)) == "×1.02 to ×3.40 at batch 1 (depth 8)"


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("num", [2, 5, 40, 400])
def test_the_bounds_hold_what_comes_true_and_close_with_the_guesses(chance: float, num: int) -> None:
    """The true gain is within the bounds of 85 in a hundred forecasts by any number of drafts of 4 guesses."""
    world, held = World([chance], [0.001]), 0
    true = world.speed([Budget(4)]) / world.speed([Budget(0)])
    controller = calibrated(world, 1)
    (record,) = controller.drafters.all
    for seed in range(40):
        dice = random.Random(seed)
        record.sampled, record.acceptance = Acceptance(), Acceptance()
        for _ in range(num):
            accepted = next((i for i in range(4) if dice.random() >= chance), 4)
            record.sampled.count([(min(4, accepted + 1), accepted)])
            record.sampled.unit = 1.0  # as a calibration counts
        rates = bounding(record.evidence)
        least, most = (gain(controller.costs, controller.drafters, 0, 4, each, 1, 0) for each in rates)
        held += least <= 1.06 * true and true <= 1.06 * most  # what rounds cost is off a little too
        assert most / least < (6.0 if num < 40 else 2.0 if num < 400 else 1.3)
    assert held >= 34


def test_giving_up_and_going_on_are_told_once_each(caplog: pytest.LogCaptureFixture) -> None:
    """A warning when drafting begins to cost more than it gives, a line when it pays again; nothing in between."""
    good, bad = World([0.9], [0.01]), World([0.0], [0.05])
    controller = calibrated(good, 1)
    with caplog.at_level(logging.INFO, logger="forerun.control.measured"):
        for number, world in enumerate((good, bad, good, bad)):
            list(simulate(controller, world, 1200, 1, seed=number))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert "Drafting is paused, since it would not save time: ×" in caplog.records[0].getMessage()
    assert "at batch 1" in caplog.records[0].getMessage()


def test_a_few_rounds_change_no_mood() -> None:
    advice, dice = Advice(), random.Random(0)
    for _ in range(200):
        run = dice.randint(1, HOLD - 1)
        assert not any(advice.planned(drafting=False) for _ in range(run))
        assert not advice.planned(drafting=True)


def outcome(seq_id: int, offered: int, accepted: int, pass_s: float = 0.1) -> Outcome:
    return Outcome([RowOutcome(seq_id, 4, offered, accepted, accepted + 1)], 0, 0.2, 0.1, pass_s)


@pytest.mark.parametrize(("accepted", "word"), [(4, "the target itself"), (0, "wrong weights")])
def test_a_suspicious_draft_model_is_named_once(accepted: int, word: str, caplog: pytest.LogCaptureFixture) -> None:
    advice = Advice()
    for number in range(WINDOW):
        advice.suspect(outcome(number % TEXTS, 4 if accepted else 1, accepted))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert word in record.getMessage()


def test_an_ordinary_drafter_is_not_suspected(caplog: pytest.LogCaptureFixture) -> None:
    """Neither one that is right at times, nor one without a model, nor one text that repeats itself."""
    dice = random.Random(1)
    usual, copying, alone = Advice(), Advice(), Advice()
    for number in range(4 * WINDOW):
        accepted = 4 if dice.random() < 4 * FEW else 0
        usual.suspect(outcome(number % TEXTS, accepted or 1, accepted))
        copying.suspect(outcome(number % TEXTS, 1, 0, pass_s=0.0))
        alone.suspect(outcome(7, 4, 4))
    assert caplog.records == []


@pytest.mark.parametrize("num", [2, 8, 32])
def test_rows_count_as_much_alike_as_they_are(num: int) -> None:
    """Drawn from one chance for all, what is known of all decides; from chances far apart, each for itself."""
    dice = random.Random(num)

    def weight(chances: list[float]) -> float:
        apart = [Acceptance() for _ in chances]
        for own, chance in zip(apart, chances, strict=True):
            for _ in range(400):
                own.count([(1, int(dice.random() < chance))])
        return likeness(apart, 24.0)

    same = sorted(weight([0.7] * num) for _ in range(9))[4]
    apart = sorted(weight([0.2, 0.95] * (num // 2)) for _ in range(9))[4]
    assert same > 40 * apart
    assert apart < 12
    assert likeness([], 24.0) == likeness([Acceptance()], 24.0) == 24.0
