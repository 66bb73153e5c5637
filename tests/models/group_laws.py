"""What products of weights in groups must be, for any device: in Triton's interpreter on a CPU, and on a GPU."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from forerun.models.backends.gpu.groups import GroupLinear, PackedGroups
from forerun.models.backends.gpu.tiles import group_tiles
from forerun.models.backends.torch_cpu.grouped import GroupedWeight

OUTPUTS = 40  # more than a program's, and no multiple of them
MANY_OUTPUTS = 1 << 20  # of layers with fewer slices
# kind, inputs, inputs of a group, whether groups have a least value
FORMS = [
    ("INT4", 192, 32, False), ("INT4", 352, 32, False), ("UINT4", 320, 32, True), ("INT8", 224, 32, False),
    ("INT8", 96, 16, False), ("INT8", 160, 32, True), ("INT8", 200, 200, False), ("E4M3", 256, 128, False),
    ("E4M3", 150, 150, False), ("E2M1", 128, 32, False),
    ("INT8", 48, 48, False), ("E4M3", 20, 20, False), ("INT4", 64, 32, False), ("UINT4", 32, 32, True),
    ("INT8", 48, 48, True), ("INT8", 136, 136, True),
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
    scales = scales.half().float() if kind == "INT8" else scales
    return GroupedWeight(numbers, scales, least if has_least else None, bits, size)


def rows_of(count: int, inputs: int) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))


def check_numbers(form: tuple[str, int, int, bool], device: str) -> None:
    """Unpacked they are what they stand for, to the bit; and so they are multiplied: by rows with one number each."""
    weight = random_groups(*form)
    packed = PackedGroups.of(weight, torch.device(device))
    assert packed.kind == form[0]
    assert torch.equal(packed.unpacked(torch.float32).cpu(), weight.dense())
    if form[3]:
        return  # a least value is added to numbers, and that is rounded
    ones = replace(weight, scales=torch.ones_like(weight.scales))
    layer = GroupLinear(PackedGroups.of(ones, torch.device(device)), None, unpacks=False)
    x = torch.eye(form[1], device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    assert torch.equal(layer(x).float().cpu(), ones.dense().T)


def check_products(form: tuple[str, int, int, bool], biased: bool, device: str, dtype: torch.dtype) -> None:
    """A product is that of the weights, up to rounding, and its rows are strangers, in tiles of any size."""
    weight, noise = random_groups(*form), torch.Generator().manual_seed(1)
    bias = torch.randn(OUTPUTS, generator=noise).to(device, dtype) if biased else None
    layer = GroupLinear(PackedGroups.of(weight, torch.device(device)), bias, unpacks=False)
    x, wide = rows_of(70, form[1]).to(device, dtype), dtype == torch.float32
    together, dense = layer(x), weight.dense().double().to(device)
    wanted = functional.linear(x.double(), dense, None if bias is None else bias.double())
    held = wide and device != "cpu"  # the interpreter has room for every tile
    for tiles in (group_tiles(OUTPUTS, held, form[0] == "INT8"), group_tiles(MANY_OUTPUTS, held, form[0] == "INT8")):
        first, *others = [layer.product(x, tile) for tile in tiles]
        assert (first.double() - wanted).norm() <= (1e-6 if wide else 3e-3) * wanted.norm()
        assert all(torch.equal(other, first) for other in others)
        assert torch.equal(together, first) or tiles[0].slices != group_tiles(OUTPUTS, wide)[0].slices
    for row in (0, 16, 69):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])
