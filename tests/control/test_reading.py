"""Drafters that must read a text before they draft it: batches of requests that may end before the reading pays."""

import random
from dataclasses import dataclass

import pytest

from control.test_measured import budgets_of, outlook_of, with_costs
from control.worlds import AMPLE, AUTO_SPECULATION
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.cache.paged import Spare
from forerun.config import Speculation
from forerun.control.controller import Load
from forerun.control.costs import Kind
from forerun.control.measured import MeasuredDepth
from forerun.control.trials import FIRST_DEPTH, LONGEST, TRIES
from forerun.draft.base import Outlook


@dataclass(slots=True)
class Answering:
    """A request: its tokens that are left, and those that the drafter has not read."""

    seq_id: int
    left: int
    unread: int


@dataclass(frozen=True)
class Requests:
    """Requests with prompts of `prompt` and answers of `answer` tokens, `batch` at a time, and their true times.

    `rate` is the acceptance rate at every depth. A pass takes `row_s` for each token beyond the first.
    """

    rate: float
    batch: int = 8
    prompt: int = 96
    answer: int = 64
    pass_s: float = 0.02
    row_s: float = 0.0018
    step_s: float = 0.0012
    reading_s: float = 0.00013
    noise: float = 0.05

    def speed(self, controller: MeasuredDepth | None, num_requests: int, seed: int = 0) -> float:
        """Tokens per second of all requests; without a controller nothing is drafted."""
        dice, taken_s, num_begun = random.Random(seed), 0.0, 0
        rows: list[Answering] = []
        while num_begun < num_requests or rows:
            while num_begun < num_requests and len(rows) < self.batch:
                rows.append(Answering(num_begun, self.answer, self.prompt))
                num_begun += 1
            load = Load([row.seq_id for row in rows], [AUTO_SPECULATION] * len(rows), [row.left - 1 for row in rows], 0)
            depths = [0] * len(rows)
            if controller is not None and not controller.skips(load):
                outlook = Outlook([row.unread for row in rows], load.rooms)
                spare = Spare(dict.fromkeys(load.seq_ids, AMPLE), AMPLE, 16)
                depths = [budget.depth for budget in controller.budgets(load, outlook, spare)]
            draft_s = max(depths) * self.step_s
            outcomes = []
            for row, depth in zip(rows, depths, strict=True):
                accepted = next((i for i in range(depth) if dice.random() >= self.rate), depth)
                draft_s += row.unread * self.reading_s if depth else 0.0
                row.unread = 1 if depth else row.unread + 1
                row.left -= accepted + 1
                outcomes.append(RowOutcome(row.seq_id, depth, min(depth, accepted + 1), accepted, accepted + 1))
            pass_s = self.pass_s + self.row_s * (len(rows) + sum(depths) - 1)
            pass_s *= dice.uniform(1 - self.noise, 1 + self.noise)
            taken_s += draft_s + pass_s
            if controller is not None:
                controller.record(Outcome(outcomes, 0, draft_s, pass_s))
            rows = [row for row in rows if row.left > 0]
        return num_requests * self.answer / taken_s


@pytest.mark.parametrize("batch", [4, 8, 16])
@pytest.mark.parametrize(("rate", "least"), [(0.1, 0.98), (0.45, 0.98), (0.6, 0.98), (0.9, 1.04)])
def test_requests_are_not_answered_slower_than_without_drafting(rate: float, least: float, batch: int) -> None:
    """A draft token in eight or sixteen rows takes as long as it saves, unless nearly all are accepted."""
    requests = Requests(rate, batch)
    assert requests.speed(MeasuredDepth(), 60) >= least * requests.speed(None, 60)


def test_long_answers_are_worth_the_reading_of_their_prompts() -> None:
    requests = Requests(0.9, answer=400, prompt=400)
    assert requests.speed(MeasuredDepth(), 24) >= 1.25 * requests.speed(None, 24)


def test_a_new_drafter_is_tried_by_one_row() -> None:
    """Its costs are unknown, which counts as free, so the deepest drafts of all rows would be the best choice."""
    controller = MeasuredDepth()
    controller.costs.record(Kind.of(4), 4, 0.1)
    controller.trials.plain.num_rounds = TRIES
    budgets = budgets_of(controller, [AUTO_SPECULATION] * 3 + [Speculation(5)], outlook_of([[9] * 4], [None]))
    assert [budget.depth for budget in budgets] == [FIRST_DEPTH, 0, 0, 5]


@pytest.mark.parametrize(("reading_s", "expected"), [(0.0, 0.8), (0.001, 0.5)])
def test_a_trial_of_one_row_tells_little_about_texts_that_must_be_read_first(reading_s: float, expected: float) -> None:
    """After the first of two good trials earlier counts weigh as 3 tokens, or as 3 for each of eight rows."""
    controller = with_costs(0.1, [0.001])
    learned = controller.drafters.all[0]
    learned.reading_s = reading_s
    for depth in range(4):
        learned.acceptance.offered[depth], learned.acceptance.accepted[depth] = 600.0, 200.0
    learned.retry.num_idle = LONGEST
    for _ in range(2):
        budgets = budgets_of(controller, [AUTO_SPECULATION] * 8, outlook_of([[9] * 8], [None]))
        assert controller.trials.tried == 0
        depths = [budget.depth for budget in budgets]
        controller.record(Outcome([RowOutcome(row, n, n, n, n + 1) for row, n in enumerate(depths)], 0, 0.001, 0.1))
    assert learned.acceptance.rates()[0] == pytest.approx(expected, abs=0.1)
