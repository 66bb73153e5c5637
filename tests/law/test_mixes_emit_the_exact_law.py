"""Mixes emit the exact law: everything their members may draw is enumerated, in rows of one member and in merged ones.

`MixDrafter` runs as it serves, over members that draw by script, every way there is. What it drafts for each row goes
through the target's rules as in `test_rules_emit_the_exact_law.py`. A merged tree keeps the likeliest of what was
drawn, which no law survives: the mutant that declares one all the same must fail.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from exact import RULES, TOLERANCE, Draft, Family, Model, Script, deviation, families

from forerun.draft import base
from forerun.draft.base import Budget, Committed
from forerun.draft.many.mix import MixDrafter
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftLaw, DraftTree, HostTree
from kit.drafters import Stateless
from kit.unchecked import unchecked

FAMILIES = [family for family in families(16) if family.vocab == 3]
WRONG = 1e-3
MERGED = 2


class Dice:
    """What draws while a script is played."""

    script = Script([])


class Member(Stateless):
    """Chains drawn from a model, or its likeliest ones; with their laws, and how likely each of them is."""

    def __init__(self, model: Model, drawn: bool = True, sparse: bool = False) -> None:
        self.model, self.drawn, self.sparse = model, drawn, sparse

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> base.Draft:
        texts, survival, rows, laws = [], [], [], list[list[float]]()
        for sampling, budget in zip(draws.rows, budgets, strict=True):
            text, chances, own = [sampling.tokens[-1]], [1.0], []
            for _ in range(budget.depth):
                law = [float(x) for x in self.model(tuple(text[1:]))]
                own.append(len(laws))
                laws.append(law)
                text.append(Dice.script.pick(law) if self.drawn else law.index(max(law)))
                chances.append(chances[-1] * law[text[-1]])
            texts.append(text)
            survival.append(chances)
            rows.append(own)
        tree, nodes = DraftTree.of_texts(texts), max(map(len, texts))
        told = torch.tensor([chances + [0.0] * (nodes - len(chances)) for chances in survival])
        if not self.drawn:
            return base.Draft(tree, told)
        row = torch.tensor([own + [-1] * (nodes - len(own)) for own in rows])
        probs, ids = torch.tensor(laws, dtype=torch.float64), None
        if self.sparse:
            ids = torch.tensor([[2, 0, 1]]).repeat(len(laws), 1)
            probs = probs.gather(1, ids)
        return base.Draft(replace(tree, q=DraftLaw(row, probs, ids)), told)


def drafts_of(make: Callable[[], MixDrafter], budgets: Sequence[Budget]) -> list[list[Draft]]:
    """For each row everything that may be drafted, with its probability and the laws it declares."""
    found: list[dict[tuple[object, ...], float]] = [{} for _ in budgets]
    ways: list[list[int]] = [[]]
    rows = [RowSampling(i, SamplingParams(), 1, 0, [0], 1) for i in range(len(budgets))]
    with unchecked():
        while ways:
            Dice.script = Script(ways.pop())
            tree = make().propose(Draws(rows, 3, rejection=True), budgets).tree
            ways += Dice.script.others
            for row, seen in enumerate(found):
                key = declared(tree, row)
                seen[key] = seen.get(key, 0.0) + Dice.script.weight
    assert all(math.isclose(sum(seen.values()), 1) for seen in found)
    return [[Draft(weight, *key) for key, weight in seen.items()] for seen in found]


def declared(tree: DraftTree, row: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[object, ...]]:
    """A row's guesses, their parents counted from the root as -1, and the law of each node's children."""
    nodes = [i for i, token in enumerate(tree.tokens[row].tolist()) if token >= 0]
    tokens, parents = (each[row, nodes].tolist()[1:] for each in (tree.tokens, tree.parents))
    at = [-1] * len(nodes) if tree.q is None else tree.q.row[row, nodes].tolist()
    laws = [] if tree.q is None else tree.q.dense(3).tolist()
    return tuple(tokens), tuple(parent - 1 for parent in parents), tuple(tuple(laws[i]) if i >= 0 else None for i in at)


def check(drafts: Sequence[Draft], family: Family, rules: Sequence[str] = ("token", "block")) -> None:
    for rule in rules:
        error = deviation(RULES[rule](drafts, family.p, family.vocab), family.p)
        assert error < TOLERANCE, f"{rule}, family {family.seed}: the law is off by {error:.2e}"


def mix_of(family: Family, kind: type[MixDrafter] = MixDrafter, drawn: bool = True, sparse: bool = False) -> MixDrafter:
    return kind([Member(family.q, sparse=sparse), Member(family.mid, drawn)], ["low", "middle"])


@pytest.mark.short("False")
@pytest.mark.parametrize("sparse", [False, True])
def test_rows_of_different_members_keep_their_own_laws(sparse: bool) -> None:
    """Side by side in one draft, of different lengths; laws over the whole vocabulary and over named tokens."""
    for family in FAMILIES[:4]:
        budgets = [Budget(2, drafter=1), Budget(0), Budget(2, drafter=0), Budget(1, drafter=1)]
        first, none, second, third = drafts_of(lambda f=family: mix_of(f, sparse=sparse), budgets)
        assert [d.tokens for d in none] == [()]
        for drafts, model in ((first, family.mid), (second, family.q), (third, family.mid)):
            check(drafts, family)
            for draft in drafts:
                for i in range(len(draft.tokens)):
                    assert draft.q[i] == pytest.approx([float(x) for x in model(draft.tokens[:i])], abs=TOLERANCE)


@pytest.mark.short("2-True")
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_merged_rows_are_exact_whatever_stays_of_them(nodes: int, drawn: bool) -> None:
    """Beside a row of one member, whose law is still believed."""
    for family in FAMILIES[:6]:
        budgets = [Budget(2, 2, nodes, MERGED), Budget(1, drafter=0)]
        merged, alone = drafts_of(lambda f=family: mix_of(f, drawn=drawn), budgets)
        assert all(set(draft.q) == {None} for draft in merged)
        assert any(len(draft.tokens) == nodes for draft in merged)
        check(merged, family, ["token"])
        check(alone, family)
        assert all(draft.q[0] is not None for draft in alone)


class Declaring(MixDrafter):
    """The mutant: a merged row that says of the first member's guesses what they were drawn from."""

    def row(self, row: int, budget: Budget, draws: Draws, trees: Mapping[int, Sequence[HostTree]]) -> HostTree:
        grown, first = super().row(row, budget, draws, trees), trees[0][row]
        law_of = dict(zip(first.paths(), first.law_rows, strict=True))
        law_rows = [law_of.get(path, -1) for path in grown.paths()]
        return replace(grown, drafters=[0, *grown.drafters[1:]], law_rows=law_rows)


@pytest.mark.full
def test_a_law_on_a_merged_row_is_noticed() -> None:
    def worst(kind: type[MixDrafter]) -> float:
        found = []
        for family in FAMILIES:
            (drafts,) = drafts_of(lambda f=family: mix_of(f, kind), [Budget(2, 2, 2, MERGED)])
            found.append(deviation(RULES["token"](drafts, family.p, 3), family.p))
        return max(found)

    assert worst(MixDrafter) < TOLERANCE
    assert worst(Declaring) > WRONG
