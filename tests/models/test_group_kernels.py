"""Weights in groups on a GPU, in Triton's interpreter: numbers are those of the format, and rows independent."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from forerun.config import Quantization
from forerun.device import Placement
from forerun.models.backends.gpu import backend
from forerun.models.backends.gpu.backend import GpuBackend
from forerun.models.backends.gpu.experts import LibraryLinear
from forerun.models.backends.gpu.groups import (
    CHUNK,
    FLOATS,
    LONG_READ,
    GroupLinear,
    PackedExperts,
    PackedGroups,
    small_floats,
)
from forerun.models.backends.gpu.tiles import group_tiles
from forerun.models.backends.torch_cpu.grouped import GroupedWeight
from kit.interpreted import products  # noqa: F401 (a fixture)
from models.group_laws import (
    FORMS,
    OUTPUTS,
    check_numbers,
    check_products,
    check_products_of_experts,
    random_groups,
    rows_of,
)

CPU = torch.device("cpu")


@pytest.fixture(params=FORMS, ids=lambda form: "-".join(map(str, form)))
def form(request: pytest.FixtureRequest) -> tuple[str, int, int, bool]:
    return request.param


@pytest.mark.short("INT4-192-*", "UINT4-320-*", "INT8-96-*", "INT8-200-*", "INT8-48-*", "E4M3-256-*", "E2M1-*")
def test_unpacked_numbers_are_those_of_the_format(form: tuple[str, int, int, bool]) -> None:
    check_numbers(form, "cpu")
    weight = random_groups(*form)
    assert torch.equal(PackedGroups.of(weight, CPU).unpacked(torch.bfloat16).float(), cut(weight.dense()))


def cut(numbers: Tensor) -> Tensor:
    """Numbers as the interpreter makes bfloat16 of them, whose last bits it cuts off."""
    return (numbers.view(torch.int32) & -65536).view(torch.float32)


@pytest.mark.short("INT4-192-32-False-False", "UINT4-32-*-True", "INT8-200-*-True", "E2M1-*-False", "E4M3-20-*-True")
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_the_weights_and_its_rows_are_independent(
    form: tuple[str, int, int, bool], biased: bool
) -> None:
    check_products(form, biased, "cpu", torch.float32)


@pytest.mark.short("UINT4-320-*", "E2M1-*")
def test_rows_of_experts_have_the_bits_of_their_experts_layers(form: tuple[str, int, int, bool]) -> None:
    check_products_of_experts(form, True, "cpu", torch.float32)


@pytest.mark.parametrize(("kinds", "stays"), [
    ((FORMS[3], ("E2M1", 224, 32, False)), "INT8"), ((("INT4", 320, 32, False), FORMS[2]), "UINT4"),
    ((FORMS[12], FORMS[12]), "INT4"), ((FORMS[10], FORMS[14]), "INT8"), ((FORMS[7], ("INT8", 256, 32, False)), None),
])  # fmt: skip
def test_experts_of_different_formats_are_held_in_a_common_one(
    kinds: tuple[tuple[str, int, int, bool], ...], stays: str | None
) -> None:
    """One of them may have no numbers but zeros. Without a form in common they are unpacked."""
    groups = [random_groups(*form, seed=i) for i, form in enumerate(kinds)]
    if stays == "INT4":
        groups[1] = GroupedWeight(groups[1].numbers, groups[1].scales.bfloat16().float(), None, 4, 32)
    layers = [GroupLinear(PackedGroups.of(weight, CPU), None, unpacks=False) for weight in groups]
    made = backend.stack(layers, torch.float32)
    assert (made.weight.kind if isinstance(made, PackedExperts) else None) == stays
    for i, weight in enumerate(groups):
        one = made.of(i)
        assert isinstance(one, GroupLinear | LibraryLinear)
        found = one.weight.unpacked(torch.float32) if isinstance(one, GroupLinear) else one.weight
        rounds = 1e-6 if stays == "UINT4" else 0  # with least values numbers are counted from the least one
        assert (found - weight.dense()).abs().max() <= rounds * weight.dense().abs().max()


@pytest.mark.parametrize(
    ("quantize", "kind", "error"), [("int8", "INT8", 0.01), ("fp8", "E4M3", 0.04), ("int4", "INT4", 0.12)]
)
def test_weights_are_rounded_as_they_are_loaded(quantize: Quantization, kind: str, error: float) -> None:
    weight = rows_of(OUTPUTS, 200).bfloat16()
    layer = GpuBackend(Placement(CPU, fixed=True, one_gemm=True)).linear(weight, None, quantize)
    assert isinstance(layer, GroupLinear)
    assert layer.weight.kind == kind
    apart = (layer.weight.unpacked(torch.float32) - weight.float()).norm() / weight.float().norm()
    assert error / 3 < apart < error


def test_long_reads_use_unpacked_weights_unless_bits_must_be_equal() -> None:
    weight = random_groups(*FORMS[0])
    layer, x = GroupLinear(PackedGroups.of(weight, CPU), None, unpacks=True), rows_of(LONG_READ, FORMS[0][1])
    assert torch.equal(layer(x), functional.linear(x, weight.dense()))
    assert torch.equal(layer(x[:-1]), layer.product(x[:-1], group_tiles(OUTPUTS, True)[0]))


@pytest.mark.parametrize(("kind", "inputs", "size", "bits"), [
    ("INT4", 4096, 32, 4.5), ("UINT4", 4096, 32, 6), ("INT8", 4096, 4096, 8), ("E4M3", 4096, 128, 8.5),
    ("E2M1", 4096, 32, 4.5),
])  # fmt: skip
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_weights_take_the_memory_that_their_bits_need(
    kind: str, inputs: int, size: int, bits: float, half: torch.dtype
) -> None:
    weight = random_groups(kind, inputs, size, kind == "UINT4")
    if kind != "UINT4":
        small = 1e-6 if half == torch.bfloat16 else 1.0  # below what float16 has in full
        weight = GroupedWeight(weight.numbers, (small * weight.scales).to(half).float(), None, weight.bits, size)
    packed = PackedGroups.of(weight, CPU)
    held = sum(t.numel() * t.element_size() for t in (packed.numbers, packed.scales, packed.least) if t is not None)
    assert 8 * held / (OUTPUTS * inputs) == pytest.approx(bits, rel=0.01)
    assert packed.numbers.shape[2] <= CHUNK[8]


@pytest.mark.parametrize("quantize", ["int8", "fp8", "int4"])
def test_weights_are_rounded_a_few_rows_at_a_time_to_the_same_numbers(
    quantize: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a large head does not take several times its size for a moment, on a card that it fills."""
    weight, placement, seen = rows_of(OUTPUTS, 200).bfloat16(), Placement(CPU, fixed=True, one_gemm=True), list[int]()
    rounded = backend.QUANTIZERS[quantize]

    def watched(part: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(part.numel())
        return rounded(part)

    whole = GpuBackend(placement).linear(weight, None, quantize)
    monkeypatch.setattr(backend, "AT_ONCE", 1700)
    monkeypatch.setitem(backend.QUANTIZERS, quantize, watched)
    parts = GpuBackend(placement).linear(weight, None, quantize)
    assert isinstance(whole, GroupLinear)
    assert isinstance(parts, GroupLinear)
    assert max(seen) <= 1700
    assert torch.equal(parts.weight.numbers, whole.weight.numbers)
    assert torch.equal(parts.weight.scales, whole.weight.scales)


@pytest.mark.parametrize(("lowest", "highest"), [(-128, 128), (-12, 13)])
def test_integers_beyond_four_bits_are_held_in_eight(lowest: int, highest: int) -> None:
    every = torch.arange(lowest, highest, dtype=torch.int8)
    floats = small_floats(every[None])
    assert floats is None
    for number in every.tolist():
        codes = small_floats(torch.full((1, 3), number, dtype=torch.int8))
        assert (codes is not None) == (abs(number) in FLOATS)


def test_a_layer_is_launched_on_the_device_of_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current GPU, which trained heads do not set between passes."""
    there: list[Tensor] = []
    launched: list[bool] = []

    @contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        there.append(x)
        yield
        there.pop()

    def product(_layer: object, x: Tensor, *_tile: object) -> Tensor:
        launched.append(bool(there) and there[-1] is x)
        return x

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(GroupLinear, "product", product)
    monkeypatch.setattr(backend.OneGemmLinear, "product", product)
    of_groups, dense = (
        GpuBackend(Placement(CPU, fixed=True, one_gemm=True)).linear(rows_of(OUTPUTS, 64), None, quantize)
        for quantize in ("int8", None)
    )
    of_groups(rows_of(3, 64))
    dense(rows_of(3, 64))
    assert launched == [True, True]
