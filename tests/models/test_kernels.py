"""The compiled kernels: right, with bits that do not depend on other rows, for every instruction set."""

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.config import CPU_QUANTIZATIONS, KernelChoice, Quantization
from forerun.errors import UnsupportedModel
from forerun.kernels.variants import VARIANTS
from forerun.models import choice as choosing
from forerun.models.backends import native
from forerun.models.backends.invariance import cancelling_product
from forerun.models.backends.native import NativeBackend
from forerun.models.backends.native_check import checked, find_kernels
from forerun.models.backends.torch_cpu.quantized import Quantized4Linear, QuantizedLinear
from forerun.models.config import read_config
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from kit.checkpoints import TARGET
from kit.compiled import LEVELS, compiled_for, require_compiler
from kit.reading import bits_of_any_reading, logits_in_pieces, random_decoder, threads
from kit.unchecked import unchecked

SHAPES = [(1, 1), (48, 83), (256, 688), (130, 1000), (64, 64)]
COUNTS = [*range(1, 40), 47, 48, 49, 64, 65, 100, 129, 320]
PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMATS = [*PLAIN, *CPU_QUANTIZATIONS]


@pytest.fixture(scope="module", params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> NativeBackend:
    """The library compiled for one of the instruction sets."""
    return checked(compiled_for(request.param))


def weight_of(numbers: str, shape: tuple[int, int], dice: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=dice).to(PLAIN.get(numbers, torch.float32))


def quantization(numbers: str) -> Quantization | None:
    return next((each for each in CPU_QUANTIZATIONS if each == numbers), None)


@pytest.mark.parametrize("numbers", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_definition(kernels: NativeBackend, shape: tuple[int, int], numbers: str) -> None:
    """Of 8 and 4 bits they are those of the definition, to the bit: whole numbers add up exactly in any order.

    Only weights are of float16: rows stay as they are.
    """
    dice = torch.Generator().manual_seed(0)
    weight, quantize = weight_of(numbers, shape, dice), quantization(numbers)
    for bias in (None, torch.randn(shape[0], generator=dice)):
        layer = kernels.linear(weight, bias, quantize)
        x = torch.randn(37, shape[1], generator=dice)
        x[5], x[6], x[7, 0] = 0.0, 1e-30, 1e4
        if quantize is not None:
            definition = (
                Quantized4Linear(weight, bias) if quantize == "int4" else QuantizedLinear(weight, bias, packed=False)
            )
            assert torch.equal(layer(x), definition(x))
            continue
        rounded = x.double() if numbers == "float16" else x.to(weight.dtype).double()
        exact = rounded @ weight.double().T + (0 if bias is None else bias.double())
        scale = rounded.abs() @ weight.double().abs().T + 1e-20
        assert ((layer(x).double() - exact).abs() / scale).max() < 1e-5


@pytest.mark.short(
    "*-shape0-float32", "*-shape1-bfloat16", "*-shape2-*", "*-shape3-int4", "*-shape1-int8", "*-shape3-float16"
)
@pytest.mark.parametrize("numbers", FORMATS)
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(
    kernels: NativeBackend, shape: tuple[int, int], numbers: str
) -> None:
    """Sums that cancel, in any number of rows and by any number of threads, against the same rows alone."""
    x, weight = cancelling_product(320, *shape, torch.float32)
    layer = kernels.linear(weight.to(PLAIN.get(numbers, torch.float32)), None, quantization(numbers))
    alone = torch.cat([layer(row[None]) for row in x])
    for count in COUNTS:
        with threads(1 + count % 3):
            assert torch.equal(layer(x[:count].contiguous()), alone[:count]), f"{count} rows"
    with threads(1):
        assert torch.equal(layer(x[100:107].contiguous()), alone[100:107]), "other neighbours"


def test_nan_affects_its_own_row_only(kernels: NativeBackend) -> None:
    """It is seen in its own row and in no other."""
    for numbers in FORMATS:
        weight = weight_of(numbers, (70, 90), torch.Generator().manual_seed(0))
        layer, x = kernels.linear(weight, None, quantization(numbers)), torch.randn(5, 90)
        clean = layer(x)
        x[2, 3] = math.nan
        found = layer(x)
        assert found[2].isnan().all()
        assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def load(folder: Path, numbers: str, choice: KernelChoice) -> Runner:
    if choice == "native":
        require_compiler()
    quantize = quantization(numbers)
    return Blueprint.of(str(folder), dtype="float32" if quantize else numbers, quantize=quantize, kernels=choice).load(
        2048
    )


@pytest.mark.short("int4")
@pytest.mark.parametrize("numbers", FORMATS)
def test_logits_of_a_text_have_the_same_bits_in_any_batch_and_with_any_threads(numbers: str) -> None:
    """The decoder's logits, too, are a token's own, and near those of torch's operators."""
    native = load(TARGET, numbers, "native")
    rng = random.Random(numbers)
    tokens = [rng.randrange(3, 512) for _ in range(400)]
    alone = bits_of_any_reading(native, tokens)
    by_torch = logits_in_pieces(load(TARGET, numbers, "torch"), tokens, [400])
    bound = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.05}.get(numbers, 0.1)
    assert (alone - by_torch).abs().max() < bound * by_torch.abs().max()


@pytest.mark.short("bfloat16-1", "float32-3")
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("numbers", ["float32", "bfloat16", "float16"])
def test_long_texts_have_the_same_bits_with_any_threads(
    numbers: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more threads than key heads, windows, and heads that do not fill registers."""
    require_compiler()
    monkeypatch.setattr(native, "num_threads", lambda rows: torch.get_num_threads())  # also if cores are busy
    backend = find_kernels("native", PLAIN[numbers])
    assert backend is not None
    config = replace(
        read_config(TARGET),
        heads=6,
        kv_heads=kv_heads,
        head_dim=40,
        max_positions=1024,
        windows=(None, 530, 37, None, 512),
    )
    runner = Runner.of(random_decoder(config, PLAIN[numbers], backend), 2048, 16)
    rng = random.Random(kv_heads)
    tokens = [rng.randrange(3, 512) for _ in range(700)]
    with unchecked():
        with threads(1):
            alone = logits_in_pieces(runner, tokens, [500] + [1] * 200)
        for num_threads, sizes in ((2, [1] * 200), (3, [5] * 40), (4, [2, 3] * 40), (2, [200])):
            with threads(num_threads):
                assert torch.equal(logits_in_pieces(runner, tokens, [500, *sizes]), alone), (num_threads, sizes)


@pytest.mark.parametrize("choice", ["native", "torch"])
def test_taps_and_partial_passes_are_those_of_a_full_pass(choice: KernelChoice) -> None:
    runner = load(TARGET, "float32", choice)
    decoder, tokens = runner.decoder, [5, 9, 300, 7, 8]
    num_layers = decoder.config.layers
    states = runner.read([Read(0, tokens, judged=range(5))], taps=(0, 2, num_layers, -1))
    assert states.taps is not None
    assert torch.equal(states.taps[:, 0], decoder.embedding[torch.tensor(tokens)])
    assert torch.equal(states.taps[:, 2], states.hidden)
    runner.drop([0])
    runner.cache.reserve([0], [5])
    batch = runner.pack([Read(0, tokens)])
    with torch.inference_mode():
        lower = decoder.forward(batch, runner.cache, layers=range(2)).last
        assert torch.equal(lower, states.taps[:, 1])
        upper = decoder.forward(batch, runner.cache, layers=range(2, num_layers), inputs=lower).last
    assert torch.equal(upper, states.hidden)
    assert torch.equal(decoder.logits(upper), states.logits)


def test_unsupported_formats_are_refused() -> None:
    assert find_kernels("auto", torch.float64) is None
    with pytest.raises(UnsupportedModel, match=r"support float32, bfloat16 and float16, not torch\.float64"):
        find_kernels("native", torch.float64)


def check_same_bits(one: NativeBackend, other: NativeBackend) -> None:
    """Products with sums that cancel."""
    for numbers, shape in itertools.product(FORMATS, SHAPES):
        x, weight = cancelling_product(70, *shape, torch.float32)
        weight, quantize = weight.to(PLAIN.get(numbers, torch.float32)), quantization(numbers)
        first, second = (kernels.linear(weight, None, quantize)(x) for kernels in (one, other))
        assert torch.equal(first, second), (numbers, shape)


@pytest.mark.full
def test_bits_do_not_depend_on_compiler_optimization() -> None:
    """Which is why its name and version are no part of the fingerprint."""
    check_same_bits(*(NativeBackend(compiled_for("native", level)) for level in ("-O3", "-O1")))


@pytest.mark.full
def test_a_wheels_library_has_the_bits_of_one_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is why the fingerprint names instructions: what else the processor has changes no bit."""
    require_compiler()
    own = find_kernels("native", torch.float32)
    assert own is not None
    name = next((variant.name for variant in VARIANTS if variant.instructions == own.instructions), "native")
    wheels = checked(compiled_for(name))
    assert wheels.instructions == own.instructions
    check_same_bits(own, wheels)
    tokens, sizes = list(range(3, 200)), [150, 1, 1, 5, 40]
    for numbers in FORMATS:
        by_own = logits_in_pieces(load(TARGET, numbers, "native"), tokens, sizes)
        with monkeypatch.context() as patch:
            patch.setattr(choosing, "find_kernels", lambda *_: wheels)
            assert torch.equal(logits_in_pieces(load(TARGET, numbers, "native"), tokens, sizes), by_own), numbers
