"""Compiles every kernel as it is launched, for GPUs that are not here: compile_kernels.py [--all] [ARCHITECTURE ...]

The operations are called with tensors without memory, and each launch is compiled to machine code instead, with its
warps, stages and specialised arguments. The machine code must not spill registers and a program's shared memory must
fit. This is a separate program, since the interpreter replaces the kernels in a process where it is switched on.
`--all` has every number format and head; without it, bfloat16 at the shape of Llama 3 8B.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction
from triton.runtime.driver import driver
from typing_extensions import override

from forerun.models.backends.gpu import groups, ops
from forerun.models.backends.gpu.backend import OneGemmLinear
from forerun.models.backends.gpu.experts import BY_ROWS, ExpertWeights, Pairs
from forerun.models.backends.gpu.fixed import Inputs, Shape
from forerun.models.backends.gpu.groups import GroupLinear, PackedExperts, PackedGroups
from forerun.models.backends.gpu.ops import TritonOps, load_kernels
from forerun.models.backends.gpu.tiles import SMALLEST, TILES, group_tiles
from forerun.models.config import read_config
from forerun.models.experts_config import Clamp
from forerun.models.layer import Attention, GatedMlp, Mlp, Router, StackedExperts
from kit.checkpoints import TARGET

SHARED = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes that a program may have: A100, H100 and H200, B200
MI300 = 942  # AMD's, which are compiled for where they are named
ALL_SHARED = SHARED | {MI300: 65_536}
WITHOUT_PRODUCTS = {"add_norm", "rotate_store", "activate", "join_splits", "choose_experts", "add_experts"}
HEADS = {64: (14, 2), 80: (32, 32), 96: (32, 32), 128: (32, 8), 256: (8, 4)}  # heads and key heads, by what they hold
GROUPS = {
    "INT4": (32, 128, False),
    "UINT4": (32, 128, True),
    "E2M1": (32, 128, False),
    "INT8": (64, 1, False),
    "E4M3": (64, 64, False),
}  # chunk, rows of scales, whether groups have a least value
READER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
FUSED = re.compile(r"fma\.rn(\.ftz)?\.f32")  # bfloat16 is added up by such instructions too, times one
USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
AMD_USAGE = ("vgpr_count", "private_segment_fixed_size")  # registers, and bytes that they spill


@dataclass(frozen=True)
class Launch:
    """The machine code of one launch."""

    kernel: str
    case: str
    architecture: int
    registers: int
    spilled_bytes: int
    shared_bytes: int

    @override
    def __str__(self) -> str:
        spills = self.spilled_bytes > 0 and self.architecture != MI300  # which is slow there and not tuned yet
        wrong = spills or self.shared_bytes > ALL_SHARED[self.architecture]
        return (
            f"{'WRONG' if wrong else 'fine'}: sm_{self.architecture} {self.kernel}, {self.case}: {self.registers} "
            f"registers, {self.spilled_bytes} bytes spilled, {self.shared_bytes} shared"
        )


class NoCard:
    """Takes the place of Triton's driver; a device's number is its architecture."""

    architecture = 90

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        amd = self.architecture == MI300
        return GPUTarget("hip", f"gfx{self.architecture}", 64) if amd else GPUTarget("cuda", self.architecture, 32)


class Compiling:
    """Takes the place of a module of kernels: a launch compiles, and is stored under the current case."""

    case = ""
    made: ClassVar[dict[tuple[str, str], Any]] = {}

    def __init__(self, name: str = "triton_kernels") -> None:
        self.module = load_kernels(name)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.module, name)
        return At(found) if isinstance(found, JITFunction) else found


@dataclass(frozen=True)
class At:
    """Takes the place of a kernel: a launch on any grid compiles."""

    function: Any

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            made = self.function.warmup(*arguments, grid=grid, **options)
            Compiling.made[self.function.__name__, Compiling.case] = made

        return launch


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def attention(kernels: Compiling, dtype: torch.dtype, head_dim: int) -> None:
    """Chains and trees; with a window, a cap and sinks, and without."""
    heads, kv_heads = HEADS[head_dim]
    query, (keys, values) = (
        meta(16, heads, head_dim, dtype=dtype),
        [meta(kv_heads, 1024 * 64 + 4, head_dim, dtype=dtype) for _ in range(2)],
    )
    for path, special in product((0, 16, None), (False, True)):
        shape = Shape(16, path or 0, 0, 8192, captured=path is not None)
        where = Inputs(shape, torch.device("meta")).key_map(64)
        if path is None:
            where = replace(where, num_runs=1)
        kind = "" if path == 0 else ", prompt" if path is None else ", tree"
        Compiling.case = f"{dtype}, heads of {head_dim}{kind}" + ", window, cap and sinks" * special
        extra = (300, meta(heads), 50.0) if special else (None, None, None)
        TritonOps(kernels).attend(query, keys, values, where, *extra)


def row_work(kernels: Compiling, dtype: torch.dtype, hidden: int, inner: int, head_dim: int) -> None:
    """Norms, rotation and activations of every kind."""
    ops, x, unread = TritonOps(kernels), meta(16, hidden, dtype=dtype), lambda x: x
    heads, kv_heads = HEADS[head_dim]
    gains = [None, meta(hidden, dtype=dtype)]
    for delta, gain, delta_gain in product((None, x), gains, gains):
        Compiling.case = f"{dtype}, adds {delta is not None}, norms {gain is not None} and {delta_gain is not None}"
        ops.add_norm(x, delta, gain, 1e-5, delta_gain if delta is not None else None)
    shape = replace(read_config(TARGET), heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    qkv, store = meta(16, (heads + 2 * kv_heads) * head_dim, dtype=dtype), meta(kv_heads, 4100, head_dim, dtype=dtype)
    turns, at = (meta(8192, head_dim),) * 2, (meta(16, dtype=torch.int32),) * 2
    for normed, joint in ((False, False), (True, False), (True, True)):
        Compiling.case = f"{dtype}, norms {normed}, as one {joint}"
        gain = meta(heads + kv_heads, head_dim, dtype=dtype) if normed else None
        ops.rotate_store(qkv, turns, at, Attention(None, unread, unread, gain, None, None, joint_norm=joint), shape,
                         (store, store))  # fmt: skip
    kinds = [(None, False, False), (None, True, False), (None, True, True), (None, False, True)]
    for clamp, gelu, plain in (*kinds, (Clamp(1.7, 7.0), False, False)):
        Compiling.case = f"{dtype}, clamp {clamp is not None}, gelu {gelu}, plain {plain}"
        ops.activate(meta(16, 2 * inner, dtype=dtype), GatedMlp(unread, unread, clamp, gelu, plain))


def products(kernels: Compiling, dtype: torch.dtype) -> None:
    """One matrix product with every tile size."""
    for tile, biased in product((SMALLEST, *TILES) if dtype == torch.bfloat16 else (SMALLEST,), (False, True)):
        Compiling.case = f"{dtype}, {tile}" + ", bias" * biased
        bias = meta(4096, dtype=dtype) if biased else None
        OneGemmLinear(kernels, meta(4096, 4096, dtype=dtype), bias).product(meta(144, 4096, dtype=dtype), tile)


def experts_in_groups(weight: PackedGroups, dtype: torch.dtype) -> None:
    """Products of 128 experts with such weights, with several numbers of outputs for all numbers of slices."""
    for outputs, rows in product((4096, 1 << 17), (16,) if dtype == torch.float32 else (16, 32)):
        numbers, scales = (
            meta(128, len(each), outputs, each.shape[2], dtype=each.dtype) for each in (weight.numbers, weight.scales)
        )
        stacked = replace(weight, numbers=numbers, scales=scales, least=None if weight.least is None else scales)
        pairs = Pairs(meta(64, dtype=torch.int32), meta(3 * 128, dtype=torch.int32), 128, 9, BY_ROWS[rows])
        Compiling.case = f"{dtype}, {weight.kind}, {rows} rows, experts of {outputs} outputs"
        PackedExperts(stacked, meta(128, outputs, dtype=dtype)).product(
            Compiling("triton_experts"), meta(8, weight.inputs, dtype=dtype), pairs, 8
        )


def grouped_products(dtype: torch.dtype) -> None:
    """Weights in groups of every kind: products, products of experts, and unpacking."""
    for kind, (size, groups_, least) in GROUPS.items():
        chunk, halves = (size, 1) if kind in ("INT8", "E4M3") else (32, 2)
        scales = meta(groups_ // halves or 1, 4096, halves, dtype=torch.float16 if halves == 2 else torch.float32)
        numbers = meta(4096 // chunk // halves, 4096, chunk, dtype=torch.uint8)
        weight = PackedGroups(numbers, scales, scales if least else None, kind, 4096)
        wide = dtype == torch.float32
        for tile in {*group_tiles(4096, wide), *group_tiles(1 << 20, wide, kind == "INT8")}:
            Compiling.case = f"{dtype}, {kind}, {tile.rows} rows, {tile.outputs} outputs, {tile.slices}, {tile.at_once}"
            layer = GroupLinear(weight, meta(4096, dtype=dtype), unpacks=False)
            layer.product(meta(tile.rows, 4096, dtype=dtype), tile)
        weight.unpacked(torch.bfloat16)
        experts_in_groups(weight, dtype)
    Compiling.case = f"{dtype}, one output"
    single = PackedGroups(meta(64, 1, 64, dtype=torch.uint8), meta(1, 1, 1), None, "INT8", 4096)
    GroupLinear(single, None, unpacks=False).product(
        meta(16, 4096, dtype=dtype), group_tiles(1, dtype == torch.float32)[0]
    )


def some_experts(kernels: Compiling, dtype: torch.dtype) -> None:
    """8 of 128 experts, for few rows and many; with biases, a bound and a gate, and without."""

    def layer(*shape: int) -> ExpertWeights:
        return ExpertWeights(meta(*shape, dtype=dtype), meta(*shape[:2], dtype=dtype) if special else None)

    for rows, special in product((16, 2048), (False, True)):
        Compiling.case = f"{dtype}, experts of {rows} rows" + ", biases, a bound and a gate" * special
        form = GatedMlp(unasked, unasked, Clamp(1.7, 7.0) if special else None)
        tiled = dtype == torch.bfloat16
        num_read = meta(1, dtype=torch.int64)
        stacked = StackedExperts(layer(128, 1536, 2048), layer(128, 2048, 768), form, tiled, num_read)
        mlp, x = Mlp(None, None, Router(unasked, 128, 8, special), stacked=stacked), meta(rows, 2048, dtype=dtype)
        logits, positions = meta(rows, 128 + special, dtype=dtype), meta(rows, dtype=torch.int32)
        TritonOps(kernels).experts(x, logits, positions, mlp, x if special else None)


def unasked(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("no linear layer is asked")


def all_launches(architecture: int, everything: bool) -> Iterator[Launch]:
    """All launches on a GPU of this kind, compiled; raises AssertionError for a fused product and sum."""
    NoCard.architecture, kernels = architecture, Compiling()
    Compiling.made = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float16) if everything else (torch.bfloat16,):
        for head_dim in HEADS if everything else (128,):
            attention(kernels, dtype, head_dim)
        row_work(kernels, dtype, 4096, 14336, 128)
        products(kernels, dtype)
        grouped_products(dtype)
        some_experts(kernels, dtype)
    if architecture == MI300:
        for (name, case), made in kernels.made.items():
            registers, spilled = (int(re.findall(rf"\.{key}: +(\d+)", made.asm["amdgcn"])[0]) for key in AMD_USAGE)
            yield Launch(name, case, architecture, registers, spilled, made.metadata.shared)
        return
    with tempfile.TemporaryDirectory() as folder:
        files = {key: Path(folder) / f"{i}.cubin" for i, key in enumerate(kernels.made)}
        for (name, case), made in kernels.made.items():
            files[name, case].write_bytes(made.asm["cubin"])
            if name in WITHOUT_PRODUCTS:
                assert not FUSED.search(made.asm["ptx"]), f"{name}, {case}: a product and a sum were made one"
        for (name, case), file in files.items():
            usage = subprocess.run([READER, "-res-usage", file], capture_output=True, text=True, check=True).stdout
            registers, spilled = map(int, USAGE.findall(usage)[0])
            yield Launch(name, case, architecture, registers, spilled, kernels.made[name, case].metadata.shared)


def main() -> int:
    everything, architectures = "--all" in sys.argv, [int(a) for a in sys.argv[1:] if a.isdigit()] or [*SHARED]
    driver.set_active(NoCard())
    if MI300 in architectures:
        torch.version.hip = "a build for AMD"  # by which the number of stages is chosen
    for module in (ops, groups):
        setattr(module, "load_kernels", Compiling)  # noqa: B010  # it is imported by name
    lines = [str(launch) for architecture in architectures for launch in all_launches(architecture, everything)]
    print("\n".join(sorted(lines, key=lambda line: line.startswith("WRONG"))))
    return int(any(line.startswith("WRONG") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
