"""The speed of the compiled kernels: layers, passes and attention against torch's operators and the memory limit.

    python -m benchmarks.kernels [--isa avx2|avx512|amx] [--quantize int8|int4] [--only layers|passes|attention]
        [--alone]

- Layers: three shapes in four formats, 1 to 512 rows, compared with torch's packed operators in float32 and, where
  torch has them, in bfloat16. Many copies of a layer are multiplied in turn, so that weights are read from memory.
- Passes over 1 to 512 tokens after a context of 300, of the widened pair and of the bundled draft model. Compiled
  kernels and torch's operators alternate in one process; the results are medians. --alone leaves out torch's operators,
  which take minutes in 4 bits.
- Attention over 4,000 tokens, in layers that do little else, compared with torch's attention on dense tensors.

The memory limit is the time to read the weights at the bandwidth of a sum over 1 GB, the best of several. On AVX2,
where arithmetic limits even a few rows, there is a second limit: the number of multiplications over the speed of
multiplications in registers (peaks.cpp). Both are measured again, alternating with the passes; the longer one is the
"longer limit".
"""

import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from benchmarks.isa import isa_option, pin
from benchmarks.markdown import show, show_header
from benchmarks.options import option, options_of
from torch.nn import functional

from forerun.config import KernelChoice, Quantization
from forerun.demo.material import DRAFT_PARAMETERS, TARGET_PARAMETERS, widen
from forerun.kernels.build import NoKernels, compiler, run_compiler
from forerun.machine import Machine, bandwidth_bytes_per_s
from forerun.models.backends.native_check import find_kernels
from forerun.models.backends.torch_cpu.linear import PackedLinear
from forerun.models.bundled import DRAFT, TARGET
from forerun.models.choice import cpu_backend, has_bfloat16_linears
from forerun.models.decoder import Decoder
from forerun.models.layer import Linear
from forerun.models.loading import Blueprint
from forerun.models.packing import WeightLoader
from forerun.models.rows import MIN_ROWS
from forerun.models.runner import Read, Runner

ROWS = (1, 2, 5, 8, 16, 32, 512)
CONTEXT, REPEATS, FEW_REPEATS, MANY = 300, 21, 5, 64
LONG, LAYERS = 4000, 8
LAYER_ROWS = (1, 2, 3, 5, 8, 16, 32, 64, 128, 512)
SHAPES = ((2048, 2048), (8192, 2048), (2048, 8192))
LOOPS = {None: 0, "int8": 1, "int4": 2}  # of peaks.cpp
GIGABYTE = 1_000_000_000
COLD_BYTES = 192 << 20  # of all copies of a layer: more than the processor's caches


def seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def alternating(calls: Mapping[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, float]:
    """Median seconds of each call; calls alternate, and the first two of each are not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + 2):
        for name, call in calls.items():
            took_s = seconds(call)
            if i > 1:
                times[name].append(took_s)
    return {name: statistics.median(values) for name, values in times.items()}


def layers(bandwidth: float) -> None:
    """Print a table for each shape: milliseconds by format and number of rows, and those of torch's operators."""
    kernels = find_kernels("native", torch.float32)
    assert kernels is not None
    for outputs, inputs in SHAPES:
        print()
        show_header(f"{outputs:,} × {inputs:,}", "limit", *LAYER_ROWS)
        weight = torch.randn(outputs, inputs) * inputs**-0.5
        makers: dict[tuple[str, float], Callable[[], Linear]] = {
            ("compiled float32", 4): partial(kernels.linear, weight, None),
            ("compiled bfloat16", 2): partial(kernels.linear, weight.bfloat16(), None),
            ("compiled int8", 1): partial(kernels.linear, weight, None, "int8"),
            ("compiled int4", 4.5 / 8): partial(kernels.linear, weight, None, "int4"),
            ("torch, packed float32", 4): partial(PackedLinear, weight, None),
        }
        if has_bfloat16_linears():
            makers["torch, packed bfloat16", 2] = partial(PackedLinear, weight.bfloat16(), None)
        for (name, size), make in makers.items():
            copies = [make() for _ in range(max(2, int(COLD_BYTES / (outputs * inputs * size))))]
            limit_ms = outputs * inputs * size / bandwidth * 1e3
            cells = [layer_ms(copies, torch.randn(rows, inputs), "torch" in name) for rows in LAYER_ROWS]
            show(name, f"{limit_ms:.2f}", *(f"{ms:.2f}" for ms in cells))


def layer_ms(copies: list[Linear], x: torch.Tensor, by_torch: bool) -> float:
    """Median milliseconds of copies of one layer, which are multiplied in turn; torch gets at least MIN_ROWS rows."""
    if by_torch:
        x = functional.pad(x, (0, 0, 0, max(0, MIN_ROWS - len(x))))
        bfloat16 = isinstance(copies[0], PackedLinear) and copies[0].packed.dtype == torch.bfloat16
        x = x.bfloat16() if bfloat16 else x
    turns = 3 if len(x) < MANY else 1
    times = [seconds(partial(layer, x)) for _ in range(turns + 1) for layer in copies[: MANY // turns]]
    return statistics.median(times[len(times) // (turns + 1) :]) * 1e3


def read(runner: Runner, num_tokens: int) -> Callable[[], None]:
    """A function that runs a pass over `num_tokens` tokens, with logits for at most the last MANY."""

    def call() -> None:
        runner.read([Read(0, range(5, 5 + num_tokens), judged=range(max(0, num_tokens - MANY), num_tokens))])
        runner.drop([0])

    return call


def multiplier(quantize: str | None) -> Callable[[], float]:
    """A function that multiplies in registers with AVX2 for a few milliseconds; returns its number of multiplications.

    Raises NoKernels if no compiler can build it.
    """
    with tempfile.TemporaryDirectory() as folder:
        library, source = Path(folder) / "peaks.so", Path(__file__).with_name("peaks.cpp")
        flags = ["-O2", "-march=x86-64-v3", "-fopenmp", "-fPIC", "-shared"]
        run_compiler([compiler(), *flags, str(source), "-o", str(library)], library)
        multiply = ctypes.CDLL(str(library)).multiply
    multiply.restype = ctypes.c_double
    return partial(multiply, LOOPS[quantize], torch.get_num_threads())


def passes(name: str, title: str, bandwidth: float, quantize: str | None, choices: tuple[KernelChoice, ...]) -> None:
    """Print one model's rows, with weights in the format that `--dtype auto` chooses."""
    dtype = Blueprint.of(name, quantize=quantize).dtype
    plans = {
        choice: Blueprint.of(name, quantize=quantize, dtype=None if choice == "torch" else dtype, kernels=choice)
        for choice in choices
    }
    runners = {choice: plan.load(1024) for choice, plan in plans.items()}
    for runner in runners.values():
        runner.read([Read(0, range(CONTEXT))])
        runner.keep([0], [range(CONTEXT)])
    limits: dict[str, Callable[[], object]] = {"read": torch.ones(GIGABYTE // 4).sum}
    num_products = 0.0
    if cpu_backend("native", torch.bfloat16).name.startswith("AVX2"):
        try:
            limits["multiply"] = multiply = multiplier(quantize)
            num_products = multiply()
        except NoKernels as missing:
            print(f"The arithmetic limit is not measured: {missing}")
    config = plans["native"].config
    num_weights, num_head = Blueprint.of(name, dtype=torch.bfloat16).pass_bytes / 2, config.vocab_size * config.hidden
    pass_bytes, first_s = plans["native"].pass_bytes, 0.0
    format_name = quantize or str(dtype).removeprefix("torch.")
    for n in ROWS:
        calls = limits | {choice: read(runner, n) for choice, runner in runners.items()}
        found = alternating(calls, REPEATS if n < MANY else FEW_REPEATS)
        native, by_torch = found["native"], found.get("torch", float("nan"))
        least_s = found["read"] * pass_bytes / GIGABYTE
        if num_products:
            products = n * (num_weights - num_head) + min(n, MANY) * num_head
            least_s = max(least_s, found["multiply"] * products / num_products)
        first_s = first_s or native
        ratios = by_torch / native, native * bandwidth / pass_bytes, native / least_s, native / first_s
        show(f"{title}, {format_name}", n, f"{native * 1e3:.2f}", *(f"{ratio:.2f}" for ratio in ratios))


def attention() -> None:
    """Print the times of layers that do little but attention, compared with attention on dense tensors."""
    small = Blueprint.of("stdlib-draft")
    config = replace(
        small.config,
        hidden=64,
        intermediate=64,
        layers=LAYERS,
        heads=24,
        kv_heads=8,
        head_dim=64,
        max_positions=LONG + 64,
    )
    config = replace(config, windows=(None,) * LAYERS, vocab_size=64)
    dice = torch.Generator().manual_seed(0)

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=dice) * float(shape[-1] ** -0.5)

    decoder = Decoder(config, WeightLoader(take, torch.bfloat16, cpu_backend("native", torch.bfloat16)))
    runner = Runner.of(decoder, LONG + 128)
    for first in range(0, LONG, 500):
        runner.read([Read(0, [i % 64 for i in range(first, first + 500)])])
        runner.keep([0], [range(500)])
    k, v = (torch.randn(LAYERS, 1, 8, LONG, 64).bfloat16() for _ in range(2))
    short = Runner.of(decoder, 256)
    short.read([Read(0, [1])])
    short.keep([0], [[0]])
    for n in (1, 4, 8):
        q = torch.randn(1, 8, 3 * n, 64).bfloat16()

        def dense(q: torch.Tensor = q) -> None:
            for layer in range(LAYERS):
                functional.scaled_dot_product_attention(q, k[layer], v[layer])

        found = alternating({"long": read_few(runner, n), "short": read_few(short, n), "dense": dense})
        ours = found["long"] - found["short"]
        show(n, f"{ours / LAYERS * 1e6:.0f}", f"{ours / found['dense']:.2f}")


def read_few(runner: Runner, num_tokens: int) -> Callable[[], None]:
    """A function that runs a pass over `num_tokens` tokens without logits."""

    def call() -> None:
        runner.read([Read(0, range(num_tokens))])
        runner.drop([0])

    return call


@dataclass(slots=True)
class Options:
    """The tables and the number format."""

    isa: str | None = isa_option()
    quantize: Quantization | None = option(
        None, "number format of the passes (default: the model's own)", choices=("int8", "int4"), type=str
    )
    only: str | None = option(None, "one table (default: all)", choices=("layers", "passes", "attention"))
    alone: bool = option(False, "passes: without torch's operators")


@torch.inference_mode()
def main() -> None:
    """Print the selected tables."""
    options = options_of(Options)
    pin(options.isa)
    only, quantize = options.only, options.quantize
    here = Machine.here()
    bandwidth = max(bandwidth_bytes_per_s() for _ in range(3))
    name = cpu_backend("native", torch.bfloat16).name
    print(f"{here.processor}, {here.num_threads} threads, {name}, torch {here.torch}, {bandwidth / 1e9:.1f} GB/s\n")
    if only in (None, "layers"):
        layers(bandwidth)
    if only in (None, "passes"):
        limits = ("over the memory limit", "over the longer limit", "over 1 token")
        print()
        show_header("model", "tokens", "ms", "torch / kernels", *limits)
        sizes = ((TARGET, TARGET_PARAMETERS, "0.51 B"), (DRAFT, DRAFT_PARAMETERS, "21 M"))
        wide = [(widen(name, num_parameters, None), title) for name, num_parameters, title in sizes]
        for model, title in (*wide, (DRAFT, "0.93 M")):
            bandwidth = max(bandwidth, bandwidth_bytes_per_s())
            passes(model, title, bandwidth, quantize, ("native",) if options.alone else ("native", "torch"))
    if only in (None, "attention"):
        print()
        show_header(f"queries, {LONG} tokens", "µs per layer", "over SDPA on dense tensors")
        attention()


if __name__ == "__main__":
    main()
