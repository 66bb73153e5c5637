"""Devices: where tensors live, how much memory is free there, and how host data gets there without waiting.

This file decides what "auto" means and which devices are available. On a CPU all of this is trivial. On a GPU the host
would wait for the device if it copied from ordinary memory or waited for a copy back, so copies use pinned memory and
run asynchronously.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.annotations import Float
from forerun.errors import DeviceUnavailable, InvalidRequest, OperatorMissing

HostArray = np.ndarray[Any, np.dtype[Any]]  # on the host, of any kind
DEVICES = ("auto", "cpu", "cuda", "rocm", "mps")
DEVICE_NAME = re.compile("(cpu)|(mps)(?::0)?|(cuda|rocm|hip)(?::([0-9]{1,4}))?")
OPERATOR = re.compile(r"'(aten::[\w.]+)'")  # as torch's errors name one
SUM_UNITS = 2.0**52
VECTOR = 8  # numbers that a GPU reads at once, at most
ALIGNED_BYTES = 16  # where tables begin in a common buffer: at addresses that vectors can be read from
NARROW: dict[np.dtype[Any], np.dtype[Any]] = {np.dtype(np.float64): np.dtype(np.float32)}
log = logging.getLogger(__name__)
DEVICE_VARIABLE = "FORERUN_DEVICE"  # what "auto" means, where it is set


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model runs, and how.

    `fixed`: passes have fixed shapes, so that a GPU can capture them as graphs; CPUs can run them too,
    slower. `one_gemm`: one configuration of the matrix product for any number of rows, so that a row's bits depend on
    the row alone. On CPUs that is always so.
    """

    device: torch.device
    fixed: bool = False
    one_gemm: bool = False

    @classmethod
    def of(cls, device: str | torch.device | Placement | None, one_gemm: bool = False) -> Placement:
        """The device called "cpu", "cuda", "cuda:1", ..., "rocm" (AMD's, which torch calls cuda), "mps" (Apple's), or
        the best that was tested ("auto"); None is the CPU.

        Raises InvalidRequest for what is not the name of a device or not for it, DeviceUnavailable for a device that is
        not there.
        """
        if device is None:
            return CPU
        if isinstance(device, Placement):
            return device
        name: object = device
        if isinstance(device, torch.device):
            name = "cpu" if device.type == "cpu" else str(device)  # a CPU's index says nothing
        if name == "auto":
            name = os.environ.get(DEVICE_VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
        match = DEVICE_NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise InvalidRequest("device", f"{name!r:.60} is not known: use {', '.join(DEVICES)}, or cuda:1 and so on.")
        kind, index = match[3], int(match[4] or 0)
        if match[1]:
            return CPU
        if match[2]:
            require_mps(one_gemm)
            return cls(torch.device("mps", 0), fixed=True)
        require_cuda(match[0], index, amd=kind != "cuda")
        return cls(torch.device("cuda", index), fixed=True, one_gemm=one_gemm)

    @property
    def graphs(self) -> bool:
        """Whether passes can be captured and replayed."""
        return self.device.type == "cuda"

    @property
    def holds_groups(self) -> bool:
        """Whether weights in groups of few bits are multiplied as they are, which takes kernels of ours."""
        return self.device.type != "mps"

    @property
    def same_bits(self) -> bool:
        """Whether a row's bits are promised to depend on the row alone, and drafted tokens with them."""
        return self.device.type == "cpu" or self.one_gemm

    @property
    def label(self) -> str:
        """What results depend on besides weights and versions: the processor, and the order of sums."""
        if self.device.type == "cpu":
            return torch.backends.cpu.get_cpu_capability() + ", fixed shapes" * self.fixed
        if self.device.type == "mps":
            return f"MPS, macOS {platform.mac_ver()[0]}"
        return torch.cuda.get_device_name(self.device) + ", one gemm" * self.one_gemm


CPU = Placement(torch.device("cpu"))


def require_cuda(name: str, index: int, amd: bool) -> None:
    """Raise DeviceUnavailable, with the reason, unless this GPU is there. Says in the log that AMD's are untested."""
    if amd and torch.version.hip is None:
        raise DeviceUnavailable(
            f"device {name!r}: this torch ({torch.__version__}) was built without ROCm; install a ROCm build of torch, "
            "or use --device cpu"
        )
    if not torch.backends.cuda.is_built():
        raise DeviceUnavailable(
            f"device {name!r}: this torch ({torch.__version__}) was built without CUDA; install a CUDA build of torch, "
            "or use --device cpu"
        )
    if index >= torch.cuda.device_count():
        raise DeviceUnavailable(
            f"device {name!r}: torch sees {torch.cuda.device_count()} GPUs; check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    if torch.version.hip is not None:
        say_untested(name)


def require_mps(one_gemm: bool) -> None:
    """Raise DeviceUnavailable unless torch has this device, InvalidRequest for what needs kernels of ours there."""
    if not torch.backends.mps.is_available():
        lacking = "has no such device on this machine" if torch.backends.mps.is_built() else "was built without MPS"
        raise DeviceUnavailable(f"device 'mps': this torch ({torch.__version__}) {lacking}; use --device cpu")
    if one_gemm:
        raise InvalidRequest("one_gemm", "True needs Triton, which device mps does not have: leave it out.")
    say_untested("mps")


@cache
def say_untested(name: str) -> None:
    """Tell the log, once."""
    log.warning("device %s: nobody has tested forerun on such devices; try forerun prove --device %s first", name, name)


@contextmanager
def operators_named() -> Iterator[None]:
    """Raises OperatorMissing where a device of torch lacks an operator that is asked for inside."""
    try:
        yield
    except NotImplementedError as error:
        raise lacking_operator(error) or error from error


def lacking_operator(error: BaseException) -> OperatorMissing | None:
    """The error that says what to do about torch's own, if that is about an operator which a device lacks."""
    match = OPERATOR.search(str(error)) if isinstance(error, NotImplementedError) else None
    return None if match is None else OperatorMissing(match[1])


@cache
def pins(device: torch.device) -> bool:
    """Whether copies to and from pinned memory run while the host goes on."""
    return device.type == "cuda"


def stages(most: int) -> int:
    """Stages of loads under way in a program: half as many on AMD's GPUs, whose programs share 64 KB."""
    return max(1, most // 2) if torch.version.hip else most


@cache
def has_doubles(device: torch.device) -> bool:
    """Whether the device computes in float64."""
    return device.type != "mps"


@cache
def is_cpu(device: torch.device) -> bool:
    """Whether this is the host's memory. `device.type` builds a string each time, which would slow down rounds."""
    return device.type == "cpu"


def running_sum(parts: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """The sums of each row's numbers, from 0 to 2, up to each column, with the same bits whatever rows stand beside it.

    A GPU's cumsum cuts a row by the number of rows, so it adds up integers there, in units of 2**-52.
    """
    if is_cpu(parts.device):
        return parts.cumsum(1)
    return whole_sums(parts)


def whole_sums(parts: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """`running_sum` by sums of integers, which have no order."""
    return (parts * SUM_UNITS).long().cumsum(1).to(parts.dtype) / SUM_UNITS


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, in bytes. MPS shares the host's, of which it recommends a part."""
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return torch.cuda.mem_get_info(device)[0]


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host numbers as a tensor on the device; the host does not wait for the copy."""
    if not pins(device) or not values:
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def overwrite(target: Tensor, numbers: Tensor) -> None:
    """Set a tensor to what a host tensor holds; the host does not wait for the copy."""
    if pins(target.device):
        target.copy_(numbers.pin_memory(), non_blocking=True)
    else:
        target.copy_(numbers)


def upload_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device; the host does not wait for the copy."""
    if not pins(device) or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class PackedTables:
    """Tensors of several kinds in one buffer of a device, so that they are filled in one copy.

    `tables` are views of the buffer, by name; `lines` the same places on the host. `room` gives the buffer, of so many
    bytes, if it is not to be one of their own; a fill sets all of it.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[Sequence[int], np.dtype[Any]]],
        device: torch.device,
        room: Callable[[int], Tensor] | None = None,
    ) -> None:
        if not has_doubles(device):
            shapes = {name: (shape, NARROW.get(dtype, dtype)) for name, (shape, dtype) in shapes.items()}
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values()]
        ends = list(itertools.accumulate(-(-size // ALIGNED_BYTES) * ALIGNED_BYTES for size in sizes))
        self.host = np.zeros(ends[-1] if ends else 0, np.uint8)
        room = room or partial(torch.empty, dtype=torch.uint8, device=device)
        self.flat = room(len(self.host))
        self.lines: dict[str, HostArray] = {}
        self.tables: dict[str, Tensor] = {}
        for (name, (shape, dtype)), first, size in zip(shapes.items(), [0, *ends], sizes, strict=False):
            self.lines[name] = self.host[first : first + size].view(dtype).reshape(shape)
            kind = torch.from_numpy(np.zeros(0, dtype)).dtype
            self.tables[name] = self.flat[first : first + size].view(kind).view(*shape)

    def fill(self, arrays: Mapping[str, HostArray | Sequence[int]]) -> None:
        """Set the first lines of each table; the host does not wait for the copy."""
        for name, array in arrays.items():
            self.lines[name][: len(array)] = array
        overwrite(self.flat, torch.from_numpy(self.host))


def upload_arrays(arrays: Mapping[str, HostArray], device: torch.device) -> Mapping[str, Tensor]:
    """Host arrays on the device, in one copy, for which the host does not wait."""
    if is_cpu(device):
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    packed = PackedTables({name: (array.shape, array.dtype) for name, array in arrays.items()}, device)
    packed.fill(arrays)
    return packed.tables


def softmax(logits: Float[Tensor, "rows vocab"], log: bool = False) -> Float[Tensor, "rows vocab"]:
    """Each row's softmax, or the logarithm of it, with the same bits wherever the row stands.

    A GPU begins a long row at the next address that vectors can be read from, so rows are padded to whole vectors.
    """
    vocab = logits.shape[1]
    whole = logits if is_cpu(logits.device) else pad(logits, (0, -vocab % VECTOR), value=-math.inf)
    return (whole.log_softmax(1) if log else whole.softmax(1))[:, :vocab]


class Download:
    """A tensor on its way to the host. `values` waits only if the device has not got that far: after the round's one
    synchronisation it has."""

    def __init__(self, tensor: Tensor) -> None:
        self.arrived: torch.cuda.Event | None = None
        if not pins(tensor.device):
            self.host = tensor.to("cpu", copy=True)
            return
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.host.copy_(tensor, non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record(torch.cuda.current_stream(tensor.device))

    @cached_property
    def values(self) -> list[Any]:
        """The tensor's numbers, nested as its dimensions are."""
        if self.arrived is not None:
            self.arrived.synchronize()
        numbers: list[Any] = self.host.numpy().tolist()
        return numbers


class DeviceSpan:
    """When a device began and ended some work that was sent to it, as its own events say."""

    def __init__(self, device: torch.device) -> None:
        self.began, self.ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.device = device
        self.began.record(torch.cuda.current_stream(device))

    @classmethod
    def begin(cls, device: torch.device) -> DeviceSpan | None:
        """From here on; None where work ends with its call."""
        return cls(device) if pins(device) else None

    def end(self) -> None:
        self.ended.record(torch.cuda.current_stream(self.device))

    @property
    def taken_s(self) -> float:
        """Seconds that the work took; the device must have ended it."""
        return float(self.began.elapsed_time(self.ended)) / 1000


class Captures:
    """What this process spent on capturing passes as graphs, which each pass needs once."""

    num = 0
    taken_s = 0.0
