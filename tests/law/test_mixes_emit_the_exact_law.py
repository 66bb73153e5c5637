"""Mixes emit the exact law: everything their members may draw is enumerated, in rows of one member and in merged ones.

A merged tree keeps the likeliest drawn tokens, which therefore follow no simple law: the mutant that declares one must
fail.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from typing_extensions import override

from forerun.draft.base import Budget
from forerun.draft.many.mix import MixDrafter
from forerun.sampling.draws import Draws
from forerun.tree import HostTree
from law.exact import RULES, TOLERANCE, Family, deviation, families
from law.scripted import WRONG, ToyDrafter, check, drafts_of

FAMILIES = [family for family in families(16) if family.vocab == 3]
MERGED = 2


def mix_of(family: Family, kind: type[MixDrafter] = MixDrafter, drawn: bool = True, sparse: bool = False) -> MixDrafter:
    return kind([ToyDrafter(family.q, sparse=sparse), ToyDrafter(family.mid, drawn)], ["low", "middle"])


@pytest.mark.short("False")
@pytest.mark.parametrize("sparse", [False, True])
def test_rows_of_different_members_keep_their_own_laws(sparse: bool) -> None:
    """Rows of different members in one draft, of different lengths; laws over the whole vocabulary and sparse ones."""
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
def test_merged_rows_are_exact_for_any_number_of_nodes(nodes: int, drawn: bool) -> None:
    """In one draft with a row of one member, whose law is still used."""
    for family in FAMILIES[:6]:
        budgets = [Budget(2, 2, nodes, MERGED), Budget(1, drafter=0)]
        merged, alone = drafts_of(lambda f=family: mix_of(f, drawn=drawn), budgets)
        assert all(set(draft.q) == {None} for draft in merged)
        assert any(len(draft.tokens) == nodes for draft in merged)
        check(merged, family, ["token"])
        check(alone, family)
        assert all(draft.q[0] is not None for draft in alone)


class Declaring(MixDrafter):
    """The mutant: a merged row declares the law of the first member's draft tokens."""

    @override
    def row_tree(self, row: int, budget: Budget, draws: Draws, trees: Mapping[int, Sequence[HostTree]]) -> HostTree:
        grown, first = super().row_tree(row, budget, draws, trees), trees[0][row]
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
