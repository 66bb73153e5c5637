"""Simulated rounds of known chances and costs, for controllers, and the best fixed choice in them."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from forerun.accept.outcome import Outcome, RowOutcome
from forerun.cache.paged import Spare
from forerun.config import AUTO_DEPTH, Speculation
from forerun.control.controller import Controller, Load
from forerun.control.measured import MeasuredDepth
from forerun.draft.base import Budget, Outlook
from forerun.engine.calibration import Script

NAMES = ("a", "b", "c", "d")
AMPLE = 10**6
AUTO_WISH = Speculation(AUTO_DEPTH, auto=True)
Run = tuple[int, int]
NO_RUN: Run = (0, 0)


def estimates(chances: Sequence[float]) -> Callable[[int, float], Sequence[float]]:
    """The estimates of a drafter whose draft tokens are accepted with such a probability at every depth."""

    def estimate(i: int, least: float) -> Sequence[float]:
        survival = [chances[i] ** depth for depth in range(1, AUTO_DEPTH + 1)]
        return [each for each in survival if each >= least]

    return estimate


@dataclass
class World:
    """Members that guess right by `chances`, depth by depth the same; what their levels and the passes take.

    `told`: whether a member says beforehand what it expects. `merged` is the chance of a merged tree. A lone member is
    no mix. `noise` is how far times are off, to either side. `alone_s` is what passes without merged trees take, where
    that is something else.
    """

    chances: Sequence[float]
    level_s: Sequence[float]
    pass_s: Callable[[int], float] = lambda num_tokens: 0.1
    merged: float = 0.0
    told: Sequence[bool] = field(default_factory=lambda: [False] * len(NAMES))
    noise: float = 0.05
    alone_s: Callable[[int], float] | None = None

    @property
    def is_mix(self) -> bool:
        return len(self.chances) > 1

    def chance(self, drafter: int) -> float:
        return self.merged if drafter == len(self.chances) else self.chances[drafter]

    def members(self, drafter: int) -> Sequence[int]:
        return range(len(self.chances)) if drafter == len(self.chances) else [drafter]

    def outlook(self, batch: int, came_true: Sequence[Sequence[Run]] = ()) -> Outlook:
        """`came_true` is what came of each member's guesses in the last round, by row."""
        own = {}
        for i, (name, chance, told) in enumerate(zip(NAMES, self.chances, self.told, strict=False)):
            runs = [row[i] for row in came_true]
            estimate = estimates([chance] * batch) if told else None
            own[name] = Outlook([0] * batch, [AMPLE] * batch, estimate, merged_runs=runs)
        if not self.is_mix:
            return own[NAMES[0]]
        return Outlook([0] * batch, [AMPLE] * batch, drafters=own)

    def runs(self, depth: int, accepted: int, dice: random.Random) -> Sequence[Run]:
        """How many guesses of each member were judged and right, in a merged tree so deep of which so many were."""
        found = []
        for chance in self.chances:
            likely = min(1.0, chance / self.merged)
            right = next((i for i in range(accepted) if dice.random() >= likely), accepted)
            found.append((min(depth, right + 1), right))
        return found

    def round_s(self, budgets: Sequence[Budget]) -> tuple[float, list[float]]:
        """The pass, and what each member takes: so much for a level of the deepest row that it drafts."""
        levels = [0] * len(self.chances)
        for budget in budgets:
            for member in self.members(budget.drafter) if budget.depth else ():
                levels[member] = max(levels[member], budget.depth)
        num_tokens = sum(1 + budget.nodes for budget in budgets)
        merges = any(budget.depth and budget.drafter == len(self.chances) for budget in budgets)
        pass_s = self.pass_s if merges or self.alone_s is None else self.alone_s
        return pass_s(num_tokens), [level * each for level, each in zip(levels, self.level_s, strict=True)]

    def tokens(self, budget: Budget) -> float:
        """What a row gives on average."""
        return sum(self.chance(budget.drafter) ** j for j in range(budget.depth + 1))

    def speed(self, budgets: Sequence[Budget]) -> float:
        """Tokens per second, on average."""
        pass_s, draft_s = self.round_s(budgets)
        return sum(map(self.tokens, budgets)) / (pass_s + sum(draft_s))

    def best_speed(self, batch: int, most: int = 16) -> float:
        """That of the best choice that is the same for all rows."""
        drafters = range(len(self.chances) + self.is_mix)
        choices = [Budget(0), *(Budget(d, 1, d, a) for d, a in itertools.product(range(1, most + 1), drafters))]
        return max(self.speed([budget] * batch) for budget in choices)


def rounds(
    controller: Controller,
    world: World,
    count: int,
    batch: int = 1,
    wish: Speculation | None = None,
    seed: int = 0,
    capture_s: float = 0.0,
    noticed: bool = True,
) -> Iterator[Sequence[Budget]]:
    """The budgets of so many rounds, each reported to the controller.

    The first round of each number of guesses takes `capture_s` more, and says so where that is `noticed`.
    """
    captured: set[int] = set()
    dice, wish = random.Random(seed), wish or AUTO_WISH
    members_dice = random.Random(seed)
    came_true = [[NO_RUN] * len(world.chances)] * batch
    for _ in range(count):
        load = Load(range(batch), [wish] * batch, [AMPLE] * batch, 0)
        spare = Spare(dict.fromkeys(range(batch), AMPLE), AMPLE, 16)
        budgets = controller.budgets(load, world.outlook(batch, came_true), spare)
        rows, came_true = [], [[NO_RUN] * len(world.chances)] * batch
        for row, budget in enumerate(budgets):
            depth = budget.depth
            accepted = next((i for i in range(depth) if dice.random() >= world.chance(budget.drafter)), depth)
            drafter = budget.drafter if world.is_mix and depth else -1
            if drafter == len(world.chances):
                came_true[row] = world.runs(depth, accepted, members_dice)
            rows.append(RowOutcome(row, budget.nodes, min(depth, accepted + 1), accepted, accepted + 1, drafter))
        pass_s, draft_s = world.round_s(budgets)
        pass_s *= dice.uniform(1 - world.noise, 1 + world.noise)
        draft_s = [each * dice.uniform(1 - world.noise, 1 + world.noise) for each in draft_s]
        drafter_s = draft_s if world.is_mix and any(budget.depth for budget in budgets) else ()
        num_guesses = sum(budget.nodes for budget in budgets)
        new = capture_s > 0 and num_guesses not in captured
        captured.add(num_guesses)
        taken_s = pass_s + capture_s * new
        controller.record(Outcome(rows, 0, sum(draft_s), taken_s, 0.0, drafter_s, captured=new and noticed))
        yield budgets


def calibrated(world: World, batch: int) -> MeasuredDepth:
    """A controller that has seen every depth of every drafter, as at the start of an engine."""
    script = Script(MeasuredDepth(), counts=True)
    drafters = range(len(world.chances) + world.is_mix)
    for rows in sorted({1, batch}):
        for depth, drafter in itertools.product((4, 0, 8, 1, 2, 16), drafters):
            script.depth, script.drafter = depth, drafter
            if depth or not drafter:
                list(rounds(script, world, 4, rows, seed=depth))
                script.finish()
    script.controller.begin()
    return script.controller


def share_of_best(world: World, played: Sequence[Sequence[Budget]]) -> float:
    """How much of the best choice's speed these rounds had."""
    tokens = sum(sum(map(world.tokens, budgets)) for budgets in played)
    taken_s = sum(pass_s + sum(draft_s) for pass_s, draft_s in map(world.round_s, played))
    return tokens / taken_s / world.best_speed(len(played[0]))
