"""Predicts speed with the engine's own controller, from computed costs or from costs that an engine saved.

This file gives the controller the costs of rounds and the acceptance rates of drafts, and reads its choice and the
speed that follows. Only `forerun.control` decides how chains and trees are compared with plain decoding.
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
from typing_extensions import override

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
class DraftShape:
    """A chain or a tree of draft tokens, and the probability that one of each depth is accepted."""

    survival: tuple[float, ...]  # by depth
    nodes: int  # draft tokens
    width: int = 1  # children of a node


def chain(rates: Sequence[float], depth: int) -> DraftShape:
    """A chain of `depth` draft tokens, with acceptance rates by depth; the last rate holds for all greater depths."""
    return DraftShape(tuple(accumulate((rates[min(each, len(rates) - 1)] for each in range(depth)), mul)), depth)


def tree(rates: Sequence[float], depth: int, width: int, nodes: int, spread: float) -> DraftShape:
    """The best tree of at most `nodes` draft tokens: the likeliest paths first (Sequoia, arXiv:2402.12374).

    The probability that the target's token is among the w likeliest children of a node at depth j is assumed to be
    1 - (1 - rates[j]) w ** -spread.
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
    return DraftShape(survival, len(taken) - 1, width)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The controller's choice for a batch, and the speeds that follow; means over the sequences of the batch."""

    plain_tokens_per_s: float
    depth: float  # 0: plain decoding is chosen
    draft_tokens: float  # per sequence and round
    tokens_per_round: float
    tokens_per_s: float
    speed_up: float


@dataclass(slots=True)
class ComputedPass(Curve):
    """Seconds of passes by the number of tokens, from a formula in place of measurements."""

    formula: Callable[[float], float] = lambda num_tokens: 0.0

    @override
    def expect(self, size: float | int) -> float:
        """The value of the formula for `size` tokens."""
        return self.formula(size)


@dataclass(frozen=True, slots=True)
class Setting:
    """A target on its cards, with `context` tokens per sequence, and a drafter on all cards or on one `alone`."""

    machine: Machine
    target: Shape
    drafter: Shape | None = None
    alone: bool = False
    context: int = 2048

    def step_s(self, batch: int, width: int) -> float:
        """Seconds of one step of drafting, in which every sequence gets `width` draft tokens."""
        if self.drafter is None:
            return 0.0
        cards = replace(self.machine, num_cards=1) if self.alone else self.machine
        handing_s = self.machine.sum_s(0.0) if self.alone else 0.0  # sends the draft tokens to the other cards
        return cards.pass_s(self.drafter, batch * width, batch, self.context) + cards.constants.step_s + handing_s

    def fits(self, batch: int) -> bool:
        """Whether weights, including embedding tables, and caches of `batch` sequences fit into the cards' memory."""
        used, all_cards = 0.0, self.machine.num_cards
        for shape, num_cards in ((self.target, all_cards), (self.drafter, 1 if self.alone else all_cards)):
            if shape is not None:
                used += (shape.num_weights + shape.head) * self.machine.bits / 8 / num_cards
                used += batch * self.context * shape.cache_bytes / min(num_cards, shape.kv_heads)
        return used <= 0.95 * self.machine.card.memory_bytes  # the rest is for what passes compute

    def controller(self, batch: int, widths: Sequence[int]) -> MeasuredDepth:
        """A controller with the costs of this setting; each width is represented by its own drafter."""
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
        return MeasuredDepth(costs, drafters, load=Load((), (), [AUTO_DEPTH] * batch, 0, context))

    def predict(self, batch: int, shapes: Sequence[DraftShape], free: bool = True) -> Prediction:
        """The controller's choice among these shapes; unless the depth is `free`, it is that of the chosen shape."""
        controller, options = self.controller(batch, [each.width for each in shapes]), dict[int, DraftOption]()
        for number, each in enumerate(shapes):
            budget = Budget(len(each.survival), each.width, each.nodes, number)
            options[number] = DraftOption(budget, frozenset([number]), each.survival, each.survival, {number: 0}, free)
        best = max(controller.search.plans([options] * batch), key=lambda planned: planned.value(0.0))
        drafted = [(each.depth, each.option.num_nodes(each.depth)) for each in best.choice if each is not None]
        depth, num_drafted = (sum(numbers) / batch for numbers in zip(*drafted, strict=True)) if drafted else (0.0, 0.0)
        plain = batch / controller.costs.expect(controller.search.kind(batch), batch)
        tokens, speed = tokens_of(best.choice) / batch, best.tokens_per_s
        return Prediction(plain, depth, num_drafted, tokens, speed, speed / plain)


def saved_controller(path: Path) -> MeasuredDepth:
    """A controller with the costs that an engine saved. Raises SystemExit if the file is not of this kind."""
    try:
        costs = json.loads(path.read_text(encoding="utf-8"))
        return from_json(costs, costs["names"] if len(costs["names"]) > 1 else ["alone"])
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise SystemExit(f"{path}: {error}: give a file rounds-….json that an engine saved") from error


def saved_prediction(controller: MeasuredDepth, batch: int) -> dict[str, Any]:
    """The controller's forecast for a batch of this size, with the name of the best drafter."""
    best = forecast(controller.costs, controller.drafters, batch)
    assert best is not None, "saved costs are not empty"
    record = controller.drafters.all[controller.drafters.names.index(best.drafter)]
    tokens = 1 + record.covered * (expected_tokens(record.evidence.rates(), best.depth) - 1)
    plain = batch / controller.costs.expect(controller.search.kind(batch), batch)
    gain, depth = best.gain if best.depth else 1.0, float(best.depth)
    predicted = Prediction(plain, depth, depth, tokens, plain * gain, gain)
    return {"draft": best.drafter, "batch": batch, **asdict(predicted)}
