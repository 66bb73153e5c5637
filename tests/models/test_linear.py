"""Linear layers: right, and every row on its own; a layer that is not is refused."""

from __future__ import annotations

import pytest
import torch

from forerun.models.linear import BlockedLinear, LinearFactory, PackedLinear, padded_rows

DTYPES = [torch.float32, torch.bfloat16]


def test_few_row_counts_are_ever_computed() -> None:
    """Exact while verification is narrow; in all fewer than 32 kernels for every count to 512, little wasted."""
    assert [padded_rows(n) for n in range(1, 18)] == [2, *range(2, 17), 24]
    assert len({padded_rows(n) for n in range(1, 513)}) < 32
    assert all(n <= padded_rows(n) <= max(2, n + 8, 1.5 * n) for n in range(1, 2000))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_linears_agree_and_rows_are_independent(dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 83, generator=generator).to(dtype)
    offset = torch.randn(48, generator=generator).to(dtype) if bias else None
    x = torch.randn(33, 83, generator=generator).to(dtype)
    exact = x.double() @ weight.double().T + (offset.double() if offset is not None else 0)
    for linear in (LinearFactory()(weight, offset), BlockedLinear(weight, offset)):
        assert torch.allclose(linear(x).double(), exact, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=0.1)
        assert all(torch.equal(linear(x[:n].contiguous()), linear(x)[:n]) for n in range(2, 33))


def test_a_layer_whose_rows_know_each_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PackedLinear.__call__
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, x: honest(self, x) + 1e-6 * len(x))
    assert isinstance(LinearFactory()(torch.randn(32, 32)), BlockedLinear)
    monkeypatch.setattr(PackedLinear, "__call__", honest)
    assert isinstance(LinearFactory()(torch.randn(32, 32)), PackedLinear)
