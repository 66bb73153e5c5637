"""Laws of products of weights in groups, for any device: in Triton's interpreter on a CPU, and on a GPU."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from forerun.models.backends.gpu.experts import sorted_pairs
from forerun.models.backends.gpu.groups import GroupLinear, PackedExperts, PackedGroups
from forerun.models.backends.gpu.ops import load_kernels
from forerun.models.backends.gpu.tiles import group_tiles
from forerun.models.backends.torch_cpu.grouped import GroupedWeight
from forerun.models.layer import GatedMlp, Router, StackedExperts

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


def random_groups(kind: str, inputs: int, size: int, has_least: bool, seed: int = 0) -> GroupedWeight:
    """Every number of the kind, with scales some of which float16 cannot represent."""
    noise = torch.Generator().manual_seed(inputs + size + 1000 * seed)
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
    """Unpacked numbers are those of the format to the bit, and so are products with rows that have one number each."""
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
    """A product is that of the weights up to rounding, and its rows are independent, in tiles of any size."""
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


class Tiled(PackedExperts):
    """Experts whose tiles have as many rows as a test says."""

    rows = 16

    @override
    def tile_rows(self, average: float) -> int:
        return self.rows


def check_products_of_experts(form: tuple[str, int, int, bool], biased: bool, device: str, dtype: torch.dtype) -> None:
    """Every row has the bits of its expert's own layer, in tiles of any rows: those of the weights, up to rounding.

    Many rows choose one expert, one expert has no rows, and rows of no expert are left as they are.
    """
    count, active, wide, noise = 5, 2, dtype == torch.float32, torch.Generator().manual_seed(1)
    biases = torch.randn(count, OUTPUTS, generator=noise).to(device, dtype)
    groups = [PackedGroups.of(random_groups(*form, seed=i), torch.device(device)) for i in range(count)]
    layers = [GroupLinear(weight, bias if biased else None, False) for weight, bias in zip(groups, biases, strict=True)]
    stack = Tiled.of_layers(layers)
    assert isinstance(stack, Tiled)
    x = rows_of(24, form[1]).to(device, dtype)
    chosen = torch.stack([torch.randperm(count - 1, generator=noise)[:active] for _ in x]).to(device, torch.int32)
    chosen[:, 0] = torch.where(torch.arange(24, device=device) % 4 == 0, chosen[:, 0], 4)
    chosen[chosen == 3] = count  # no expert's
    kernels, inactive = load_kernels("triton_experts"), GatedMlp(layers[0], layers[0])
    for Tiled.rows in (16,) if wide else (16, 32):
        stacked = StackedExperts(stack, stack, inactive, tiled=True)
        pairs = sorted_pairs(kernels, chosen, Router(layers[0], count, active, True), stacked)
        assert pairs.tile.rows == Tiled.rows
        found = stack.product(kernels, x, pairs, active).unflatten(0, (-1, active))
        for expert, layer in enumerate(layers):
            mine, alone = chosen == expert, layer(x)
            assert bool(mine.any()) == (expert != 3)
            assert torch.equal(found[mine], alone[:, None].expand(-1, active, -1)[mine])
            assert torch.equal(stack.of(expert)(x[:1]), alone[:1])
            dense = random_groups(*form, seed=expert).dense().double().to(device)
            wanted = functional.linear(x.double(), dense, biases[expert].double() if biased else None)
            assert (alone.double() - wanted).norm() <= (1e-6 if wide else 3e-3) * wanted.norm()
