"""Weights in groups on a GPU, in Triton's interpreter: they are what they stand for, and rows are strangers."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from forerun.models.backends.gpu.groups import CHUNK, LONG_READ, ROWS, GroupLinear, PackedGroups
from forerun.models.backends.torch_cpu.grouped import GroupedWeight
from kit.interpreted import products  # noqa: F401 (a fixture)

CPU = torch.device("cpu")
OUTPUTS = 40  # more than a program's, and no multiple of them
# kind, inputs, inputs of a group, whether groups have a least value
FORMS = [
    ("INT4", 192, 32, False), ("INT4", 352, 32, False), ("UINT4", 320, 32, True), ("INT8", 224, 32, False),
    ("INT8", 96, 16, False), ("INT8", 160, 32, True), ("INT8", 200, 200, False), ("E4M3", 256, 128, False),
    ("E4M3", 150, 150, False), ("E2M1", 128, 32, False),
]  # fmt: skip


def random_groups(kind: str, inputs: int, size: int, has_least: bool) -> GroupedWeight:
    """Every number that the kind has, with scales that float16 does not all have."""
    noise = torch.Generator().manual_seed(inputs + size)
    low, high = {"INT4": (-8, 8), "UINT4": (0, 16)}.get(kind, (-128, 128))
    numbers = torch.randint(low, high, (OUTPUTS, inputs), generator=noise).to(torch.int8)
    if kind == "E4M3":
        numbers = torch.where((numbers.view(torch.uint8) & 127) == 127, 0, numbers).view(torch.float8_e4m3fn)
    if kind == "E2M1":
        whole = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
        numbers = whole[torch.randint(0, len(whole), (OUTPUTS, inputs), generator=noise)]
    scales, least = torch.randn(2, OUTPUTS, inputs // size, generator=noise)
    bits = 4 if kind in ("INT4", "UINT4") else 8
    return GroupedWeight(numbers, scales if kind != "INT8" else scales.half().float(), least if has_least else None,
                         bits, size)  # fmt: skip


@pytest.fixture(params=FORMS, ids=lambda form: "-".join(map(str, form)))
def form(request: pytest.FixtureRequest) -> tuple[str, int, int, bool]:
    return request.param  # type: ignore[no-any-return]


def rows_of(count: int, inputs: int) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))


def test_numbers_are_what_they_stand_for(form: tuple[str, int, int, bool]) -> None:
    weight = random_groups(*form)
    packed = PackedGroups.of(weight, CPU)
    assert packed.kind == form[0]
    assert torch.equal(packed.unpacked(torch.float32), weight.dense())
    assert torch.equal(packed.unpacked(torch.bfloat16).float(), cut(weight.dense()))


def cut(numbers: Tensor) -> Tensor:
    """Numbers as the interpreter makes bfloat16 of them, whose last bits it cuts off."""
    return (numbers.view(torch.int32) & -65536).view(torch.float32)


@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_the_weights_and_its_rows_are_strangers(
    form: tuple[str, int, int, bool], biased: bool
) -> None:
    weight = random_groups(*form)
    bias = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(1)) if biased else None
    layer, x = GroupLinear(PackedGroups.of(weight, CPU), bias, unpacks=False), rows_of(35, form[1])
    together = layer(x)
    wanted = functional.linear(x.double(), weight.dense().double(), None if bias is None else bias.double())
    assert (together - wanted).norm() <= 1e-6 * wanted.norm()
    for tile in ROWS:
        assert torch.equal(layer.product(x, tile), together)
    for row in (0, 16, 34):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])


def test_long_reads_are_multiplied_unpacked_where_no_bits_are_promised() -> None:
    weight = random_groups(*FORMS[0])
    layer, x = GroupLinear(PackedGroups.of(weight, CPU), None, unpacks=True), rows_of(LONG_READ, FORMS[0][1])
    assert torch.equal(layer(x), functional.linear(x, weight.dense()))
    assert torch.equal(layer(x[:-1]), layer.product(x[:-1], ROWS[-1]))


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
