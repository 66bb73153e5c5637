"""Linear layers of 8 and 4 bits have the bits of their definition; perplexity stays close to that of 16 bits."""

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recipes.stdlib.corpus import read_corpus, standard_library
from torch import Tensor
from torch.nn import functional

from forerun.models.backends.native_check import find_kernels
from forerun.models.backends.torch_cpu import quantized
from forerun.models.backends.torch_cpu.linear import make_linear
from forerun.models.backends.torch_cpu.quantized import (
    EXACT_TERMS,
    GROUP,
    LEAST_SCALE,
    MOST_SCALE,
    STEPS,
    Quantized4Linear,
    QuantizedLinear,
    exact_product,
    in_short_sums,
    quantize_groups,
    quantize_rows,
    quantized_packing_pays,
    round_groups,
)
from forerun.models.choice import cpu_backend
from forerun.models.loading import Blueprint
from forerun.models.runner import Read
from kit.compiled import require_compiler
from kit.reading import threads
from kit.unchecked import unchecked

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(3, 5), (48, 83), (384, 1024), (96, 4096), (1, 1)]


def awkward(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Random rows of very different sizes; zeros, one large number among small ones, the largest sums there are."""
    dice = torch.Generator().manual_seed(rows + width)
    x = torch.randn(rows, width, generator=dice) * torch.logspace(-6, 6, rows)[:, None]
    x[rows // 2] = 0
    x[0, 0] = 1e4
    x[-1] = 1
    return x.to(dtype)


@pytest.mark.short("shape4-*", "shape12-*")
@pytest.mark.parametrize(("shape", "dtype", "biased"), list(product(SHAPES, DTYPES, [True, False])))
def test_the_bits_of_8_bit_layers_are_those_of_the_definition(
    shape: tuple[int, int], dtype: torch.dtype, biased: bool
) -> None:
    """Whole numbers of 64 bits, in any company, with oneDNN where it pays, compiled kernels or neither."""
    weight, x = awkward(*shape, dtype), awkward(70, shape[1], dtype)
    bias = torch.randn(shape[0]).to(dtype) if biased else None
    a, s = quantize_rows(x)
    b, t = quantize_rows(weight)
    assert a.abs().max() == b.abs().max() == 127
    sums = a[:6].long() @ b.long().T
    expected = sums.float() * t[:, 0] * s[:6]
    expected = (expected if bias is None else expected + bias.float()).to(dtype)
    ways = [cpu_backend(by, dtype).linear(weight, bias, "int8") for by in ("torch", "auto")]
    for layer in (*ways, QuantizedLinear(weight, bias, packed=False)):
        whole = layer(x)
        assert torch.equal(whole[:6], expected)
        for n in (1, 2, 3, 5, 8, 31, 33, 64):
            assert torch.equal(layer(x[:n].contiguous()), whole[:n]), f"{n} rows"


@pytest.mark.parametrize("inputs", [1, 83, EXACT_TERMS, EXACT_TERMS + 1, 2081, 4096, 11008])
def test_short_sums_of_float32_are_what_float64_gives(inputs: int) -> None:
    """Random numbers, and the largest sums there are: float32 would lose their last bits if it added them all."""
    dice = torch.Generator().manual_seed(inputs)
    x, weight = (torch.randint(-127, 128, (n, inputs), dtype=torch.int8, generator=dice) for n in (9, 700))
    x[0] = weight[0] = 127
    weight[1], x[1, : inputs // 2], x[2], weight[2, ::2] = -127, 127, 126, 125
    expected = (x.double() @ weight.double().T).float()
    short = in_short_sums(weight)
    assert short.shape[2] <= EXACT_TERMS
    assert torch.equal(exact_product(x, short.contiguous()), expected)
    assert torch.equal(exact_product(x[3:4], short.contiguous()), expected[3:4])


def test_rounding_is_at_most_half_a_step() -> None:
    x = awkward(40, 300, torch.float32)
    whole, scales = quantize_rows(x)
    assert ((whole * scales - x).abs() <= 0.5001 * scales).all()


@pytest.mark.parametrize("how", ["missing", "slow"])
def test_without_the_operator_or_where_it_is_slow_the_numbers_are_the_same(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For some processors oneDNN has a reference implementation only."""

    def multiply(self: QuantizedLinear, whole: Tensor) -> Tensor:
        if self.packed and how == "missing":
            raise RuntimeError("no such operator")
        if self.packed:
            clock.append(clock[-1] + 1.0)
        return honest(self, whole)

    honest = QuantizedLinear.multiply
    weight, x = torch.randn(16, 64), torch.randn(5, 64)
    expected = make_linear(weight, quantize="int8")(x)
    clock = [0.0]
    monkeypatch.setattr(QuantizedLinear, "multiply", multiply)
    monkeypatch.setattr(quantized, "time", SimpleNamespace(perf_counter=lambda: clock[-1]))
    quantized_packing_pays.cache_clear()
    try:
        layer = make_linear(weight, quantize="int8")
    finally:
        quantized_packing_pays.cache_clear()
    assert isinstance(layer, QuantizedLinear)
    assert not layer.packed
    assert torch.equal(layer(x), expected)


def perplexity(model: Blueprint, windows: list[list[int]]) -> float:
    """Of held-out code, every window behind `<s>`."""
    runner, total = model.load(1024), 0.0
    with unchecked():
        for i, window in enumerate(windows):
            logits = runner.read([Read(i, [0, *window[:-1]], judged=range(len(window)))]).logits
            runner.release([i])
            total += float(functional.cross_entropy(logits, torch.tensor(window), reduction="sum"))
    return math.exp(total / sum(map(len, windows)))


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param("stdlib", marks=pytest.mark.full), "stdlib-draft"])
def test_perplexity_rises_by_less_than_a_hundredth_and_in_4_bits_by_less_than_a_twentieth(name: str) -> None:
    """Measured by benchmarks/loss.py: 0.0008 and 0.013 nats for the larger model, 0.0006 and 0.031 for the smaller."""
    tokenizer = Blueprint.of(name).tokenizer()
    files = [file.text for file in read_corpus(standard_library()) if file.held_out]
    windows = [tokens for text in files if len(tokens := tokenizer.encode(text)[:512]) == 512][:10]
    assert len(windows) > 4
    half = perplexity(Blueprint.of(name), windows)
    eighth = perplexity(Blueprint.of(name, quantize="int8"), windows)
    assert eighth < 1.01 * half
    assert eighth < perplexity(Blueprint.of(name, quantize="int4"), windows) < 1.05 * half


SHAPES_OF_4_BITS = [(1, 1), (3, 5), (17, 31), (48, 83), (130, 97), (64, 64), (96, 2050), (80, 1056)]
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


@pytest.mark.parametrize(("shape", "biased"), list(product(SHAPES_OF_4_BITS, [True, False])))
def test_the_bits_of_4_bit_layers_are_those_of_the_definition(shape: tuple[int, int], biased: bool) -> None:
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
