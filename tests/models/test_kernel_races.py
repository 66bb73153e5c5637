"""Programs of a kernel are independent: any order gives the same bits, and none reads or writes what another writes.

Triton's interpreter runs a launch's programs one after the other. Here they run in random order, and every address
that a program reads or writes is recorded: on a GPU they run at the same time.
"""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("the kernels need triton, which is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("the interpreter takes the kernels' place in its process", allow_module_level=True)
import random
from dataclasses import replace
from itertools import product

import numpy as np
import triton
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, interpreter_builder

from forerun.models.backends.gpu import triton_kernels
from forerun.models.backends.gpu.backend import OneGemmLinear
from forerun.models.backends.gpu.groups import GroupLinear, PackedGroups
from forerun.models.backends.gpu.ops import TritonOps
from forerun.models.backends.gpu.tiles import TILES
from forerun.models.backends.torch_cpu.grouped import GroupedWeight
from kit.interpreted import products  # noqa: F401 (a fixture)
from models.group_laws import check_products_of_experts
from models.kernel_laws import (
    check_activations,
    check_norms,
    check_rotation,
    check_tiles_of_experts,
    random_case,
    scattered,
)

Place = tuple[int, int, int]


class Watch:
    """The addresses that the programs of a launch access, and the order in which they run."""

    def __init__(self) -> None:
        self.dice: random.Random | None = None  # without it they come in their own order
        self.order: Iterator[Place] = iter(())
        self.here: Place = (0, 0, 0)
        self.readers: dict[int, set[Place]] = {}
        self.writers: dict[int, Place] = {}
        self.kernels: set[str] = set()

    def begin(self, sizes: Place) -> None:
        places: list[Place] = [*product(range(sizes[0]), range(sizes[1]), range(sizes[2]))]
        if self.dice is not None:
            self.dice.shuffle(places)
        self.order = iter(places)
        self.readers, self.writers = {}, {}

    def read(self, addresses: list[int]) -> None:
        for address in addresses:
            self.readers.setdefault(address, set()).add(self.here)

    def write(self, addresses: list[int]) -> None:
        for address in addresses:
            other = self.writers.setdefault(address, self.here)
            assert other == self.here, f"programs {other} and {self.here} write the same number"

    def end(self, name: str) -> None:
        self.kernels.add(name)
        for address, writer in self.writers.items():
            others = self.readers.get(address, set()) - {writer}
            assert not others, f"{name}: program {writer} writes what {min(others)} reads"


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Programs run in the watch's order, and it records their accesses."""
    seen = Watch()
    set_dim, set_idx = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
    load, store, call = (
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
        GridExecutor.__call__,
    )

    def touched(pointers, mask) -> list[int]:
        return np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)].tolist()

    def set_grid_dim(x: int, y: int, z: int) -> None:
        set_dim(x, y, z)
        seen.begin((x, y, z))

    def set_grid_idx(*_: int) -> None:
        seen.here = next(seen.order)
        set_idx(*seen.here)

    def create_masked_load(self, pointers, mask, *rest):
        seen.read(touched(pointers, mask))
        return load(self, pointers, mask, *rest)

    def create_masked_store(self, pointers, value, mask, *rest):
        seen.write(touched(pointers, mask))
        return store(self, pointers, value, mask, *rest)

    def run(self, *arguments, **options):
        call(self, *arguments, **options)
        seen.end(self.fn.__name__)

    monkeypatch.setattr(interpreter_builder, "set_grid_dim", set_grid_dim, raising=False)
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_grid_idx, raising=False)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", create_masked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", create_masked_store)
    monkeypatch.setattr(GridExecutor, "__call__", run)
    return seen


def everything() -> list[torch.Tensor]:
    """The results of every kernel, for random trees in ragged batches and every kind of row operation."""
    ops, noise = TritonOps(triton_kernels), torch.Generator().manual_seed(0)
    cases = [
        random_case(1, lengths=(0, 5, 300)),
        random_case(2, heads=3, kv_heads=3, head_dim=24, window=7, lengths=(20,)),
        scattered(random_case(3, heads=4, kv_heads=1, lengths=(250, 17), branching=0.0), 3),
    ]
    found = [case.attended(ops) for case in cases]
    chains = random_case(3, heads=4, kv_heads=1, lengths=(250, 17), branching=0.0)
    runs = replace(chains, where=replace(chains.where, num_runs=int((chains.where.counts > 0).sum())))
    found.append(runs.attended(ops))
    numbers = torch.randint(-8, 8, (40, 192), generator=noise).to(torch.int8)
    weight = PackedGroups.of(GroupedWeight(numbers, torch.randn(40, 6, generator=noise), None, 4, 32), numbers.device)
    found += [
        GroupLinear(weight, None, unpacks=False)(torch.randn(33, 192, generator=noise)),
        weight.unpacked(torch.float32),
    ]
    for tile in TILES[:2]:
        layer = OneGemmLinear(triton_kernels, torch.randn(70, 200, generator=noise))
        found.append(layer.product(torch.randn(33, 200, generator=noise), tile))
    for law in (check_norms, check_rotation, check_activations):
        law(ops, "cpu", torch.float32, 1e-5)
    check_tiles_of_experts(ops, "cpu", torch.float32, 40)
    check_products_of_experts(("INT4", 64, 32, False), True, "cpu", torch.float32)
    return found


@pytest.mark.full
def test_programs_give_the_same_bits_in_any_order_and_share_no_written_address(watch: Watch) -> None:
    wanted = everything()
    watch.dice = random.Random(0)
    assert all(map(torch.equal, everything(), wanted))
    watched = {"attend_splits", "join_splits", "add_norm", "rotate_store", "activate", "one_gemm", "group_gemm"}
    watched |= {"choose_experts", "sort_by_expert", "expert_gemm", "group_expert_gemm", "add_experts"}
    assert watched <= watch.kernels


@triton.jit
def running(x, out, SIZE: tl.constexpr):
    """Wrong: a program adds to what the one before it wrote."""
    i = tl.program_id(0)
    before = tl.load(out + i - 1, mask=i > 0, other=0.0)
    tl.store(out + i, before + tl.load(x + i))


@triton.jit
def crowded(x, out, SIZE: tl.constexpr):
    """Wrong: all programs write one number."""
    tl.store(out, tl.load(x + tl.program_id(0)))


@pytest.mark.parametrize(("kernel", "message"), [(running, "writes what"), (crowded, "write the same number")])
def test_programs_that_share_a_written_address_are_found(watch: Watch, kernel, message: str) -> None:
    x, out = torch.ones(6), torch.zeros(6)
    with pytest.raises(Exception, match=message):
        kernel[(6,)](x, out, SIZE=6)


def test_an_order_that_matters_is_found(watch: Watch) -> None:
    watch.end = lambda name: None  # type: ignore[method-assign]
    watch.dice = random.Random(0)
    x, out = torch.ones(6), torch.zeros(6)
    running[(6,)](x, out, SIZE=6)
    assert not torch.equal(out, torch.arange(1.0, 7.0))
