"""Linear layers: right, with independent rows; a layer with dependent rows is refused, or computed in pieces."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from forerun.models.backends.invariance import cancelling_product
from forerun.models.backends.torch_cpu.linear import COUNTS, BlockedLinear, PackedLinear, make_linear, trusted_rows
from forerun.models.rows import MAX_ROWS, padded_rows

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def forgotten_checks() -> Iterator[None]:
    """What is known of this machine is forgotten, and what the test finds out about another one too."""
    trusted_rows.cache_clear()
    yield
    trusted_rows.cache_clear()


def test_few_row_counts_are_ever_computed() -> None:
    """Exact while verification is narrow; in all few kernels, little wasted, and every piece of a number checked."""
    assert [padded_rows(n) for n in range(1, 18)] == [2, *range(2, 17), 24]
    assert len(COUNTS) < 32
    for n in range(1, 2000):
        rows = padded_rows(n)
        assert n <= rows <= max(2, n + 8, 1.5 * n)
        for most in (count for count in COUNTS if count % 8 == 0 and count >= 16):
            pieces = {rows} if rows <= most else {most, rows % most}
            assert pieces <= {0, *COUNTS}, "a piece of a size that was not checked"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48, 83), (256, 688), (384, 1024), (1, 2500)])
def test_linears_agree_and_rows_are_independent(shape: tuple[int, int], dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    offset = torch.randn(shape[0], generator=generator).to(dtype) if bias else None
    x = torch.randn(320, shape[1], generator=generator).to(dtype)
    exact = x.double() @ weight.double().T + (offset.double() if offset is not None else 0)
    for linear in (make_linear(weight, offset), BlockedLinear(weight, offset)):
        assert torch.allclose(linear(x).double(), exact, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=0.01)


@pytest.mark.short("shape1-dtype0", "shape2-dtype0", "shape3-dtype1")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(48, 83), (256, 688), (384, 1024), (1152, 896)])
def test_rows_have_the_same_bits_for_inputs_that_show_any_difference(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Sums that cancel, in numbers of rows on both sides of every limit, against the same rows in pairs."""
    x, weight = cancelling_product(320, *shape, dtype)
    for linear in (make_linear(weight), BlockedLinear(weight, None)):
        pairs = torch.cat([linear(pair) for pair in x.split(2)])
        for n in (*range(2, 42), 64, 96, 128, 200, 256, 264, 320):
            padded = torch.cat([x[:n], x.new_zeros(padded_rows(n) - n, shape[1])])
            assert torch.equal(linear(padded)[:n], pairs[:n]), f"{n} rows"


def in_two_halves(x: Tensor, weight: Tensor) -> Tensor:
    """The same sums in another order."""
    half = x.shape[1] // 2
    wide, columns = x.float(), weight.float()
    return (wide[:, :half] @ columns[:, :half].T + wide[:, half:] @ columns[:, half:].T).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_that_cancel_show_differences_that_ordinary_inputs_hide(dtype: torch.dtype) -> None:
    def share(x: Tensor, weight: Tensor) -> float:
        whole = (x.float() @ weight.float().T).to(dtype)
        return float((whole != in_two_halves(x, weight)).float().mean())

    dice = torch.Generator().manual_seed(0)
    assert share(*cancelling_product(64, 96, 1024, dtype)) > 0.5
    ordinary = share(*(torch.randn(n, 1024, generator=dice).to(dtype) for n in (64, 96)))
    assert dtype == torch.float32 or ordinary < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [3, 14, 16, 32, 128])
@pytest.mark.usefixtures("forgotten_checks")
def test_rows_beyond_the_last_number_that_agrees_go_in_pieces(
    limit: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that changes its order of sums beyond `limit` rows: whole blocks below it, or none.

    It takes the place of packing and product alike: oneDNN packs no bfloat16 for a processor with AVX2 alone.
    """

    def remember(self: PackedLinear, weight: Tensor, bias: Tensor | None, max_rows: int = MAX_ROWS) -> None:
        self.weight, self.max_rows = weight, max_rows  # type: ignore[attr-defined]

    def multiply(self: PackedLinear, x: Tensor) -> Tensor:
        rows = [(row[None].float() @ self.weight.float().T).to(dtype) for row in x]  # type: ignore[attr-defined]
        return torch.cat(rows) if len(x) <= limit else in_two_halves(x, self.weight)  # type: ignore[attr-defined]

    monkeypatch.setattr(PackedLinear, "__init__", remember)
    monkeypatch.setattr(PackedLinear, "multiply", multiply)
    layer = make_linear(torch.randn(32, 96).to(dtype))
    if limit < 16:
        assert isinstance(layer, BlockedLinear)
        return
    assert isinstance(layer, PackedLinear)
    assert layer.max_rows == limit // 8 * 8
    x = torch.randn(200, 96).to(dtype)
    assert torch.equal(layer(x), torch.cat([layer(part) for part in x.split(2)]))


@pytest.mark.usefixtures("forgotten_checks")
def test_a_missing_packed_kernel_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: PackedLinear, x: Tensor) -> Tensor:
        raise RuntimeError("could not create a primitive descriptor")

    monkeypatch.setattr(PackedLinear, "multiply", missing)
    assert isinstance(make_linear(torch.randn(32, 32)), BlockedLinear)
