"""Drafters of drafters, enumerated over everything that their members may draw.

The production code runs, but a script picks each draw, and each script has an exact probability. The result is every
possible draft with its probability and declared laws, which goes through the target's rules as in
`test_rules_emit_the_exact_law.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from forerun.draft import base
from forerun.draft.base import Budget, Committed, Drafter
from forerun.sampling.draws import Draws, PathState, RowSampling
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftLaw, DraftTree
from forerun.verify import verify as verifying
from forerun.verify.rules import AcceptLaw, Walk, walk
from kit.drafters import Stateless
from kit.unchecked import unchecked
from law.exact import BELOW_ONE, RULES, TOLERANCE, Context, Draft, Family, Law, Model, deviation

WRONG = 1e-3  # what a mutant's law is off by at least
Declared = tuple[tuple[int, ...], tuple[int, ...], tuple[Law | None, ...]]


@dataclass
class Script:
    """One possible outcome of all draws. `given` are the choices of its first draws, `taken` all choices made."""

    given: list[int]
    taken: list[int] = field(default_factory=list)
    others: list[list[int]] = field(default_factory=list)  # scripts that branch off
    weight: float = 1.0

    def pick(self, chances: Sequence[float]) -> int:
        """The given choice; after those the first possible one, with the alternatives noted in `others`."""
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        turn = len(self.taken)
        choice = self.given[turn] if turn < len(self.given) else possible[0]
        if turn >= len(self.given):
            self.others += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(choice)
        self.weight *= chances[choice]
        return choice


class Dice:
    """Takes the place of noise in all draws: follows the current script."""

    script = Script([])

    def recover(self, draws: Draws, law: Tensor, at: PathState) -> Tensor:
        return torch.tensor([self.script.pick(row) for row in law.softmax(1).tolist()])

    def draw(self, draws: Draws, logits: Tensor, at: PathState) -> Tensor:
        return torch.tensor([self.script.pick(row) for row in draws.probs(logits, at).tolist()])

    def walk(self, tree: DraftTree, law: AcceptLaw, _: Tensor) -> Walk:
        chances = zip(law.accept[0].tolist(), tree.parents[0].tolist(), strict=True)
        coins = [self.script.pick([p, 1 - p]) if parent >= 0 else 1 for p, parent in chances]
        return walk(tree, law, torch.tensor([[BELOW_ONE if coin else 0.0 for coin in coins]], dtype=torch.float64))


DICE = Dice()


@contextmanager
def scripted() -> Iterator[None]:
    """Within it all draws follow the script."""
    with pytest.MonkeyPatch.context() as patch, unchecked():
        patch.setattr(Draws, "recover", lambda draws, law, at: DICE.recover(draws, law, at))
        patch.setattr(Draws, "draw", lambda draws, logits, at: DICE.draw(draws, logits, at))
        patch.setattr(verifying, "walk", DICE.walk)
        yield


class ToyDrafter(Stateless):
    """Drafts chains drawn from a model, with laws, or of its likeliest tokens, without; and estimates their survival.

    `sparse` laws name their tokens; `room` says after which texts the drafter can go on.
    """

    def __init__(
        self, model: Model, drawn: bool = True, sparse: bool = False, room: Callable[[Context], bool] = lambda _: True
    ) -> None:
        self.model, self.drawn, self.sparse, self.room = model, drawn, sparse, room

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> base.Draft:
        texts, survival, rows, laws = [], [], [], list[list[float]]()
        for sampling, budget in zip(draws.rows, budgets, strict=True):
            text, chances, first = list(sampling.tokens), [1.0], len(sampling.tokens) - 1
            while len(chances) <= budget.depth and self.room(tuple(text[first + 1 :])):
                law = [float(x) for x in self.model(tuple(text[1:]))]
                laws.append(law)
                text.append(DICE.script.pick(law) if self.drawn else law.index(max(law)))
                chances.append(chances[-1] * law[text[-1]])
            texts.append(text[first:])
            survival.append(chances)
            rows.append([*range(len(laws) - len(chances) + 1, len(laws))])
        tree, nodes = DraftTree.of_texts(texts), max(map(len, texts))
        estimates = torch.tensor([chances + [0.0] * (nodes - len(chances)) for chances in survival])
        if not self.drawn:
            return base.Draft(tree, estimates)
        row = torch.tensor([each + [-1] * (nodes - len(each)) for each in rows])
        probs, ids = torch.tensor(laws, dtype=torch.float64), None
        if self.sparse:
            ids = torch.tensor([[2, 0, 1]]).repeat(len(laws), 1)
            probs = probs.gather(1, ids)
        return base.Draft(replace(tree, q=DraftLaw(row, probs, ids)), estimates)


def drafts_of(make: Callable[[], Drafter], budgets: Sequence[Budget], rejection: bool = True) -> list[list[Draft]]:
    """For each row all possible drafts, with their probabilities and declared laws."""
    found: list[dict[Declared, float]] = [{} for _ in budgets]
    scripts: list[list[int]] = [[]]
    rows = [RowSampling(i, SamplingParams(), 1, 0, [0], 1) for i in range(len(budgets))]
    with scripted():
        while scripts:
            DICE.script = Script(scripts.pop())
            tree = make().propose(Draws(rows, 3, rejection=rejection), budgets).tree
            scripts += DICE.script.others
            for row, seen in enumerate(found):
                key = declared(tree, row)
                seen[key] = seen.get(key, 0.0) + DICE.script.weight
    assert all(math.isclose(sum(seen.values()), 1) for seen in found)
    return [[Draft(weight, *key) for key, weight in seen.items()] for seen in found]


def declared(tree: DraftTree, row: int) -> Declared:
    """A row's draft tokens, their parents counted from the root as -1, and the law of each node's children."""
    nodes = [i for i, token in enumerate(tree.tokens[row].tolist()) if token >= 0]
    tokens, parents = (each[row, nodes].tolist()[1:] for each in (tree.tokens, tree.parents))
    at = [-1] * len(nodes) if tree.q is None else tree.q.row[row, nodes].tolist()
    laws = [] if tree.q is None else tree.q.dense(3).tolist()
    return tuple(tokens), tuple(parent - 1 for parent in parents), tuple(tuple(laws[i]) if i >= 0 else None for i in at)


def check(drafts: Sequence[Draft], family: Family, rules: Sequence[str] = tuple(RULES)) -> None:
    """Assert that these rules emit the exact law for the drafts."""
    for rule in rules:
        error = deviation(RULES[rule](drafts, family.p, family.vocab), family.p)
        assert error < TOLERANCE, f"{rule}, family {family.seed}: the law is off by {error:.2e}"
