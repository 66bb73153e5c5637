"""The choice of arms against all choices there are, and in simulated rounds against the best arm from the start."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from forerun.accept.outcome import Outcome, RowOutcome
from forerun.cache.paged import Spare
from forerun.config import Speculation
from forerun.draft.base import MERGED, NO_DRAFT, Budget, Outlook
from forerun.engine.arms import LONGEST, RETRY, Arm, Arms, Option
from forerun.engine.controller import FixedDepth, Load, slots_of

NAMES = ("a", "b", "c", "d")


def outlook_of(limits: Sequence[Sequence[int]], expected: Sequence[Sequence[float | None]], unread: int = 0) -> Outlook:
    """By member and row."""
    own = [Outlook([unread] * len(row), row, e) for row, e in zip(limits, expected, strict=True)]
    most = [max(column) for column in zip(*limits, strict=True)]
    return Outlook([unread] * len(most), most, [None] * len(most), dict(zip(NAMES, own, strict=False)))


def priced(pass_s: float, draft_s: Sequence[float], merging_s: float | None = None) -> Arms:
    """All arms known, at prices that hang on no size."""
    arms = Arms([Arm(num_rounds=9) for _ in range(len(draft_s) + 1)])
    arms.plain.record(4, pass_s)
    if merging_s is not None:
        arms.merging.record(4, merging_s)
    for arm, each_s in zip(arms.arms, draft_s, strict=False):
        for num_guesses in (1, 40):
            arm.drafts.record(num_guesses, each_s)
    return arms


@pytest.mark.parametrize("seed", range(80))
def test_no_other_choice_gives_more_per_second(seed: int) -> None:
    """Where a member's price is the same for one row and for many, and what is merged costs what any pass does."""
    rng = random.Random(seed)
    num, batch = rng.randint(2, 4), rng.randint(1, 3)
    limits = [[rng.choice([0, 2, 5]) for _ in range(batch)] for _ in range(num)]
    expected = [[rng.uniform(0, 4) for _ in range(batch)] for _ in range(num)]
    pass_s, draft_s = 0.1, [rng.choice([0.0, 0.01, 0.05, 0.2]) for _ in range(num)]
    arms = priced(pass_s, draft_s)
    arms.arms[-1].accepted, arms.arms[-1].promised = rng.choice([(0.0, 0.0), (30.0, 20.0), (5.0, 20.0)])
    wishes = [Speculation(4)] * batch
    found = arms.choose(range(batch), wishes, [9] * batch, outlook_of(limits, expected))
    options = [list(arms.options[row].values()) for row in range(batch)]

    def value(choice: Sequence[Option | None]) -> float:
        taken = [option for option in choice if option is not None]
        asked = {arm for option in taken for arm in option.members}
        gain = batch + sum(option.gain for option in taken)
        return gain / (pass_s + sum(draft_s[arm] for arm in asked))

    every = [choice for choice in itertools.product(*([None, *own] for own in options)) if any(choice)]
    taken = [next((o for o in own if o.budget == b[0]), None) for own, b in zip(options, found, strict=True)]
    assert value(taken) == pytest.approx(max(map(value, every)) if every else value([None]), rel=1e-9)
    assert all((b == [NO_DRAFT]) == (option is None) for b, option in zip(found, taken, strict=True))


def test_gains_are_what_is_expected_and_what_came_of_that() -> None:
    """A member's own expectation by how much of it came true; without one, acceptance by depth."""
    arms = priced(0.1, [0.01, 0.01])
    knowing, silent = arms.arms[0], arms.arms[1]
    knowing.promised, knowing.accepted = 40.0, 18.0
    silent.acceptance.count([(1, 0)] * 300 + [(4, 4)] * 100)
    arms.choose([7], [Speculation(4)], [3], outlook_of([[9], [9]], [[6.0], [None]]))
    options = arms.options[7]
    assert options[0].gain == pytest.approx(3 * (18 + 4) / (40 + 4))
    assert options[1].gain == pytest.approx(0.25 * 3, rel=0.03)
    assert options[0].budget == Budget(3, arm=0)
    assert options[2].budget == Budget(3, 2, 3, 2)
    assert options[2].gain == pytest.approx(options[0].gain)


def test_a_request_that_names_an_arm_is_held_to_it() -> None:
    """Also where another pays more, and where it has nothing to say."""
    arms = priced(0.1, [0.0, 0.5])
    wishes = [Speculation(4, drafter=name) for name in ("b", "a", MERGED, "b")] + [Speculation(4)]
    outlook = outlook_of([[4, 4, 4, 4, 4], [4, 4, 4, 0, 4]], [[3.0] * 5, [0.1] * 5])
    found = arms.choose(range(5), wishes, [9] * 5, outlook)
    assert [budgets[0].arm for budgets in found[:3]] == [1, 0, 2]
    assert found[3] == [NO_DRAFT]
    assert found[4][0].arm in (0, 2)


def test_what_is_unread_is_paid_for_in_part() -> None:
    arms = priced(0.1, [0.01, 0.005])
    arms.arms[1].reading_s = 0.01
    for unread, taken in ((0, 1), (400, 0)):
        outlook = outlook_of([[4], [4]], [[2.0], [2.0]], unread)
        assert arms.choose([0], [Speculation(4)], [9], outlook)[0][0].arm == taken


@dataclass
class World:
    """What arms cost and how often their guesses come true; `told`: whether a member says so beforehand."""

    chances: list[float]
    draft_s: list[float]
    merged: float
    told: list[bool] = field(default_factory=lambda: [False] * 4)
    pass_s: float = 0.1

    def chance(self, arm: int) -> float:
        return self.merged if arm == len(self.chances) else self.chances[arm]

    def round_s(self, arms: Sequence[int]) -> float:
        members = range(len(self.draft_s)) if len(self.draft_s) in arms else {*arms}
        return self.pass_s + sum(self.draft_s[m] for m in members)

    def tokens(self, arm: int) -> float:
        return sum(self.chance(arm) ** j for j in range(5))

    def speed(self, arm: int) -> float:
        return self.tokens(arm) / self.round_s([arm])


def played(world: World, num_rounds: int, arms: Arms, seed: int = 0, batch: int = 1) -> list[list[int]]:
    """The arms that were taken in each round, by row."""
    dice, num, taken = random.Random(seed), len(world.draft_s), []
    for _ in range(num_rounds):
        expected = [
            [sum(world.chances[m] ** j for j in range(1, 9)) if world.told[m] else None] * batch for m in range(num)
        ]
        wishes, rooms = [Speculation(4)] * batch, [9] * batch
        budgets = [
            own[0] for own in arms.choose(range(batch), wishes, rooms, outlook_of([[9] * batch] * num, expected))
        ]
        rows, asked = [], set[int]()
        for row, budget in enumerate(budgets):
            depth = budget.depth
            accepted = next((i for i in range(depth) if dice.random() >= world.chance(budget.arm)), depth)
            rows.append(RowOutcome(row, depth, min(depth, accepted + 1), accepted, accepted + 1, budget.arm))
            asked |= set(range(num)) if budget.arm == num else {budget.arm}
        noise = dice.uniform(0.9, 1.1)
        arm_s = [noise * world.draft_s[m] if m in asked else 0.0 for m in range(num)]
        arms.record(Outcome(rows, 0, sum(arm_s), noise * world.pass_s, 0.0, arm_s))
        taken.append([budget.arm for budget in budgets])
    return taken


WORLDS = {
    "a dear one that is right": World([0.2, 0.9], [0.001, 0.05], 0.9),
    "a cheap one that is hardly worse": World([0.6, 0.7], [0.001, 0.1], 0.7),
    "together": World([0.5, 0.5], [0.01, 0.02], 0.85),
    "the last of three": World([0.1, 0.2, 0.8], [0.001, 0.05, 0.03], 0.8),
    "one that knows": World([0.8, 0.75], [0.02, 0.08], 0.8, told=[True, False]),
    "the first": World([0.7, 0.4], [0.01, 0.01], 0.7),
}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", WORLDS)
def test_it_soon_takes_the_best_arm(name: str, batch: int) -> None:
    """Of 300 rounds, tries and mistakes included, what is given up is less than a tenth of the best arm's speed."""
    world = WORLDS[name]
    taken = played(world, 300, Arms(), batch=batch)
    best = batch * max(map(world.speed, range(len(world.draft_s) + 1)))
    assert {arm for arms in taken for arm in arms} == set(range(len(world.draft_s) + 1))
    tokens = sum(world.tokens(arm) for arms in taken for arm in arms)
    assert tokens / sum(map(world.round_s, taken)) > 0.9 * best


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("guess_s", [0.001, 0.01, 0.04, 0.1])
@pytest.mark.parametrize("chance", [0.2, 0.6, 0.9])
def test_chains_become_as_long_as_pays_best(chance: float, guess_s: float, batch: int) -> None:
    """Of a member that does not say what it expects, by what its guesses and the target's passes cost."""
    arms, dice, node_s = Arms(), random.Random(2), 0.002

    def round_s(depth: int) -> tuple[float, float]:
        return 0.1 + node_s * batch * (1 + depth), guess_s * depth

    lengths = []
    for _ in range(300):
        outlook = outlook_of([[9] * batch, [0] * batch], [[None] * batch] * 2)
        budgets = [own[0] for own in arms.choose(range(batch), [Speculation(8)] * batch, [9] * batch, outlook)]
        assert len({budget.depth for budget in budgets}) == 1
        depth, rows = budgets[0].depth, []
        for row in range(batch):
            accepted = next((i for i in range(depth) if dice.random() >= chance), depth)
            rows.append(RowOutcome(row, depth, min(depth, accepted + 1), accepted, accepted + 1, 0))
        pass_s, draft_s = (each_s * dice.uniform(0.95, 1.05) for each_s in round_s(depth))
        arms.record(Outcome(rows, 0, draft_s, pass_s, 0.0, [draft_s, 0.0]))
        lengths.append(depth)

    def speed(depth: int) -> float:
        return sum(chance**j for j in range(depth + 1)) / sum(round_s(depth))

    assert lengths[:6] == [8] * 6
    settled = lengths[-100:]
    assert sum(map(speed, settled)) / len(settled) > 0.95 * max(map(speed, range(1, 9)))


def test_what_was_given_up_is_tried_again_and_no_more_than_that() -> None:
    world, arms = World([0.1, 0.8], [0.01, 0.01], 0.8), Arms()
    before = [arm for (arm,) in played(world, 3 * LONGEST, arms)]
    tries = [i for i, arm in enumerate(before) if arm == 0]
    gaps = [b - a for a, b in itertools.pairwise(tries) if b - a > 2]
    assert len(tries) <= 2 + 3 * LONGEST // RETRY
    assert max(gaps) <= LONGEST + 3
    assert gaps[-1] >= RETRY
    world.chances = [0.95, 0.1]
    world.merged = 0.1
    after = [arm for (arm,) in played(world, 2 * LONGEST, arms)]
    assert after[-50:].count(0) > 45


def test_the_same_past_gives_the_same_choice() -> None:
    world = WORLDS["together"]
    assert played(world, 200, Arms(), batch=3) == played(world, 200, Arms(), batch=3)


def test_a_round_that_failed_is_forgotten() -> None:
    arms, outlook = priced(0.1, [0.01, 0.01]), outlook_of([[9], [9]], [[2.0], [None]])
    arms.choose([3], [Speculation(4)], [9], outlook)
    arms.choose([4], [Speculation(4)], [9], outlook)
    before = arms.arms[0].promised
    arms.record(Outcome([RowOutcome(3, 4, 4, 4, 5, 0), RowOutcome(4, 0, 0, 0, 1)], 0, 0.0, 0.1, 0.0, [0.1, 0.0]))
    assert arms.arms[0].promised == before
    assert not arms.options


@pytest.mark.parametrize("num_blocks", range(4))
def test_a_merged_tree_without_room_gives_way_to_its_best_member(num_blocks: int) -> None:
    """Blocks of 4: chains of 4 take one, a merged tree of 4 takes 9 slots, and so three."""
    controller = FixedDepth()
    controller.arms = priced(0.1, [0.0, 0.0])
    controller.arms.arms[2].accepted, controller.arms.arms[2].promised = 30.0, 20.0
    outlook = outlook_of([[9, 9], [9, 9]], [[1.0, 1.0], [2.0, 2.0]])
    load = Load([0, 1], [Speculation(4)] * 2, [9, 9], 0)
    found = controller.budgets(load, outlook, Spare({0: 0, 1: 0}, num_blocks, 4))
    assert slots_of(Budget(4, 2, 4, 2)) == 9
    kinds: list[list[int]] = [[-1, -1], [1, -1], [1, 1], [2, -1]]
    assert [budget.arm if budget.depth else -1 for budget in found] == kinds[num_blocks]


def test_many_members_are_looked_at_one_by_one_and_all_together() -> None:
    names = tuple("abcdefg")
    own = {name: Outlook([0], [4], [1.0]) for name in names}
    arms = priced(0.1, [0.05] * 3 + [0.001] + [0.05] * 3)
    found = arms.choose([0], [Speculation(4)], [9], Outlook([0], [4], [None], own))
    assert found[0][0].arm == 3
