"""Muon in float32 compared with torch's, which multiplies in bfloat16."""

import pytest
import torch
from torch import Tensor

from forerun.train import optimizer
from forerun.train.optimizer import Float32Muon, build_optimizers, orthogonal
from forerun.train.settings import TrainSettings

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # torch's


def moved(kind: type[torch.optim.Muon], shape: tuple[int, int], split: int = 5) -> Tensor:
    """A matrix after five steps; after `split` of them another optimizer takes over with the state of the first."""
    dice = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=dice).requires_grad_()
    own = kind([weight], lr=0.02, momentum=0.95, weight_decay=0.01)
    for step in range(5):
        if step == split:
            kept, own = own.state_dict(), kind([weight], lr=0.02, momentum=0.95, weight_decay=0.01)
            own.load_state_dict(kept)
        weight.grad = torch.randn(shape, generator=dice)
        own.step()
    return weight.detach()


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (24, 80), (1, 16), (16, 1)])
def test_its_steps_are_those_of_torch(shape: tuple[int, int]) -> None:
    found, expected = moved(Float32Muon, shape), moved(torch.optim.Muon, shape)
    begin = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    assert (found - expected).norm() < 0.02 * (expected - begin).norm()


def test_it_continues_from_its_own_state_and_from_torchs() -> None:
    for split in range(1, 5):
        assert torch.equal(moved(Float32Muon, (16, 24), split), moved(Float32Muon, (16, 24)))
    theirs = torch.optim.Muon([torch.ones(2, 2, requires_grad=True)]).state_dict()
    Float32Muon([torch.ones(2, 2, requires_grad=True)]).load_state_dict(theirs)


@pytest.mark.parametrize("shape", [(30, 30), (60, 20), (20, 60)])
def test_singular_vectors_stay_and_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found = left.T @ orthogonal(matrix, COEFFICIENTS, 5, 1e-7) @ right.T
    assert (found - found.diag().diag()).abs().max() < 1e-4
    large = found.diag()[values > 0.1 * values.max()]
    assert 0.6 < large.min() <= large.max() < 1.3
    assert torch.equal(orthogonal(torch.zeros(shape), COEFFICIENTS, 5, 1e-7), torch.zeros(shape))


@pytest.mark.parametrize("fast", [True, False])
def test_it_is_used_where_bfloat16_is_slow(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "has_bfloat16_linears", lambda: fast)
    kinds = [type(own) for own in build_optimizers({"a": torch.ones(3, 3), "b": torch.ones(3)}, 0.01)]
    assert kinds == [torch.optim.Muon if fast else Float32Muon, torch.optim.AdamW]


def test_the_rate_rises_in_the_first_tenth_of_the_steps_and_then_falls_to_zero() -> None:
    rates = [TrainSettings(steps=100).rate_at(step, step / 100) for step in range(100)]
    assert rates[:9] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    assert rates[9:] == pytest.approx([(100 - step) / 100 for step in range(9, 100)])
