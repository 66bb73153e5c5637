"""Simulated rounds with known acceptance rates and costs, to test controllers, and the best fixed choice in them."""

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
AMPLE = 10**6  # tokens, slots or blocks: more than any test needs
AUTO_SPECULATION = Speculation(AUTO_DEPTH, auto=True)
Run = tuple[int, int]  # numbers of judged and of accepted draft tokens of a member in a merged tree
NO_RUN: Run = (0, 0)


def estimates(rates: Sequence[float]) -> Callable[[int, float], Sequence[float]]:
    """`Outlook.estimate` of a drafter whose acceptance rate is `rates[i]` at every depth of row i."""

    def estimate(i: int, least: float) -> Sequence[float]:
        survival = [rates[i] ** depth for depth in range(1, AUTO_DEPTH + 1)]
        return [each for each in survival if each >= least]

    return estimate


@dataclass
class World:
    """The true acceptance rates of drafters and the true seconds of their drafts and of the target's passes.

    Several drafters form a mix. `rates` are the drafters' acceptance rates, `merged_rate` is that of the mix's merged
    tree; each is the same at every depth. `step_s` are each drafter's seconds per draft token of a chain. `pass_s` maps
    the number of tokens in a pass to its seconds; `unmerged_pass_s`, if given, does so for passes without a merged
    tree. `estimating` says which drafters estimate their survival. Measured times are the true ones, each multiplied by
    a random factor between 1 - `noise` and 1 + `noise`.
    """

    rates: Sequence[float]
    step_s: Sequence[float]
    pass_s: Callable[[int], float] = lambda num_tokens: 0.1
    merged_rate: float = 0.0
    estimating: Sequence[bool] = field(default_factory=lambda: [False] * len(NAMES))
    noise: float = 0.05
    unmerged_pass_s: Callable[[int], float] | None = None

    @property
    def is_mix(self) -> bool:
        return len(self.rates) > 1

    def rate(self, drafter: int) -> float:
        return self.merged_rate if drafter == len(self.rates) else self.rates[drafter]

    def members(self, drafter: int) -> Sequence[int]:
        return range(len(self.rates)) if drafter == len(self.rates) else [drafter]

    def outlook(self, batch: int, merged_runs: Sequence[Sequence[Run]] = ()) -> Outlook:
        """The outlook for a round; `merged_runs` are the runs of the last round's merged trees, by row and member."""
        by_member = {}
        for i, (name, rate, estimating) in enumerate(zip(NAMES, self.rates, self.estimating, strict=False)):
            runs = [row[i] for row in merged_runs]
            estimate = estimates([rate] * batch) if estimating else None
            by_member[name] = Outlook([0] * batch, [AMPLE] * batch, estimate, merged_runs=runs)
        if not self.is_mix:
            return by_member[NAMES[0]]
        return Outlook([0] * batch, [AMPLE] * batch, drafters=by_member)

    def runs(self, depth: int, num_accepted: int, dice: random.Random) -> list[Run]:
        """Draw each member's run in a merged tree of this depth of which `num_accepted` draft tokens were accepted."""
        runs = []
        for rate in self.rates:
            share = min(1.0, rate / self.merged_rate)
            accepted = next((i for i in range(num_accepted) if dice.random() >= share), num_accepted)
            runs.append((min(depth, accepted + 1), accepted))
        return runs

    def round_s(self, budgets: Sequence[Budget]) -> tuple[float, list[float]]:
        """True seconds of the pass, and of each member's drafting, which the deepest row that it drafts decides."""
        depths = [0] * len(self.rates)
        for budget in budgets:
            for member in self.members(budget.drafter) if budget.depth else ():
                depths[member] = max(depths[member], budget.depth)
        num_tokens = sum(1 + budget.nodes for budget in budgets)
        merges = any(budget.depth and budget.drafter == len(self.rates) for budget in budgets)
        pass_s = self.pass_s if merges or self.unmerged_pass_s is None else self.unmerged_pass_s
        return pass_s(num_tokens), [depth * each_s for depth, each_s in zip(depths, self.step_s, strict=True)]

    def tokens(self, budget: Budget) -> float:
        """Expected tokens of one row in a round with this budget."""
        return sum(self.rate(budget.drafter) ** depth for depth in range(budget.depth + 1))

    def speed(self, budgets: Sequence[Budget]) -> float:
        """Expected tokens per second of a round with these budgets."""
        pass_s, draft_s = self.round_s(budgets)
        return sum(map(self.tokens, budgets)) / (pass_s + sum(draft_s))

    def best_speed(self, batch: int, most: int = 16) -> float:
        """The highest expected speed if all rows have the same drafter and depth, plain decoding included."""
        drafters = range(len(self.rates) + self.is_mix)
        choices = [Budget(0), *(Budget(d, 1, d, a) for d, a in itertools.product(range(1, most + 1), drafters))]
        return max(self.speed([budget] * batch) for budget in choices)


def simulate(
    controller: Controller, world: World, count: int, batch: int = 1, seed: int = 0, capture_s: float = 0.0
) -> Iterator[Sequence[Budget]]:
    """Play `count` rounds of automatic depth in the world and report each to the controller; yields their budgets.

    The first round with each number of draft tokens takes `capture_s` longer, and its outcome is marked as captured.
    """
    captured: set[int] = set()
    dice, member_dice = random.Random(seed), random.Random(seed)
    merged_runs = [[NO_RUN] * len(world.rates)] * batch
    for _ in range(count):
        load = Load(range(batch), [AUTO_SPECULATION] * batch, [AMPLE] * batch, 0)
        spare = Spare(dict.fromkeys(range(batch), AMPLE), AMPLE, 16)
        budgets = controller.budgets(load, world.outlook(batch, merged_runs), spare)
        rows, merged_runs = [], [[NO_RUN] * len(world.rates)] * batch
        for row, budget in enumerate(budgets):
            depth = budget.depth
            accepted = next((i for i in range(depth) if dice.random() >= world.rate(budget.drafter)), depth)
            drafter = budget.drafter if world.is_mix and depth else -1
            if drafter == len(world.rates):
                merged_runs[row] = world.runs(depth, accepted, member_dice)
            rows.append(RowOutcome(row, budget.nodes, min(depth, accepted + 1), accepted, accepted + 1, drafter))
        pass_s, draft_s = world.round_s(budgets)
        pass_s *= dice.uniform(1 - world.noise, 1 + world.noise)
        draft_s = [each * dice.uniform(1 - world.noise, 1 + world.noise) for each in draft_s]
        drafter_s = draft_s if world.is_mix and any(budget.depth for budget in budgets) else ()
        num_draft_tokens = sum(budget.nodes for budget in budgets)
        is_new = capture_s > 0 and num_draft_tokens not in captured
        captured.add(num_draft_tokens)
        taken_s = pass_s + capture_s * is_new
        controller.record(Outcome(rows, 0, sum(draft_s), taken_s, 0.0, drafter_s, captured=is_new))
        yield budgets


def calibrated(world: World, batch: int) -> MeasuredDepth:
    """A controller after a calibration in this world, which measured every drafter at several depths."""
    script = Script(MeasuredDepth(), counts=True)
    drafters = range(len(world.rates) + world.is_mix)
    for rows in sorted({1, batch}):
        for depth, drafter in itertools.product((4, 0, 8, 1, 2, 16), drafters):
            script.depth, script.drafter = depth, drafter
            if depth or not drafter:
                list(simulate(script, world, 4, rows, seed=depth))
                script.finish()
    script.controller.begin()
    return script.controller


def share_of_best(world: World, played: Sequence[Sequence[Budget]]) -> float:
    """The expected speed of rounds with these budgets, over that of the best fixed choice."""
    tokens = sum(sum(map(world.tokens, budgets)) for budgets in played)
    taken_s = sum(pass_s + sum(draft_s) for pass_s, draft_s in map(world.round_s, played))
    return tokens / taken_s / world.best_speed(len(played[0]))
