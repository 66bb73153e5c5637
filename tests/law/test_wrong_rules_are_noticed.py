"""Tests of the enumeration itself: rules with common mistakes must fail the check that the right rules pass."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from forerun.tree import DraftTree
from forerun.verify import rules
from forerun.verify.rules import AcceptLaw, block_law, token_law
from law.exact import RULES, TOLERANCE, Draft, Emissions, Family, Rule, bare, chains, deviation, families, judged, trees
from law.wrong_rules import first_failure_stops, joint_weights, token_residual

FAMILIES = families(16)
WRONG = 1e-3


def worst(emitted: Callable[[Family], Emissions], among: list[Family] = FAMILIES) -> float:
    return max(deviation(emitted(family), family.p) for family in among)


def on_chains(rule: Rule, depth: int) -> Callable[[Family], Emissions]:
    return lambda family: judged(chains(family.q, depth), family.p, family.vocab, rule)


def uncapped_end(tree: DraftTree, p: Tensor, row: Tensor) -> AcceptLaw:
    """One reading of hierarchical speculative decoding: capped inside the block, uncapped at its end."""
    capped = block_law(tree, p, row)
    with pytest.MonkeyPatch.context() as patched:
        joint_weights(patched)
        joint = block_law(tree, p, row)
    ends = tree.children()[:, :, 0] < 0
    return replace(capped, accept=torch.where(ends, joint.accept, capped.accept))


def reused_noise(tree: DraftTree, p: Tensor, row: Tensor) -> AcceptLaw:
    """The recovered token is drawn from the residual with the same random number that rejected the draft token."""
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


def dropped_whole(rule: str) -> Callable[[Family], Emissions]:
    """The whole draft is dropped because it was unlikely."""

    def emitted(family: Family) -> Emissions:
        drafts: list[Draft] = []
        for draft in chains(family.q, 2):
            drafts += [draft] if draft.weight > Fraction(15, 100) else [d.weighed(draft.weight) for d in bare()]
        return RULES[rule](drafts, family.p, family.vocab)

    return emitted


def dropped_token(rule: str) -> Callable[[Family], Emissions]:
    """A token is dropped because it was unlikely."""
    return lambda family: RULES[rule](chains(family.q, 2, least=Fraction(35, 100)), family.p, family.vocab)


def misdeclared(family: Family) -> Emissions:
    """A draft that is not drawn from what it declares."""
    drafts = [replace(d, q=(family.mid(()), None)) for d in chains(family.q, 1)]
    return RULES["token"](drafts, family.p, family.vocab)


WRONG_RULES = {
    "block with the token rule's residual": on_chains(token_residual, 2),
    "block that stops at the first failure": on_chains(first_failure_stops, 2),
    "block with the joint ratio at its end": on_chains(uncapped_end, 2),
    "one number for the coin and for the recovered token": on_chains(reused_noise, 1),
    "a law that was not drawn from": misdeclared,
    **{f"a token dropped, {rule}": dropped_token(rule) for rule in RULES},
    **{f"a draft dropped, {rule}": dropped_whole(rule) for rule in RULES},
}


def test_the_right_rules_pass() -> None:
    for rule in (token_law, block_law):
        assert worst(on_chains(rule, 3)) < TOLERANCE


@pytest.mark.parametrize("name", WRONG_RULES)
def test_wrong_rules_are_noticed(name: str) -> None:
    assert worst(WRONG_RULES[name]) > WRONG


def test_the_token_residual_in_block_goes_unnoticed_with_two_tokens() -> None:
    """Why no family here has a vocabulary of 2."""
    binary = [Family(seed, vocab=2) for seed in range(16)]
    assert worst(on_chains(token_residual, 2), binary) < TOLERANCE


def test_block_with_the_joint_ratio_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    joint_weights(monkeypatch)
    assert worst(on_chains(block_law, 2)) > WRONG


def test_verifying_trees_as_if_drawn_with_replacement_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def star(family: Family) -> Emissions:
        return RULES["token"](trees(family.q, (-1, -1)), family.p, family.vocab)

    assert worst(star) < TOLERANCE
    monkeypatch.setattr(rules, "_without_replacement", lambda q, token: q)
    assert worst(star) > WRONG
