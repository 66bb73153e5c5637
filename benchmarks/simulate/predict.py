"""Predictions: the engine's own controller, asked with costs that were computed, or kept by an engine.

This file hands the controller what rounds cost and how likely guesses are, and reads off what it would choose and what
that gives. How chains and trees are weighed against plain decoding is decided in `forerun.control` alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from benchmarks.simulate.roofline import Machine, Shape

from forerun.config import AUTO_DEPTH
from forerun.control.choices import tokens_of
from forerun.control.controller import Load
from forerun.control.costs import CostTable, Curve, Kind
from forerun.control.drafters import DraftOption, MeasuredDrafter, MeasuredDrafters
from forerun.control.forecast import forecast
from forerun.control.kept_costs import from_json
from forerun.control.measured import MeasuredDepth
from forerun.draft.base import Budget
from forerun.economy import expected_tokens


@dataclass(frozen=True, slots=True)
class Guesses:
    """A chain or a tree of guesses: by depth the chance that one of them is accepted; guesses; children of a node."""

    survival: tuple[float, ...]
    nodes: int
    width: int = 1


def chain(rates: Sequence[float], depth: int) -> Guesses:
    """A chain of so many guesses, by a_j for each depth, the last of them for all that are deeper."""
    return Guesses(tuple(accumulate((rates[min(each, len(rates) - 1)] for each in range(depth)), mul)), depth)


def tree(rates: Sequence[float], depth: int, width: int, nodes: int, spread: float) -> Guesses:
    """The best tree of at most so many guesses: the likeliest paths first (Sequoia, arXiv:2402.12374).

    The target's choice is taken to be among the w likeliest guesses with chance 1 - (1 - a_j) w ** -spread.
    """
    taken, open_paths = list[tuple[float, int]](), [(1.0, -1)]  # chance and depth of paths; that of the root first
    while open_paths and len(taken) <= nodes:
        taken.append(max(open_paths))
        open_paths.remove(taken[-1])
        chance, level = taken[-1][0], taken[-1][1] + 1
        rate = rates[min(level, len(rates) - 1)]
        ranked = [rate] + [(1 - rate) * (n**-spread - (n + 1) ** -spread) for n in range(1, width)]
        open_paths += [(chance * min(rate, each), level) for each in ranked if level < depth]
    survival = tuple(sum((chance for chance, level in taken if level == each), 0.0) for each in range(depth))
    return Guesses(survival, len(taken) - 1, width)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the controller would do with so many rows: guesses of a row, tokens of a round for each, and speeds."""

    plain_tokens_per_s: float
    depth: float  # on average over rows; 0: plain decoding is chosen
    guesses: float
    tokens_per_round: float
    tokens_per_s: float
    speed_up: float


@dataclass(slots=True)
class ComputedPass(Curve):
    """Seconds of passes that a formula gives for any number of tokens, where an engine would have measured some."""

    formula: Callable[[float], float] = lambda num_tokens: 0.0

    def expect(self, size: float | int) -> float:
        """What the formula gives."""
        return self.formula(size)


@dataclass(frozen=True, slots=True)
class Setting:
    """A target on its cards with a drafter, on all of them or one alone, at so many tokens of context a row."""

    machine: Machine
    target: Shape
    drafter: Shape | None = None
    alone: bool = False
    context: int = 2048

    def step_s(self, batch: int, width: int) -> float:
        """Seconds of one step of drafting, in which every row has `width` guesses."""
        if self.drafter is None:
            return 0.0
        cards = replace(self.machine, num_cards=1) if self.alone else self.machine
        handing_s = self.machine.sum_s(0.0) if self.alone else 0.0  # of guesses to the other cards
        return cards.pass_s(self.drafter, batch * width, batch, self.context) + cards.constants.step_s + handing_s

    def fits(self, batch: int) -> bool:
        """Whether weights, tables of embeddings among them, and caches do."""
        used, all_cards = 0.0, self.machine.num_cards
        for shape, num_cards in ((self.target, all_cards), (self.drafter, 1 if self.alone else all_cards)):
            if shape is not None:
                used += (shape.num_weights + shape.head) * self.machine.bits / 8 / num_cards
                used += batch * self.context * shape.cache_bytes / min(num_cards, shape.kv_heads)
        return used <= 0.95 * self.machine.card.memory_bytes  # the rest is for what passes compute

    def controller(self, batch: int, widths: Sequence[int]) -> MeasuredDepth:
        """A controller that knows these costs; what is drafted with each width counts as a drafter of its own."""
        drafters, context = MeasuredDrafters(), batch * self.context
        for width in widths:
            drafts = CostTable(flat=False)
            for depth in (1, AUTO_DEPTH):
                drafts.record(
                    Kind.of(batch), depth, self.machine.constants.drafted_s + depth * self.step_s(batch, width)
                )
            drafters.all.append(MeasuredDrafter(costs=drafts))
        pass_s, host_s = self.machine.pass_s, self.machine.constants.host_s
        passes = ComputedPass(formula=lambda num: host_s + pass_s(self.target, num, batch, self.context))
        costs = CostTable(kinds={Kind.of(batch, context): passes})
        return MeasuredDepth(costs, drafters, load=Load((), (), (), 0, context))

    def predict(self, batch: int, guesses: Sequence[Guesses], free: bool = True) -> Prediction:
        """What is chosen of these; where the depth is not `free`, all rows are drafted as far as they say."""
        controller, options = self.controller(batch, [each.width for each in guesses]), dict[int, DraftOption]()
        for number, each in enumerate(guesses):
            budget = Budget(len(each.survival), each.width, each.nodes, number)
            options[number] = DraftOption(budget, frozenset([number]), each.survival, each.survival, {number: 0}, free)
        best = max(controller.weighing.plans([options] * batch), key=lambda planned: planned.value(0.0))
        drafted = [(each.depth, each.option.num_nodes(each.depth)) for each in best.choice if each is not None]
        depth, num_guesses = (sum(numbers) / batch for numbers in zip(*drafted, strict=True)) if drafted else (0.0, 0.0)
        plain = batch / controller.costs.expect(controller.weighing.kind(batch), batch)
        tokens, speed = tokens_of(best.choice) / batch, best.tokens_per_s
        return Prediction(plain, depth, num_guesses, tokens, speed, speed / plain)


def kept_controller(path: Path) -> MeasuredDepth:
    """What an engine kept of its rounds. SystemExit where the file is of something else."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return from_json(kept, kept["names"] if len(kept["names"]) > 1 else ["alone"])
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise SystemExit(f"{path}: {error}: give a file rounds-….json that an engine kept") from error


def kept_prediction(controller: MeasuredDepth, batch: int) -> dict[str, Any]:
    """The controller's forecast for this batch, with the drafter that it is of."""
    best = forecast(controller.costs, controller.drafters, batch)
    assert best is not None, "kept costs are not empty"
    record = controller.drafters.all[controller.drafters.names.index(best.drafter)]
    tokens = 1 + record.covered * (expected_tokens(record.evidence.rates(), best.depth) - 1)
    plain = batch / controller.costs.expect(controller.weighing.kind(batch), batch)
    gain, depth = best.gain if best.depth else 1.0, float(best.depth)
    predicted = Prediction(plain, depth, depth, tokens, plain * gain, gain)
    return {"draft": best.drafter, "batch": batch, **asdict(predicted)}
