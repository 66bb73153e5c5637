"""Weights in groups on a GPU, in Triton's interpreter: they are what they stand for, and rows are strangers."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from forerun.device import Placement
from forerun.models.backends.gpu.backend import GpuBackend
from forerun.models.backends.gpu.groups import CHUNK, LONG_READ, ROWS, GroupLinear, PackedGroups
from forerun.models.backends.torch_cpu.grouped import GroupedWeight
from kit.interpreted import products  # noqa: F401 (a fixture)
from models.group_laws import FORMS, OUTPUTS, check_numbers, check_products, random_groups, rows_of

CPU = torch.device("cpu")


@pytest.fixture(params=FORMS, ids=lambda form: "-".join(map(str, form)))
def form(request: pytest.FixtureRequest) -> tuple[str, int, int, bool]:
    return request.param  # type: ignore[no-any-return]


def test_numbers_are_what_they_stand_for(form: tuple[str, int, int, bool]) -> None:
    check_numbers(form, "cpu")
    weight = random_groups(*form)
    assert torch.equal(PackedGroups.of(weight, CPU).unpacked(torch.bfloat16).float(), cut(weight.dense()))


def cut(numbers: Tensor) -> Tensor:
    """Numbers as the interpreter makes bfloat16 of them, whose last bits it cuts off."""
    return (numbers.view(torch.int32) & -65536).view(torch.float32)


@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_the_weights_and_its_rows_are_strangers(
    form: tuple[str, int, int, bool], biased: bool
) -> None:
    check_products(form, biased, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("quantize", "kind", "error"), [("int8", "INT8", 0.01), ("fp8", "E4M3", 0.04), ("int4", "INT4", 0.12)]
)
def test_weights_are_rounded_as_they_are_loaded(quantize: str, kind: str, error: float) -> None:
    weight = rows_of(OUTPUTS, 200).bfloat16()
    layer = GpuBackend(Placement(CPU, fixed=True, one_gemm=True)).linear(weight, None, quantize)
    assert isinstance(layer, GroupLinear)
    assert layer.weight.kind == kind
    apart = (layer.weight.unpacked(torch.float32) - weight.float()).norm() / weight.float().norm()
    assert error / 3 < apart < error


def test_long_reads_are_multiplied_unpacked_where_no_bits_are_promised() -> None:
    weight = random_groups(*FORMS[0])
    layer, x = GroupLinear(PackedGroups.of(weight, CPU), None, unpacks=True), rows_of(LONG_READ, FORMS[0][1])
    assert torch.equal(layer(x), functional.linear(x, weight.dense()))
    assert torch.equal(layer(x[:-1]), layer.product(x[:-1], ROWS[0]))


@pytest.mark.parametrize(("kind", "inputs", "size", "bits"), [
    ("INT4", 4096, 32, 4.5), ("UINT4", 4096, 32, 6), ("INT8", 4096, 4096, 8), ("E4M3", 4096, 128, 8.25),
    ("E2M1", 4096, 32, 4.5),
])  # fmt: skip
def test_weights_take_the_memory_that_their_bits_need(kind: str, inputs: int, size: int, bits: float) -> None:
    weight = random_groups(kind, inputs, size, kind == "UINT4")
    if kind != "UINT4":
        weight = GroupedWeight(weight.numbers, weight.scales.half().float(), None, weight.bits, size)
    packed = PackedGroups.of(weight, CPU)
    held = sum(t.numel() * t.element_size() for t in (packed.numbers, packed.scales, packed.least) if t is not None)
    assert 8 * held / (OUTPUTS * inputs) == pytest.approx(bits, rel=0.01)
    assert packed.numbers.shape[2] <= CHUNK[8]
