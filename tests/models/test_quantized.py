"""8-bit linears: the very numbers of their definition, and a model that says nearly what it says in 16 bits."""

import math
from itertools import product

import pytest
import torch
from recipes.stdlib.corpus import read_corpus, standard_library
from torch import Tensor
from torch.nn import functional

from forerun.models.backends.torch_cpu.linear import make_linear
from forerun.models.backends.torch_cpu.quantized import (
    EXACT_TERMS,
    QuantizedLinear,
    exact_product,
    in_short_sums,
    quantize_rows,
    quantized_packing_is_exact,
)
from forerun.models.choice import cpu_backend
from forerun.models.loading import Blueprint
from forerun.models.runner import Read
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
def test_the_bits_are_those_of_the_definition(shape: tuple[int, int], dtype: torch.dtype, biased: bool) -> None:
    """Whole numbers of 64 bits, in any company, with oneDNN, compiled kernels or neither."""
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


def test_without_the_operator_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: QuantizedLinear, whole: Tensor) -> Tensor:
        if self.packed:
            raise RuntimeError("no such operator")
        return honest(self, whole)

    honest = QuantizedLinear.multiply
    weight, x = torch.randn(16, 64), torch.randn(5, 64)
    expected = make_linear(weight, quantize="int8")(x)
    monkeypatch.setattr(QuantizedLinear, "multiply", missing)
    quantized_packing_is_exact.cache_clear()
    try:
        layer = make_linear(weight, quantize="int8")
    finally:
        quantized_packing_is_exact.cache_clear()
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
