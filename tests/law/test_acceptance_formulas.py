"""What sampling with the real noise gives, against closed forms."""

import math

import pytest
import torch
from torch import Tensor

from forerun.sampling.draws import Draws, PathState, RowSampling
from forerun.sampling.noise import Purpose
from forerun.sampling.params import SamplingParams

COUNT = 30_000


def round_of(rejection: bool, vocab: int, seed: int) -> tuple[Draws, PathState]:
    """One sequence and COUNT positions of it: as many independent draws."""
    draws = Draws([RowSampling(0, SamplingParams(), seed, 0, [0], 1)], vocab, rejection=rejection)
    row = torch.zeros(COUNT, dtype=torch.int64)
    return draws, PathState(row, row.new_empty(COUNT, 0), torch.arange(COUNT) + 1)


def laws(case: int) -> tuple[Tensor, Tensor]:
    """Logits of a target and a drafter: alike, apart, peaked, with zeros, equal."""
    generator = torch.Generator().manual_seed(case)
    p, q = torch.randn(2, 6, generator=generator) * (1 + case)
    if case == 0:
        q = p + 0.3 * q
    if case == 3:
        p[2], q[4] = -math.inf, -math.inf
    return p, q if case != 4 else p


def gumbel_match(p: Tensor, q: Tensor) -> float:
    """P(argmax(log p + g) = argmax(log q + g)): sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i)."""
    both = (p > 0) & (q > 0)
    ratio = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])
    return (1 / ratio.sum(1))[both].sum().item()


def within(hits: Tensor, chance: float) -> bool:
    """Whether a count of independent hits lies within four standard deviations of its mean."""
    spread = math.sqrt(max(chance * (1 - chance), 1e-12) * hits.numel())
    return abs(hits.sum().item() - chance * hits.numel()) <= 4 * spread + 1e-6 * hits.numel()


def chi_square_p(drawn: Tensor, law: Tensor) -> float:
    counts = torch.bincount(drawn, minlength=len(law))
    assert counts[law == 0].sum() == 0, "something impossible was drawn"
    expected = law[law > 0].double() * len(drawn)
    statistic = ((counts[law > 0] - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2).item()


@pytest.mark.parametrize("case", range(5))
def test_coupled_match_probability(case: int) -> None:
    p, q = laws(case)
    draws, at = round_of(False, 6, seed=case)
    drawn = draws.draw(p.expand(COUNT, 6), at)
    guessed = draws.children(q.expand(COUNT, 6), at, 1).tokens[:, 0]
    match = gumbel_match(p.double().softmax(0), q.double().softmax(0))
    distance = 0.5 * (p.softmax(0) - q.softmax(0)).abs().sum().item()
    assert (1 - distance) / (1 + distance) - 1e-6 <= match <= 1 - distance + 1e-6
    assert within(drawn == guessed, match)
    assert chi_square_p(drawn, p.softmax(0)) > 1e-4
    assert chi_square_p(guessed, q.softmax(0)) > 1e-4


def test_expected_run_of_matches() -> None:
    """Chains of 3 over i.i.d. laws: accepted + 1 = (1 - a^4) / (1 - a), positions being independent."""
    p, q = laws(0)
    draws, at = round_of(False, 6, seed=40)
    match = draws.draw(p.expand(COUNT, 6), at) == draws.children(q.expand(COUNT, 6), at, 1).tokens[:, 0]
    tokens = match.view(-1, 3).long().cumprod(1).sum(1).double() + 1
    alpha = gumbel_match(p.double().softmax(0), q.double().softmax(0))
    expected = (1 - alpha**4) / (1 - alpha)
    assert abs(tokens.mean().item() - expected) < 4 * tokens.std().item() / math.sqrt(len(tokens))


def verify_one(case: int, *, reuse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token of rejection sampling, by hand, from the parts Draws gives; `reuse` redraws with the draft's noise."""
    p, q = (law.expand(COUNT, 6) for law in laws(case))
    draws, at = round_of(True, 6, seed=100 + case)
    target = draws.probs(p, at)
    children = draws.children(q, at, 1)
    guess = children.tokens
    assert children.law is not None
    accepted = draws.coins(at, guess[:, 0]) * children.law.gather(1, guess)[:, 0] < target.gather(1, guess)[:, 0]
    residual = (target - children.law).clamp_min(0).log()
    other = draws._perturb(residual, at, Purpose.DRAFT).argmax(1) if reuse else draws.recover(residual, at)
    return accepted, torch.where(accepted, guess[:, 0], other), target[0], children.law[0]


@pytest.mark.short("0", "1", "2")
@pytest.mark.parametrize("case", range(5))
def test_token_acceptance_is_one_minus_distance_and_output_is_the_target(case: int) -> None:
    accepted, emitted, p, q = verify_one(case, reuse=False)
    assert within(accepted, torch.minimum(p, q).sum().item())
    assert chi_square_p(emitted, p) > 1e-4


def test_reusing_the_drafts_noise_would_be_seen() -> None:
    """The test of the test: recovering with the noise the draft was drawn with is biased (a bug engines shipped)."""
    _, emitted, p, _ = verify_one(1, reuse=True)
    assert chi_square_p(emitted, p) < 1e-6
