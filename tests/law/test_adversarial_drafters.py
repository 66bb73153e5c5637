"""Drafters that mean harm. The law stands, acceptance is what the overlap of the laws says; a false q is seen."""

import math
from dataclasses import replace

import pytest
import torch
from sampler import chi_square, drafted, emitted, judged_round, law_of, sequences, transitions
from torch import Tensor

from forerun.config import Verification
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftLaw
from kit.unchecked import unchecked

VOCAB, COUNT, ROOT = 50, 10_000, 3
PARAMS = SamplingParams(top_p=0.9)
TARGET = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(11))
ILLEGAL = torch.zeros(VOCAB, VOCAB).scatter(1, TARGET.argmin(1, keepdim=True), 30.0)
LEGAL = torch.zeros(VOCAB, VOCAB).scatter(1, TARGET.argmax(1, keepdim=True), 30.0)

DRAFTERS = {
    "constant": torch.zeros(VOCAB, VOCAB),
    "opposite": -TARGET,
    "sure of an illegal token": ILLEGAL,
    "sure of the likeliest token": LEGAL,
    "another context": TARGET.roll(1, 0),
    "the target": TARGET,
}


def p_values(text: Tensor) -> list[float]:
    p = law_of(TARGET, PARAMS)
    counts = [transitions(text, ROOT, position, VOCAB) for position in range(text.shape[1])]
    return [chi_square(seen, seen.sum(1, keepdim=True) * p) for seen in counts]


@pytest.mark.short("opposite-coupled", "sure of an illegal token-token", "another context-block")
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_law_stands_and_acceptance_is_the_overlap(drafter: str, rule: Verification) -> None:
    with unchecked():
        draws = Draws(sequences(COUNT, PARAMS, ROOT, seed=7), VOCAB, rejection=rule != "coupled")
        tree = drafted(draws, DRAFTERS[drafter], depth=1)
        verdict = judged_round(draws, tree, TARGET, rule)
    assert min(p_values(emitted(tree, verdict))) > 1e-4
    p, q = law_of(TARGET, PARAMS)[ROOT], law_of(DRAFTERS[drafter], PARAMS)[ROOT]
    accepted = verdict.length.double().mean().item()
    overlap = torch.minimum(p, q).sum().item()
    noise = 4 * math.sqrt(overlap * (1 - overlap) / COUNT) + 1e-6
    if rule == "coupled":  # shared noise alone: never above the overlap, and not below its known bound
        assert overlap / (2 - overlap) - noise <= accepted <= overlap + noise
    else:
        assert abs(accepted - overlap) <= noise


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_false_q_fails_the_test(rule: Verification) -> None:
    """The test of the test: tokens drawn from one law and declared as drawn from another."""
    draws = Draws(sequences(COUNT, PARAMS, ROOT, seed=7), VOCAB, rejection=True)
    tree = drafted(draws, DRAFTERS["constant"], depth=1)
    assert tree.q is not None
    likely = law_of(TARGET, PARAMS)[ROOT].float().expand_as(tree.q.probs)
    tree = replace(tree, q=DraftLaw(tree.q.row, likely.lerp(tree.q.probs, 0.1)))
    assert min(p_values(emitted(tree, judged_round(draws, tree, TARGET, rule)))) < 1e-9
