"""What computes a model on this CPU: compiled kernels or torch's operators, in 16 bits or 32, by measured times.

This file decides what is compared, how it is measured, and where the times are kept. A decoder is computed by one kind
of kernels, in one number format, for any number of rows: rows of a draft must have the bits that the same tokens would
have in a prompt. So the choice is made once per model, by the times of its linear layers, which read nearly all of the
memory that a pass reads. Small models are not measured. Their time goes into calls, of which the compiled kernels make
one for all layers.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from forerun.store import cache_folder, keep_measured

ROWS = (1, 4, 8, 64)  # of the passes that are timed: plain, drafted, a batch or a tree, a piece of a prompt
PASSES = (32, 32, 32, 4)  # how many of each an answer is taken to need: 256 prompt tokens, then 96 rounds
SMALL_BYTES = 64 << 20  # models below, in float32, stay in a processor's caches
SAMPLE_WEIGHTS = 1 << 22  # a layer is timed by so many of its weights: by fewer outputs of the same inputs
COPIES = 4  # of a sample, taken in turn, so that weights come from memory as in a pass
TURNS = 5  # of all backends, of which the shortest times count: neighbours on the same cores only make times longer
TRIES = 2  # of a measurement that other programs disturb
ADVANTAGE = 1.1  # how many times as fast something else must be than what is preferred

MeasuredTimes = Mapping["BackendKind", Sequence[float]]  # seconds for each of ROWS
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackendKind:
    """A way to compute: `kernels` is "native" or "torch", and the number format."""

    kernels: KernelChoice
    dtype: torch.dtype

    def __str__(self) -> str:
        by = "compiled kernels" if self.kernels == "native" else "torch's operators"
        return f"{by}, {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend that is taken; and where it was measured, how many times as fast it is as the next best other."""

    backend: BackendKind
    other: BackendKind | None = None
    advantage: float | None = None

    def __str__(self) -> str:
        if self.other is None or self.advantage is None:
            return ""
        return f"measured here: {self.advantage:.1f} times as fast as {self.other}"


def cpu_backend(choice: KernelChoice, dtype: torch.dtype, progress: ProgressCallback | None = None) -> Backend:
    """The compiled kernels or, as `find_kernels` says, torch's operators."""
    return find_kernels(choice, dtype, progress) or TorchBackend()


def choose_backend(
    choice: KernelChoice,
    dtypes: Sequence[torch.dtype],
    quantize: Quantization | None,
    config: ModelConfig,
    progress: ProgressCallback | None = None,
) -> BackendChoice:
    """The fastest backend that `choice` and `dtypes` allow, preferring compiled kernels and the first format.

    Raises UnsupportedModel where `choice` is "native" and there are no kernels.
    """
    native = [dtype for dtype in dtypes if find_kernels(choice, dtype, progress) is not None]
    backends = [BackendKind("native", dtype) for dtype in native]
    if choice != "native":
        backends += [BackendKind("torch", dtype) for dtype in torch_dtypes(dtypes)]
    preferred, *others = backends
    others = [other for other in others if other.kernels == "native" or is_packed(other)]
    # Of whole numbers torch's operators were never faster, and rows of experts they group in Python, outside the times.
    if not native or not others or quantize is not None or config.experts is not None:
        return BackendChoice(preferred)
    shapes = products(config)
    if 4 * sum(math.prod(shape) * count for shape, count in shapes.items()) < SMALL_BYTES:
        return BackendChoice(preferred)
    times = answer_times((preferred, *others), shapes, progress)
    return fastest(times, lambda backend: is_trusted(backend, config)) if times else BackendChoice(preferred)


def fastest(times: Mapping[BackendKind, float], is_trusted: Callable[[BackendKind], bool]) -> BackendChoice:
    """The first of `times`, unless another that can be trusted is faster by more than times are off."""
    preferred, *others = times
    for other in sorted(others, key=times.__getitem__):
        if times[other] * ADVANTAGE >= times[preferred]:
            return BackendChoice(preferred, other, times[other] / times[preferred])
        if is_trusted(other):
            return BackendChoice(other, preferred, times[preferred] / times[other])
    return BackendChoice(preferred)


def torch_dtypes(dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
    """Those that torch's operators compute well on this CPU, float32 where there is none among them."""
    slow = (torch.float16,) if has_bfloat16_linears() else (torch.float16, torch.bfloat16)
    return [dtype for dtype in dtypes if len(dtypes) == 1 or dtype not in slow] or [torch.float32]


def has_bfloat16_linears() -> bool:
    """Whether this CPU and this build of torch run packed bfloat16 linears."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_packed(backend: BackendKind) -> bool:
    """Whether torch has a fast operator for it here: what it does without is never faster than compiled kernels."""
    supported = backend.dtype != torch.bfloat16 or has_bfloat16_linears()
    return supported and packing_available(torch.empty(0, dtype=backend.dtype))


def is_trusted(backend: BackendKind, config: ModelConfig) -> bool:
    """Whether the operators give each row bits of its own, in every layer. Compiled kernels do."""
    threads = torch.get_num_threads()
    return backend.kernels == "native" or all(
        trusted_rows(*shape, backend.dtype, False, threads) for shape in products(config)
    )


def answer_times(
    backends: Sequence[BackendKind], shapes: Mapping[tuple[int, int], int], progress: ProgressCallback | None
) -> dict[BackendKind, float]:
    """Seconds that the linear layers of a model take by each of them, for an answer as PASSES has it.

    What is measured is kept, unless other programs disturb it, at a second try too: then nothing is known.
    """
    total, kept = dict.fromkeys(backends, 0.0), read_times()
    for number, ((outputs, inputs), count) in enumerate(shapes.items()):
        part = min(outputs, max(64, SAMPLE_WEIGHTS // inputs))
        keys = {backend: times_key(backend, part, inputs) for backend in backends}
        if not kept.keys() >= set(keys.values()):
            if progress is not None:
                progress("measuring kernels, once on this machine", number / len(shapes))
            times_by_backend = undisturbed(partial(measured, backends, part, inputs))
            if times_by_backend is None:
                return {}
            kept = {**read_times(), **{keys[backend]: tuple(times) for backend, times in times_by_backend.items()}}
            keep_measured(times_file, kept, "The times of kernels")
        for backend, key in keys.items():
            total[backend] += count * outputs / part * sum(n * s for n, s in zip(PASSES, kept[key], strict=True))
    return total


def undisturbed(measure: Callable[[], MeasuredTimes]) -> MeasuredTimes | None:
    """What is measured while other programs leave the cores alone; None where they do not at two tries."""
    for _ in range(TRIES):
        neighbours = Neighbours()
        times = measure()
        if not disturbs(neighbours.num_busy()):
            return times
    logger.warning("Kernels were not compared: %s.", disturbance(neighbours.num_busy()))
    return None


def times_key(backend: BackendKind, outputs: int, inputs: int) -> str:
    """Everything that the times of a layer depend on."""
    kernels = find_kernels(backend.kernels, backend.dtype)
    by = f"forerun {__version__} {kernels.file}" if kernels else f"torch {torch.__version__}"
    return f"{by}, {order_of_sums()}: {backend.dtype}, {outputs} x {inputs}"


def measured(backends: Sequence[BackendKind], outputs: int, inputs: int) -> MeasuredTimes:
    """The shortest seconds that such a layer takes by each of them, for each of ROWS; measured by turns."""
    dice = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=dice) * inputs**-0.5
    x = torch.randn(max(ROWS), inputs, generator=dice)
    layers = {each: [sample(each, weight) for _ in range(COPIES)] for each in backends}
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


def sample(backend: BackendKind, weight: Tensor) -> Linear:
    """A layer by this backend, whether or not its rows can be trusted."""
    kernels = find_kernels(backend.kernels, backend.dtype)
    return (kernels.linear if kernels else PackedLinear)(weight.to(backend.dtype), None)


def times_file() -> Path:
    """Where times are kept. Raises OSError where there is no home folder."""
    return cache_folder("times") / "layers.json"


def read_times() -> dict[str, tuple[float, ...]]:
    """All times that are kept, of any machine; a file that cannot be read, or is no such file, has none."""
    with suppress(OSError, ValueError, RecursionError):
        stored = json.loads(times_file().read_text(encoding="utf-8"))
        return {key: tuple(row) for key, row in stored.items() if is_times(row)} if isinstance(stored, dict) else {}
    return {}


def is_times(value: object) -> bool:
    """Whether it is what `measured` gives for a backend, as JSON has it."""
    rows = value if isinstance(value, list) and len(value) == len(ROWS) else [None]
    return all(isinstance(seconds, float) and 0 < seconds < math.inf for seconds in rows)
