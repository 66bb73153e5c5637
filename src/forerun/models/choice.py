"""The choice of a CPU backend: compiled kernels or torch's operators, in 16 bits or float32, by measured times.

All passes of a model run on one backend in one dtype, since a draft token must get the same bits as the same token in a
prompt. The choice is made when the model is loaded, by the times of its linear layers, whose weights are nearly all of
the memory that a pass reads. Small models are not measured: calls dominate their passes, and the compiled kernels need
only one for all layers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from forerun import __version__
from forerun.annotations import ProgressCallback
from forerun.config import KernelChoice, Quantization
from forerun.machine import Neighbours, disturbance, disturbs, order_of_sums
from forerun.models.backends.base import Backend
from forerun.models.backends.native_check import find_kernels
from forerun.models.backends.torch_cpu.backend import TorchBackend
from forerun.models.backends.torch_cpu.linear import PackedLinear, packing_available, trusted_rows
from forerun.models.config import ModelConfig
from forerun.models.layer import Linear
from forerun.models.projections import products
from forerun.models.rows import MIN_ROWS
from forerun.store import cache_folder, keep_measured, read_measured

ROWS = (1, 4, 8, 64)  # rows of the timed passes: plain, drafted, a batch or a tree, a prompt chunk
PASSES = (32, 32, 32, 4)  # passes of each kind in a typical answer: 256 prompt tokens, then 96 rounds
SMALL_BYTES = 64 << 20  # models with fewer bytes, in float32, fit into a processor's caches
SAMPLE_WEIGHTS = 1 << 22  # a layer is timed with about this many of its weights: all inputs, fewer outputs
COPIES = 4  # copies of a sample layer, used in turn, so that weights come from memory as in a pass
TURNS = 5  # repetitions; the shortest time counts, since other programs only make times longer
TRIES = 2  # attempts if other programs disturb a measurement
ADVANTAGE = 1.1  # the speedup from which another backend replaces the preferred one

MeasuredTimes = Mapping["BackendKind", Sequence[float]]  # seconds for each of ROWS
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackendKind:
    """A backend, "native" or "torch", in one dtype."""

    kernels: KernelChoice
    dtype: torch.dtype

    def __str__(self) -> str:
        kernels = "compiled kernels" if self.kernels == "native" else "torch's operators"
        return f"{kernels}, {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The chosen backend and, if it was measured, its speed relative to the next best one."""

    backend: BackendKind
    other: BackendKind | None = None
    advantage: float | None = None

    def __str__(self) -> str:
        if self.other is None or self.advantage is None:
            return ""
        return f"measured here: {self.advantage:.1f} times as fast as {self.other}"


def cpu_backend(choice: KernelChoice, dtype: torch.dtype, progress: ProgressCallback | None = None) -> Backend:
    """The compiled kernels if they are available and `choice` allows them, else torch's operators."""
    return find_kernels(choice, dtype, progress) or TorchBackend()


def choose_backend(
    choice: KernelChoice,
    dtypes: Sequence[torch.dtype],
    quantize: Quantization | None,
    config: ModelConfig,
    progress: ProgressCallback | None = None,
) -> BackendChoice:
    """The fastest backend that `choice` and `dtypes` allow; compiled kernels in the first dtype are preferred.

    Raises UnsupportedModel if `choice` is "native" and there are no kernels.
    """
    native = [dtype for dtype in dtypes if find_kernels(choice, dtype, progress) is not None]
    backends = [BackendKind("native", dtype) for dtype in native]
    if choice != "native":
        backends += [BackendKind("torch", dtype) for dtype in torch_dtypes(dtypes)]
    preferred, *others = backends
    others = [other for other in others if other.kernels == "native" or is_packed(other)]
    # torch's operators were never faster with integer weights; for experts, the times would lack the grouping of rows.
    if not native or not others or quantize is not None or config.experts is not None:
        return BackendChoice(preferred)
    shapes = products(config)
    if 4 * sum(math.prod(shape) * count for shape, count in shapes.items()) < SMALL_BYTES:
        return BackendChoice(preferred)
    times = answer_times((preferred, *others), shapes, progress)
    return fastest(times, lambda backend: is_trusted(backend, config)) if times else BackendChoice(preferred)


def fastest(times: Mapping[BackendKind, float], is_trusted: Callable[[BackendKind], bool]) -> BackendChoice:
    """The first of `times`, unless another trusted backend is faster by a factor of at least ADVANTAGE."""
    preferred, *others = times
    for other in sorted(others, key=times.__getitem__):
        if times[other] * ADVANTAGE >= times[preferred]:
            return BackendChoice(preferred, other, times[other] / times[preferred])
        if is_trusted(other):
            return BackendChoice(other, preferred, times[preferred] / times[other])
    return BackendChoice(preferred)


def torch_dtypes(dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
    """The dtypes that torch's operators compute fast on this CPU (a single dtype always counts), else float32."""
    slow = (torch.float16,) if has_bfloat16_linears() else (torch.float16, torch.bfloat16)
    return [dtype for dtype in dtypes if len(dtypes) == 1 or dtype not in slow] or [torch.float32]


def has_bfloat16_linears() -> bool:
    """Whether this CPU and this build of torch run packed bfloat16 linears."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_packed(backend: BackendKind) -> bool:
    """Whether torch has packed operators for this backend here; without them it is never faster than the kernels."""
    supported = backend.dtype != torch.bfloat16 or has_bfloat16_linears()
    return supported and packing_available(torch.empty(0, dtype=backend.dtype))


def is_trusted(backend: BackendKind, config: ModelConfig) -> bool:
    """Whether the bits of a row do not depend on other rows, in every layer; always so in compiled kernels."""
    threads = torch.get_num_threads()
    return backend.kernels == "native" or all(
        trusted_rows(*shape, backend.dtype, False, threads) for shape in products(config)
    )


def answer_times(
    backends: Sequence[BackendKind], shapes: Mapping[tuple[int, int], int], progress: ProgressCallback | None
) -> dict[BackendKind, float]:
    """The seconds that the linear layers of a model take in a typical answer (PASSES), by backend.

    Reads and stores measured times. Returns {} if other programs disturb every measurement.
    """
    total, stored = dict.fromkeys(backends, 0.0), read_times()
    for number, ((outputs, inputs), count) in enumerate(shapes.items()):
        part = min(outputs, max(64, SAMPLE_WEIGHTS // inputs))
        keys = {backend: times_key(backend, part, inputs) for backend in backends}
        if not stored.keys() >= set(keys.values()):
            if progress is not None:
                progress("measuring kernels, once on this machine", number / len(shapes))
            times_by_backend = measure_undisturbed(partial(measure, backends, part, inputs))
            if times_by_backend is None:
                return {}
            stored = {**read_times(), **{keys[backend]: tuple(times) for backend, times in times_by_backend.items()}}
            keep_measured(times_file, stored, "The times of kernels")
        for backend, key in keys.items():
            total[backend] += count * outputs / part * sum(n * s for n, s in zip(PASSES, stored[key], strict=True))
    return total


def measure_undisturbed(measurement: Callable[[], MeasuredTimes]) -> MeasuredTimes | None:
    """The result of a measurement that no other program disturbed; None if every attempt was disturbed."""
    for _ in range(TRIES):
        neighbours = Neighbours()
        times = measurement()
        if not disturbs(neighbours.num_busy()):
            return times
    logger.warning("The speeds of kernels were not compared: %s.", disturbance(neighbours.num_busy()))
    return None


def times_key(backend: BackendKind, outputs: int, inputs: int) -> str:
    """The key of stored times: everything that the times of a layer depend on."""
    kernels = find_kernels(backend.kernels, backend.dtype)
    version = f"forerun {__version__} {kernels.file}" if kernels else f"torch {torch.__version__}"
    return f"{version}, {order_of_sums()}: {backend.dtype}, {outputs} x {inputs}"


def measure(backends: Sequence[BackendKind], outputs: int, inputs: int) -> MeasuredTimes:
    """The shortest seconds of a layer of this size by backend, for each of ROWS; backends are measured in turn."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    x = torch.randn(max(ROWS), inputs, generator=generator)
    layers = {each: [make_layer(each, weight) for _ in range(COPIES)] for each in backends}
    shortest = {backend: [math.inf] * len(ROWS) for backend in backends}
    for _ in range(TURNS):
        for backend, copies in layers.items():
            for i, rows in enumerate(ROWS):
                rows_read = x[: max(rows, MIN_ROWS if backend.kernels == "torch" else 1)].to(backend.dtype)
                for layer in copies if rows < max(ROWS) else copies[:1]:
                    started_s = time.perf_counter()
                    layer(rows_read)
                    shortest[backend][i] = min(shortest[backend][i], time.perf_counter() - started_s)
    return {backend: tuple(times) for backend, times in shortest.items()}


def make_layer(backend: BackendKind, weight: Tensor) -> Linear:
    """A linear layer of this backend, trusted or not."""
    kernels = find_kernels(backend.kernels, backend.dtype)
    return (kernels.linear if kernels else PackedLinear)(weight.to(backend.dtype), None)


def times_file() -> Path:
    """The file of stored times. Raises OSError if there is no home folder."""
    return cache_folder("times") / "layers.json"


def read_times() -> dict[str, tuple[float, ...]]:
    """All stored times; none if the file cannot be read or has another content."""
    return {key: tuple(row) for key, row in read_measured(times_file).items() if is_times(row)}


def is_times(value: object) -> bool:
    """Whether a JSON value has the form of a backend's times, as `measure` returns them."""
    rows = value if isinstance(value, list) and len(value) == len(ROWS) else [None]
    return all(isinstance(seconds, float) and 0 < seconds < math.inf for seconds in rows)
