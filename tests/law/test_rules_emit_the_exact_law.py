"""Exact enumeration of the very kernels that serve. Every rule, tree, cascade and length policy is lossless.

`test_wrong_rules_are_noticed.py` shows that this checker notices what is commonly done wrong.
"""

from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
from exact import (
    EVERY,
    RULES,
    TOLERANCE,
    Context,
    Draft,
    Family,
    Judge,
    Law,
    bare,
    chains,
    chosen_tree,
    deviation,
    dropping,
    families,
    followed,
    judged_next,
    trees,
    with_tail,
)

FAMILIES = families(40)
FEW = FAMILIES[:12]
TERNARY = [family for family in FAMILIES if family.vocab == 3]

SHAPES = {
    "star": (-1, -1, -1),
    "2-2": (-1, -1, 0, 0, 1, 1),
    "3-1": (-1, -1, -1, 0, 1, 2),
    "lopsided": (-1, 0, -1, 0, 2),
}


def check(judge: Judge, drafts: list[Draft], family: Family) -> None:
    error = deviation(judge(drafts, family.p, family.vocab), family.p)
    assert error < TOLERANCE, f"family {family.seed}: the law is off by {error:.2e}"


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_chains(rule: str, depth: int) -> None:
    for family in FAMILIES:
        check(RULES[rule], chains(family.q, depth), family)


@pytest.mark.parametrize("depth", [1, 2])
def test_follow_on_drawn_chains(depth: int) -> None:
    for family in FAMILIES:
        check(followed, chains(family.q, depth), family)


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_drawn_without_replacement(shape: str) -> None:
    for family in TERNARY if len(SHAPES[shape]) < 6 else TERNARY[:8]:
        check(RULES["token"], trees(family.q, SHAPES[shape]), family)


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_chosen_without_chance(shape: str) -> None:
    for family in TERNARY[:8]:
        drafts = chosen_tree(family.q, SHAPES[shape])
        check(RULES["token"], drafts, family)
        check(followed, drafts, family)


@pytest.mark.parametrize("rule", RULES)
def test_chains_chosen_without_chance(rule: str) -> None:
    for family in FAMILIES:
        check(RULES[rule], chosen_tree(family.q, (-1, 0, 1)), family)


def test_a_chain_chosen_in_part() -> None:
    """The first guess without chance, the second drawn: a one-hot law and a real one in the same path."""
    for family in FAMILIES:
        (first,) = chosen_tree(family.q, (-1,))
        drafts = with_tail([first], family.q)
        for judge in RULES.values():
            check(judge, drafts, family)


@pytest.mark.parametrize("rule", RULES)
def test_ragged_batches(rule: str) -> None:
    """Rows of every length in one kernel call, whose lengths were settled by an outside coin."""
    for family in FEW:
        mixed: list[Draft] = []
        for depth in range(4):
            drafts = chains(family.q, depth) if depth else bare()
            mixed += [draft.weighed(Fraction(1, 4)) for draft in drafts]
        mixed = mixed[::2] + mixed[1::2]
        check(RULES[rule], mixed, family)


def test_trees_beside_chains() -> None:
    for family in TERNARY[:8]:
        mixed = trees(family.q, (-1, -1, 0)) + chains(family.q, 3) + bare() + chosen_tree(family.q, (-1, -1))
        check(RULES["token"], [draft.weighed(Fraction(1, 4)) for draft in mixed], family)


@pytest.mark.parametrize("tail", [False, True], ids=["", "tail"])
@pytest.mark.parametrize("upper", EVERY)
@pytest.mark.parametrize("lower", EVERY)
def test_cascades(lower: str, upper: str, tail: bool) -> None:
    """Whatever the middle model's rule emits, its law at every emitted position is the middle model's own."""
    for family in TERNARY[: 3 if upper == "follow" else 10]:
        drafts = judged_next(EVERY[lower](chains(family.q, 1 if tail else 2), family.mid, 3), family.mid)
        check(EVERY[upper], with_tail(drafts, family.q) if tail else drafts, family)


@pytest.mark.parametrize("rule", RULES)
def test_cascades_of_two_middle_rounds(rule: str) -> None:
    for family in TERNARY[:10]:
        first = RULES[rule](chains(family.q, 1), family.mid, 3)
        again = [
            draft.weighed(weight) for text, weight in first.strings() for draft in chains(family.q, 1, prefix=text)
        ]
        second = RULES[rule](again, family.mid, 3)
        check(RULES[rule], judged_next(second, family.mid), family)


def unsure(law: Law, _: Context) -> bool:
    return max(law) < Fraction(55, 100)


@pytest.mark.parametrize("rule", RULES)
def test_stopping_before_an_unsure_draw(rule: str) -> None:
    for family in FAMILIES:
        check(RULES[rule], chains(family.q, 3, stop=unsure), family)


@pytest.mark.parametrize("rule", RULES)
def test_keeping_an_unlikely_token_and_then_stopping(rule: str) -> None:
    stopped = 0
    for family in FAMILIES:
        drafts = chains(family.q, 3, stop=partial(after_unlikely, family))
        stopped += len({len(draft.tokens) for draft in drafts}) > 1
        check(RULES[rule], drafts, family)
    assert stopped > 30, "the policy hardly ever stopped early"


def after_unlikely(family: Family, _: Law, context: Context) -> bool:
    return bool(context) and family.q(context[:-1])[context[-1]] < Fraction(35, 100)


def test_follow_allows_policies_that_look_at_the_token_they_drop() -> None:
    for family in FEW:
        check(followed, dropping(family, 2, Fraction(35, 100)), family)


def test_a_judge_without_q_allows_policies_that_look_at_the_token_they_drop() -> None:
    """A draft whose law is not believed any more (row -1 throughout) is judged as it stands."""
    for family in FAMILIES:
        doubted = [replace(d, q=(None,) * len(d.q)) for d in dropping(family, 3, Fraction(35, 100))]
        for judge in RULES.values():
            check(judge, doubted, family)
