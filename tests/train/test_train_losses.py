"""Losses at their known points, and their gradients against finite differences."""

import math

import pytest
import torch
from torch import Tensor

from forerun.train.objective import LOSSES, LawPair


def laws_of(p_logits: Tensor, q_logits: Tensor, tokens: Tensor | None = None) -> LawPair:
    tokens = p_logits.argmax(-1) if tokens is None else tokens
    return LawPair(p_logits.log_softmax(-1), q_logits.log_softmax(-1), tokens)


def loss_of(name: str, laws: LawPair) -> Tensor:
    return LOSSES[name](laws, torch.ones(len(laws.tokens), dtype=torch.bool)).mean()


TARGET = torch.tensor([[0.0, 1.0, 2.0], [3.0, -1.0, 0.5]], dtype=torch.float64)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"ce", "dspark"}))
def test_a_loss_is_zero_only_where_the_distributions_are_equal(name: str) -> None:
    assert float(loss_of(name, laws_of(TARGET, TARGET + 5))) == pytest.approx(0.0, abs=1e-9)
    assert float(loss_of(name, laws_of(TARGET, -TARGET))) > 0.1


def test_losses_have_their_closed_forms() -> None:
    p, q = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.5]])
    laws = LawPair(p.log(), q.log(), torch.tensor([1]))
    kl = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    back = 0.5 * math.log(2.0) + 0.5 * math.log(0.5 / 0.75)
    middle = (0.375, 0.625)
    jsd = 0.5 * sum(a * math.log(a / m) for law in ((0.25, 0.75), (0.5, 0.5)) for a, m in zip(law, middle, strict=True))
    share = math.exp(-3 * 0.75)
    expected = {
        "ce": math.log(2),
        "kl": kl,
        "reverse-kl": back,
        "jsd": jsd,
        "tv": 0.25,
        "lk-alpha": -math.log(0.75),
        "lk-lambda": share * kl + (1 - share) * 0.25,
        "dspark": 0.1 * math.log(2) + 0.9 * 0.5,
    }
    assert set(expected) == set(LOSSES)
    for name, value in expected.items():
        assert float(loss_of(name, laws)) == pytest.approx(value), name
    assert float(laws.overlap) == pytest.approx(0.75)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"lk-lambda"}))  # whose share of KL has no gradient on purpose
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    dice = torch.Generator().manual_seed(1)
    target, student = (torch.randn(3, 5, generator=dice, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    loss_of(name, laws_of(target, student)).backward()
    assert student.grad is not None
    for row, column in ((0, 0), (1, 3), (2, 4)):
        step = torch.zeros_like(target)
        step[row, column] = 1e-6
        up, down = (float(loss_of(name, laws_of(target, student.detach() + s * step))) for s in (1, -1))
        assert float(student.grad[row, column]) == pytest.approx((up - down) / 2e-6, abs=1e-6)


def test_lk_lambda_has_the_gradient_of_its_parts_at_the_share_of_the_moment() -> None:
    student = torch.tensor([[0.3, -0.2, 0.1], [1.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    laws = laws_of(TARGET, student)
    share = math.exp(-3 * float(laws.overlap.detach().mean()))
    (parts,) = torch.autograd.grad((share * laws.kl + (1 - share) * (1 - laws.overlap)).mean(), student)
    (found,) = torch.autograd.grad(loss_of("lk-lambda", laws_of(TARGET, student)), student)
    assert torch.allclose(found, parts)
    alone, both = laws_of(TARGET[:1], -TARGET[:1]), laws_of(TARGET, -TARGET)
    kept = LOSSES["lk-lambda"](both, torch.tensor([True, False]))[:1]
    assert torch.equal(kept, LOSSES["lk-lambda"](alone, torch.tensor([True]))), "rows that do not count change nothing"


def test_in_a_part_of_the_vocabulary_overlaps_use_the_distribution_as_it_is_and_kl_normalises_it() -> None:
    log_p = torch.tensor([[0.2, 0.3]]).log()  # half of the mass is outside
    laws = LawPair(log_p, torch.tensor([[0.4, 0.6]]).log(), torch.tensor([-1]))
    assert float(laws.overlap) == pytest.approx(0.5)
    assert float(laws.kl) == pytest.approx(0.0, abs=1e-6)
    assert float(laws.cross_entropy) == 0.0
