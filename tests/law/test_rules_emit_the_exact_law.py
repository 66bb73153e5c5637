"""Exact enumeration of the very kernels that serve. Every rule, tree and length policy is lossless.

Cascades are enumerated in `test_cascades_emit_the_exact_law.py`. `test_wrong_rules_are_noticed.py` shows that the
check fails for common mistakes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest

from law.exact import (
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
    families,
    trees,
    with_tail,
)

FAMILIES = families(40)
FEW = FAMILIES[:12]
UNLIKELY = Fraction(35, 100)
TERNARY = [family for family in FAMILIES if family.vocab == 3]

SHAPES = {
    "star": (-1, -1, -1),
    "2-2": (-1, -1, 0, 0, 1, 1),
    "3-1": (-1, -1, -1, 0, 1, 2),
    "lopsided": (-1, 0, -1, 0, 2),
}


def unsure(law: Law, _: Context) -> bool:
    return max(law) < Fraction(55, 100)


def check(judge: Judge, drafts: list[Draft], family: Family) -> None:
    error = deviation(judge(drafts, family.p, family.vocab), family.p)
    assert error < TOLERANCE, f"family {family.seed}: the law is off by {error:.2e}"


def chosen_and_drawn(family: Family) -> list[Draft]:
    """The first draft token is chosen, the second drawn: a one-hot law and a real one on the same path."""
    return with_tail(chosen_tree(family.q, (-1,)), family.q)


def ragged(family: Family) -> list[Draft]:
    """Rows of every length in one kernel call; the lengths do not depend on the drawn tokens."""
    drafts = [draft for depth in range(4) for draft in (chains(family.q, depth) if depth else bare())]
    mixed = [draft.weighed(Fraction(1, 4)) for draft in drafts]
    return mixed[::2] + mixed[1::2]


def trees_and_chains(family: Family) -> list[Draft]:
    mixed = trees(family.q, (-1, -1, 0)) + chains(family.q, 3) + bare() + chosen_tree(family.q, (-1, -1))
    return [draft.weighed(Fraction(1, 4)) for draft in mixed]


# What is drafted, for which families, and the rules that judge it.
DRAFTED: dict[str, tuple[Callable[[Family], list[Draft]], list[Family], Sequence[str]]] = {
    "chains of 1": (lambda family: chains(family.q, 1), FAMILIES, tuple(EVERY)),
    "chains of 2": (lambda family: chains(family.q, 2), FAMILIES, tuple(EVERY)),
    "chains of 3": (lambda family: chains(family.q, 3), FAMILIES, tuple(RULES)),
    "chosen chains": (lambda family: chosen_tree(family.q, (-1, 0, 1)), FAMILIES, tuple(RULES)),
    "chosen, then drawn": (chosen_and_drawn, FAMILIES, tuple(RULES)),
    "ragged": (ragged, FEW, tuple(RULES)),
    "stops before an unsure draw": (lambda family: chains(family.q, 3, stop=unsure), FAMILIES, tuple(RULES)),
    "chains of mostly zeros": (lambda family: chains(family.q, 3), families(24, zeros=0.6), tuple(RULES)),
    "trees of mostly zeros": (lambda family: trees(family.q, (-1, -1, -1, 0, 1)), families(24, zeros=0.6), ("token",)),
    "trees and chains": (trees_and_chains, TERNARY[:8], ("token",)),
    # Policies that look at the token that they drop are exact if verification compares tokens, or no law is declared.
    "drops what is unlikely": (lambda family: chains(family.q, 2, least=UNLIKELY), FEW, ("follow",)),
    "drops it, without a law": (
        lambda family: [replace(d, q=(None,) * len(d.q)) for d in chains(family.q, 3, least=UNLIKELY)],
        FAMILIES,
        tuple(RULES),
    ),
}
for name, shape in SHAPES.items():
    among = TERNARY if len(shape) < 6 else TERNARY[:8]
    DRAFTED[f"drawn tree {name}"] = (lambda family, shape=shape: trees(family.q, shape), among, ("token",))
    DRAFTED[f"chosen tree {name}"] = (
        lambda family, shape=shape: chosen_tree(family.q, shape),
        TERNARY[:8],
        ("token", "follow"),
    )


@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name, (*_, rules) in DRAFTED.items() for rule in rules])
def test_every_rule_is_lossless_for_every_draft_policy(name: str, rule: str) -> None:
    make, among, _ = DRAFTED[name]
    for family in among:
        check(EVERY[rule], make(family), family)


@pytest.mark.parametrize("rule", RULES)
def test_stopping_after_an_unlikely_token_is_lossless(rule: str) -> None:
    stopped = 0
    for family in FAMILIES:
        drafts = chains(family.q, 3, stop=partial(after_unlikely, family))
        stopped += len({len(draft.tokens) for draft in drafts}) > 1
        check(RULES[rule], drafts, family)
    assert stopped > 30, "the policy hardly ever stopped early"


def after_unlikely(family: Family, _: Law, context: Context) -> bool:
    return bool(context) and family.q(context[:-1])[context[-1]] < UNLIKELY
