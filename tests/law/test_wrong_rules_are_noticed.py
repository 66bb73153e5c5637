"""Tests of the enumeration itself: rules that are commonly got wrong must fail the checker that the true ones pass."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import torch
from exact import (
    RULES,
    TOLERANCE,
    Draft,
    Emissions,
    Family,
    Rule,
    bare,
    chains,
    deviation,
    dropping,
    families,
    judged,
    judged_next,
    trees,
)
from torch import Tensor

from forerun.tree import DraftTree
from forerun.verify import rules
from forerun.verify.rules import AcceptLaw, block_law, token_law

FAMILIES = families(16)
WRONG = 1e-3


def worst(emitted: Callable[[Family], Emissions], among: list[Family] = FAMILIES) -> float:
    return max(deviation(emitted(family), family.p) for family in among)


def on_chains(rule: Rule, depth: int) -> Callable[[Family], Emissions]:
    return lambda family: judged(chains(family.q, depth), family.p, family.vocab, rule)


def token_residual(tree: DraftTree, p: Tensor, row: Tensor) -> AcceptLaw:
    return replace(block_law(tree, p, row), after=token_law(tree, p, row).after)


def first_failure_stops(tree: DraftTree, p: Tensor, row: Tensor) -> AcceptLaw:
    return replace(block_law(tree, p, row), last_success=False)


def joint_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """w_i = min(1, p(x_1..x_i) / q(x_1..x_i)), where the true rule takes the minimum at every step."""
    weights = rules._weights
    monkeypatch.setattr(rules, "_carry", lambda numerator, denominator: numerator / denominator)
    monkeypatch.setattr(rules, "_weights", lambda *args: weights(*args).clamp_max(1))


def test_the_true_rules_pass() -> None:
    for rule in (token_law, block_law):
        assert worst(on_chains(rule, 3)) < TOLERANCE


@pytest.mark.parametrize("mutant", [token_residual, first_failure_stops])
def test_block_with_a_part_of_the_token_rule(mutant: Rule) -> None:
    assert worst(on_chains(mutant, 2)) > WRONG


def test_the_token_residual_in_block_goes_unnoticed_with_two_tokens() -> None:
    """Why no family here has a vocabulary of 2."""
    binary = [Family(seed, vocab=2) for seed in range(16)]
    assert worst(on_chains(token_residual, 2), binary) < TOLERANCE


def test_block_with_the_joint_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    joint_weights(monkeypatch)
    assert worst(on_chains(block_law, 2)) > WRONG


def test_block_that_takes_the_whole_draft_by_the_uncapped_joint_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """One reading of hierarchical speculative decoding: capped inside the block, uncapped at its end."""

    def uncapped_end(tree: DraftTree, p: Tensor, row: Tensor) -> AcceptLaw:
        capped = block_law(tree, p, row)
        with monkeypatch.context() as patched:
            joint_weights(patched)
            joint = block_law(tree, p, row)
        ends = tree.children()[:, :, 0] < 0
        return replace(capped, accept=torch.where(ends, joint.accept, capped.accept))

    assert worst(on_chains(uncapped_end, 2)) > WRONG


def reused_noise(tree: DraftTree, p: Tensor, row: Tensor) -> AcceptLaw:
    """The recovered token is found by inverting the residual's law at the very number that rejected the guess."""
    law = token_law(tree, p, row)
    failed = torch.zeros(len(p), dtype=p.dtype)  # a rejecting number lies in [failed, 1)
    child = tree.children()[:, :, 0]
    chance = torch.where(child >= 0, law.accept.gather(1, child.clamp_min(0)), 0.0)
    failed[row[tree.valid]] = chance[tree.valid]
    upper = law.after.cumsum(1).clamp_max(1)
    lower = torch.cat([torch.zeros(len(p), 1, dtype=p.dtype), upper[:, :-1]], dim=1)
    met = (upper - torch.maximum(lower, failed[:, None])).clamp_min(0)
    met = met / met.sum(1, keepdim=True).clamp_min(1e-300)
    return replace(law, after=torch.where(failed[:, None] < 1, met, law.after))


def test_noise_used_for_the_coin_and_for_the_recovered_token() -> None:
    assert worst(on_chains(reused_noise, 1)) > WRONG


def test_trees_drawn_without_replacement_and_judged_as_if_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def star(family: Family) -> Emissions:
        return RULES["token"](trees(family.q, (-1, -1)), family.p, family.vocab)

    assert worst(star) < TOLERANCE
    monkeypatch.setattr(rules, "_next_draw", lambda q, token: q)
    assert worst(star) > WRONG


@pytest.mark.parametrize("rule", RULES)
def test_dropping_a_token_because_it_was_unlikely(rule: str) -> None:
    def dropped(family: Family) -> Emissions:
        return RULES[rule](dropping(family, 2, Fraction(35, 100)), family.p, family.vocab)

    assert worst(dropped) > WRONG


@pytest.mark.parametrize("rule", RULES)
def test_dropping_the_whole_draft_because_it_was_unlikely(rule: str) -> None:
    def dropped(family: Family) -> Emissions:
        drafts: list[Draft] = []
        for draft in chains(family.q, 2):
            drafts += [draft] if draft.weight > Fraction(15, 100) else [d.weighed(draft.weight) for d in bare()]
        return RULES[rule](drafts, family.p, family.vocab)

    assert worst(dropped) > WRONG


@pytest.mark.parametrize("rule", RULES)
def test_a_cascade_that_declares_the_lowest_law(rule: str) -> None:
    def cascade(family: Family, *, honest: bool) -> Emissions:
        middle = RULES[rule](chains(family.q, 1), family.mid, family.vocab)
        drafts = judged_next(middle, family.mid, family.mid if honest else family.q)
        return RULES[rule](drafts, family.p, family.vocab)

    assert worst(partial(cascade, honest=True)) < TOLERANCE
    assert worst(partial(cascade, honest=False)) > WRONG


def test_the_checker_fails_a_draft_that_is_not_drawn_from_what_it_declares() -> None:
    def misdeclared(family: Family) -> Emissions:
        drafts = [replace(d, q=(family.mid(()), None)) for d in chains(family.q, 1)]
        return RULES["token"](drafts, family.p, family.vocab)

    assert worst(misdeclared) > WRONG
