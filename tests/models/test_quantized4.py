"""4-bit linears: the very numbers of their definition for any shape, size and company, and well chosen scales."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.models.backends.native_check import find_kernels
from forerun.models.backends.torch_cpu.quantized import (
    GROUP,
    LEAST_SCALE,
    MOST_SCALE,
    STEPS,
    Quantized4Linear,
    quantize_groups,
    quantize_rows,
    round_groups,
)
from kit.compiled import require_compiler
from kit.reading import threads

SHAPES = [(1, 1), (3, 5), (17, 31), (48, 83), (130, 97), (64, 64), (96, 2050), (80, 1056)]
COUNTS = [*range(1, 26), 31, 33, 48, 70]


def awkward_weights(outputs: int, inputs: int) -> Tensor:
    """Groups of very different sizes, the largest and the smallest numbers there are, zeros, one number among zeros."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + inputs))
    weight *= torch.logspace(-44, 37, outputs)[torch.randperm(outputs)][:, None]
    weight[outputs // 2] = 0
    weight[-1, 1:] = 0
    weight[0, 0] = torch.finfo(torch.float32).max
    return weight


def awkward_rows(rows: int, inputs: int) -> Tensor:
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(inputs))
    x *= torch.logspace(-8, 4, rows)[:, None]
    x[rows // 2] = 0
    x[1] = 1  # the largest sums there are
    return x


def by_definition(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Whole numbers of 64 bits, groups added one after another in NumPy's float32."""
    rows, row_scales = (t.numpy() for t in quantize_rows(x))
    whole, scales = (t.float().numpy() for t in quantize_groups(weight))
    total = np.zeros((len(rows), len(whole)), np.float32)
    for group, scale in enumerate(scales.T):
        at = slice(group * GROUP, (group + 1) * GROUP)
        sums = rows[:, at].astype(np.int64) @ whole[:, at].astype(np.int64).T
        total = total + sums.astype(np.float32) * scale
    total = total * row_scales
    return torch.from_numpy(total if bias is None else total + bias.numpy())


@pytest.mark.parametrize(("shape", "biased"), list(product(SHAPES, [True, False])))
def test_the_bits_are_those_of_the_definition(shape: tuple[int, int], biased: bool) -> None:
    """In any company, by 1 and 2 threads, by the kernels and by torch; numbers beyond float32 are not compared."""
    require_compiler()
    kernels = find_kernels("native", torch.float32)
    assert kernels is not None
    weight, x = awkward_weights(*shape), awkward_rows(70, shape[1])
    bias = torch.randn(shape[0]) if biased else None
    with np.errstate(over="ignore", invalid="ignore"):
        expected = by_definition(x, weight, bias)
    assert expected.isfinite().float().mean() > 0.8
    compiled, by_torch = kernels.linear(weight, bias, "int4"), Quantized4Linear(weight, bias)
    for count in COUNTS:
        for layer in (compiled, by_torch) if count in COUNTS[::6] else (compiled,):
            with threads(1 + count % 2):
                found = layer(x[:count].contiguous())
            assert same(found, expected[:count]), f"{count} rows"
    assert same(compiled(x[30:37].contiguous()), expected[30:37]), "other neighbours"


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))


def test_a_weight_is_off_by_less_than_by_the_largest_alone() -> None:
    """Every group's squared error is at most that of the scale that makes its largest weight -8."""
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(1))
    weight[3, :40] *= 1e-20
    groups = weight.view(-1, GROUP)
    whole, scales = quantize_groups(weight)
    assert whole.min() == -8
    assert whole.max() == 7
    errors = (whole.view(-1, GROUP) * scales.float().view(-1, 1) - groups).square().sum(1)
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    plain = (largest / -8).bfloat16().float()
    plain_errors = ((groups / plain).round().clamp(-8, 7) * plain - groups).square().sum(1)
    assert (errors <= plain_errors * 1.0001).all()
    assert errors.sum() < 0.93 * plain_errors.sum()
    assert len(set(STEPS)) == len(STEPS)


def test_multiples_of_a_scale_are_kept_exactly() -> None:
    """Whole numbers times a power of two that reach -8, and zeros."""
    whole = torch.randint(-8, 8, (40, 3 * GROUP), generator=torch.Generator().manual_seed(2)).float()
    whole[:, ::GROUP] = -8
    whole[7] = 0
    found, scales = quantize_groups(whole * 2.0**-9)
    assert torch.equal(found.view(-1, GROUP) * scales.float().view(-1, 1), (whole * 2.0**-9).view(-1, GROUP))


def test_scales_stay_where_products_are_exact() -> None:
    """Also of the largest and the smallest numbers; what is not finite gives what is not a number."""
    numbers = torch.tensor([3e38, -3e38, 1e36, 1.0, 1e-30, 1e-38, -1e-45, 0.0, torch.inf, -torch.inf, torch.nan])
    whole, scales = round_groups(numbers.repeat(GROUP, 1))
    sizes = scales[:8].float().abs()
    assert (sizes >= LEAST_SCALE).all()
    assert (sizes <= MOST_SCALE).all()
    assert scales[8:].isnan().all()
    assert (whole[:, 7:] == 0).all()


def test_the_order_of_groups_is_kept() -> None:
    """Groups that cancel leave what the order of their sums leaves, which another order would not."""
    weight = torch.ones(4, 3 * GROUP)
    weight[:, :GROUP], weight[:, GROUP : 2 * GROUP] = 2.0**30, -(2.0**30)
    x = torch.ones(2, 3 * GROUP)
    layer = Quantized4Linear(weight, None)
    assert (layer(x) - GROUP).abs().max() < 0.5
    assert Quantized4Linear(weight.roll(GROUP, 1), None)(x).abs().max() == 0
