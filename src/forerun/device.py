"""Devices: where tensors live, how much memory is free there, and how host data gets there without waiting.

This file decides what "auto" means and which devices are available. On a GPU, copies use pinned memory and run
asynchronously, because the host would otherwise wait for the device.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.annotations import Float
from forerun.errors import DeviceUnavailable, InvalidRequest, OperatorMissing

HostArray = np.ndarray[Any, np.dtype[Any]]
DEVICES = ("auto", "cpu", "cuda", "rocm", "mps")
DEVICE_NAME = re.compile("(cpu)|(mps)(?::0)?|(cuda|rocm|hip)(?::([0-9]{1,4}))?")
OPERATOR = re.compile(r"'(aten::[\w.]+)'")  # an operator's name in torch's error messages
SUM_UNITS = 2.0**52
VECTOR = 8  # the most numbers that a GPU reads at once
ALIGNED_BYTES = 16  # alignment of tables in a common buffer, so that they can be read in vectors
NARROW: dict[np.dtype[Any], np.dtype[Any]] = {np.dtype(np.float64): np.dtype(np.float32)}
log = logging.getLogger(__name__)
DEVICE_VARIABLE = "FORERUN_DEVICE"  # environment variable with the device that "auto" selects


@dataclass(frozen=True, slots=True)
class Placement:
    """The device on which a model runs, and how it computes.

    `fixed`: passes have fixed shapes, so that a GPU can capture them as graphs; CPUs can run them too, but slower.
    `one_gemm`: one configuration of the matrix product for any number of rows, so that a row's bits do not depend on
    the other rows; on CPUs they never do.
    """

    device: torch.device
    fixed: bool = False
    one_gemm: bool = False

    @classmethod
    def of(cls, device: str | torch.device | Placement | None, one_gemm: bool = False) -> Placement:
        """The placement on a device: "cpu", "cuda", "cuda:1", ..., "rocm" (AMD GPUs, which torch calls cuda), "mps"
        (Apple GPUs), or "auto": cuda if available, else cpu. None is the CPU.

        Raises InvalidRequest for an unknown name or an option that the device does not support, DeviceUnavailable for a
        device that does not exist here.
        """
        if device is None:
            return CPU
        if isinstance(device, Placement):
            return device
        name: object = device
        if isinstance(device, torch.device):
            name = "cpu" if device.type == "cpu" else str(device)  # without a CPU's index, which has no meaning
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
        """Whether grouped quantized weights are multiplied without unpacking, which needs forerun's own kernels."""
        return self.device.type != "mps"

    @property
    def same_bits(self) -> bool:
        """Whether a row's bits are guaranteed not to depend on the other rows of a batch."""
        return self.device.type == "cpu" or self.one_gemm

    @property
    def label(self) -> str:
        """Everything about the device on which results depend: the processor, and the order of sums."""
        if self.device.type == "cpu":
            return torch.backends.cpu.get_cpu_capability() + ", fixed shapes" * self.fixed
        if self.device.type == "mps":
            return f"MPS, macOS {platform.mac_ver()[0]}"
        return torch.cuda.get_device_name(self.device) + ", one gemm" * self.one_gemm


CPU = Placement(torch.device("cpu"))


def require_cuda(name: str, index: int, amd: bool) -> None:
    """Raise DeviceUnavailable, with the reason, unless this GPU is available. Logs a warning for AMD GPUs."""
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
        warn_untested(name)


def require_mps(one_gemm: bool) -> None:
    """Raise DeviceUnavailable unless torch supports MPS here, InvalidRequest if `one_gemm`, which needs Triton."""
    if not torch.backends.mps.is_available():
        lacking = "has no such device on this machine" if torch.backends.mps.is_built() else "was built without MPS"
        raise DeviceUnavailable(f"device 'mps': this torch ({torch.__version__}) {lacking}; use --device cpu")
    if one_gemm:
        raise InvalidRequest("one_gemm", "True needs Triton, which does not support device mps: leave it out.")
    warn_untested("mps")


@cache
def warn_untested(name: str) -> None:
    """Log, once, that forerun was not tested on such a device."""
    log.warning("device %s: forerun was not tested on such devices; run forerun prove --device %s first", name, name)


def lacking_operator(error: BaseException) -> OperatorMissing | None:
    """The OperatorMissing error for an error of torch about an operator that a device lacks; None for other errors."""
    match = OPERATOR.search(str(error)) if isinstance(error, NotImplementedError) else None
    return None if match is None else OperatorMissing(match[1])


@cache
def pins(device: torch.device) -> bool:
    """Whether copies to and from pinned memory are asynchronous."""
    return device.type == "cuda"


def stages(most: int) -> int:
    """The number of pipeline stages of loads in a GPU program: half on AMD GPUs, whose shared memory has 64 KB."""
    return max(1, most // 2) if torch.version.hip else most


def all_registers(num_warps: int) -> dict[str, int]:
    """The option by which the threads of a GPU program may have all registers; AMD's compiler has no such option."""
    return {} if torch.version.hip else {"maxnreg": min(255, 65_536 // (32 * num_warps))}


@cache
def has_doubles(device: torch.device) -> bool:
    """Whether the device computes in float64."""
    return device.type != "mps"


@cache
def is_cpu(device: torch.device) -> bool:
    """Whether the device is the CPU. Cached, since `device.type` builds a string each time, which slows down rounds."""
    return device.type == "cpu"


def running_sum(parts: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """The cumulative sums of each row, with bits that do not depend on the other rows. Numbers are from 0 to 2.

    A GPU's cumsum splits rows depending on their number, so on GPUs integers are summed, in units of 2**-52.
    """
    if is_cpu(parts.device):
        return parts.cumsum(1)
    return whole_sums(parts)


def whole_sums(parts: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """`running_sum` by sums of integers, whose result does not depend on the order."""
    return (parts * SUM_UNITS).long().cumsum(1).to(parts.dtype) / SUM_UNITS


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, in bytes. On MPS, which shares the host's memory, the rest of the recommended limit."""
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return torch.cuda.mem_get_info(device)[0]


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host numbers as a tensor on the device; the host does not wait for the copy."""
    if not pins(device) or not values:
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def overwrite(target: Tensor, numbers: Tensor) -> None:
    """Copy a host tensor into `target`; the host does not wait for the copy."""
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
    """Tensors of several dtypes in one buffer of a device, so that one copy fills all of them.

    `tables` are views of the buffer, by name; `lines` are the corresponding views of its host copy. `room` allocates
    the buffer, given its size in bytes; by default it is a new tensor.
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
        """Set the first lines of these tables and copy the entire buffer; the host does not wait for the copy."""
        for name, array in arrays.items():
            self.lines[name][: len(array)] = array
        overwrite(self.flat, torch.from_numpy(self.host))


def upload_arrays(arrays: Mapping[str, HostArray], device: torch.device) -> Mapping[str, Tensor]:
    """Host arrays on the device, by one copy; the host does not wait for it."""
    if is_cpu(device):
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    packed = PackedTables({name: (array.shape, array.dtype) for name, array in arrays.items()}, device)
    packed.fill(arrays)
    return packed.tables


def softmax(logits: Float[Tensor, "rows vocab"], log: bool = False) -> Float[Tensor, "rows vocab"]:
    """Each row's softmax or its logarithm, with bits that do not depend on the row's position.

    A GPU reads a long row in vectors from the next aligned address on, so rows are padded to a multiple of VECTOR.
    """
    vocab = logits.shape[1]
    padded = logits if is_cpu(logits.device) else pad(logits, (0, -vocab % VECTOR), value=-math.inf)
    return (padded.log_softmax(1) if log else padded.softmax(1))[:, :vocab]


class Download:
    """An asynchronous copy of a tensor to the host; `values` waits for it."""

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
        """The tensor's numbers as nested lists."""
        if self.arrived is not None:
            self.arrived.synchronize()
        numbers: list[Any] = self.host.numpy().tolist()
        return numbers


class DeviceSpan:
    """The time span of some work on a device, measured by the device's events."""

    def __init__(self, device: torch.device) -> None:
        self.began, self.ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.device = device
        self.began.record(torch.cuda.current_stream(device))

    @classmethod
    def begin(cls, device: torch.device) -> DeviceSpan | None:
        """A span that starts now; None for a CPU, which works synchronously."""
        return cls(device) if pins(device) else None

    def end(self) -> None:
        self.ended.record(torch.cuda.current_stream(self.device))

    @property
    def taken_s(self) -> float:
        """Duration of the work in seconds; the work must be finished."""
        return float(self.began.elapsed_time(self.ended)) / 1000


class Captures:
    """How many CUDA graphs this process has captured, and the time that it took."""

    num = 0
    taken_s = 0.0
