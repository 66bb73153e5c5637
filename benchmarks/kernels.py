"""What the compiled kernels bring: passes against torch's operators and the memory limit, attention against SDPA.

    python benchmarks/kernels.py [--quantize int4] [--layers]

Passes over 1 to 32 tokens behind 300 of the widened pair and of the bundled draft model, both ways in one process by
turns; medians. The limit is the weights over the bandwidth of a sum over 1 GB, the best of several before each model.
Attention: a stack of layers that is little else, over 4,000 tokens, against torch's attention on dense tensors.
With `--layers` instead: one linear layer of 8192 x 2048 in every number format by rows, and torch's packed float32;
copies in turn, of more than 500 MB together, so that no cache holds them; the best of all calls.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle

import torch
from torch.nn import functional

from forerun.config import QUANTIZATIONS, Quantization
from forerun.demo.material import Pair
from forerun.machine import Machine, bandwidth_bytes_per_s
from forerun.models.decoder import Decoder
from forerun.models.linear import MIN_ROWS, PackedLinear
from forerun.models.loading import Blueprint
from forerun.models.native import find_kernels, kernels_name
from forerun.models.runner import Read, Runner

ROWS = (1, 2, 5, 8, 16, 32)
CONTEXT, REPEATS = 300, 21
LONG, LAYERS = 4000, 8
LAYER, COPIES_BYTES = (8192, 2048), 520_000_000
LAYER_ROWS = (1, 2, 3, 5, 8, 16, 64, 512)
LAYER_FORMATS: dict[str, tuple[torch.dtype, Quantization | None, float]] = {
    "float32": (torch.float32, None, 4),
    "bfloat16": (torch.bfloat16, None, 2),
    "int8": (torch.float32, "int8", 1),
    "int4": (torch.float32, "int4", 4.5 / 8),
}


def seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def alternating(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each call, made by turns; the first turns are not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(REPEATS + 2):
        for name, call in calls.items():
            took_s = seconds(call)
            if i > 1:
                times[name].append(took_s)
    return {name: statistics.median(values) for name, values in times.items()}


def read(runner: Runner, num_tokens: int) -> Callable[[], None]:
    """A pass over so many tokens behind the text, all of them judged."""

    def call() -> None:
        runner.read([Read(0, range(5, 5 + num_tokens), judged=range(num_tokens))])
        runner.drop([0])

    return call


def passes(name: str, title: str, bandwidth: float, quantize: Quantization | None) -> None:
    """One model's table."""
    choices = ("native", "torch")
    plans = {c: Blueprint.of(name, quantize=quantize, kernels=c) for c in choices}
    runners = {choice: plan.load(1024) for choice, plan in plans.items()}
    for runner in runners.values():
        runner.read([Read(0, range(CONTEXT))])
        runner.keep([0], [range(CONTEXT)])
    calls = {f"{choice} {n}": read(runner, n) for n in ROWS for choice, runner in runners.items()}
    found, limit_s = alternating(calls), plans["native"].pass_bytes / bandwidth
    for n in ROWS:
        native, by_torch = found[f"native {n}"], found[f"torch {n}"]
        ratios = by_torch / native, native / limit_s, native / found["native 1"]
        print(f"| {title} | {n} | {native * 1e3:.2f} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")


def layers() -> None:
    """A layer in every format by rows, the limit beside it."""
    print("| weights | limit, ms | " + " | ".join(map(str, LAYER_ROWS)) + " |\n" + "|---" * (len(LAYER_ROWS) + 2) + "|")
    weight, (outputs, inputs) = torch.randn(LAYER), LAYER
    kernels = find_kernels("native", torch.float32)
    assert kernels is not None, "there is no compiler"
    packed = [PackedLinear(weight, None) for _ in range(COPIES_BYTES // weight.nbytes + 1)]
    print_layer("torch, packed float32", packed, outputs * inputs * 4)
    del packed
    for name, (dtype, quantize, size) in LAYER_FORMATS.items():
        copies = int(COPIES_BYTES / weight.numel() / size) + 1
        print_layer(
            name, [kernels.linear(weight.to(dtype), None, quantize) for _ in range(copies)], weight.numel() * size
        )


def print_layer(name: str, copies: Sequence[Callable[[torch.Tensor], torch.Tensor]], num_bytes: float) -> None:
    """A row of the table; a single row is padded for torch, which would change its bits."""
    bandwidth, best = max(bandwidth_bytes_per_s() for _ in range(2)), []
    for rows in LAYER_ROWS:
        x = torch.randn(max(rows, MIN_ROWS if "torch" in name else 1), LAYER[1])
        calls = len(copies) * 2 if rows <= 16 else 16 if rows <= 64 else 4
        best.append(min(seconds(partial(layer, x)) for _, layer in zip(range(calls), cycle(copies), strict=False)))
    times = " | ".join(f"{each * 1e3:.2f}" for each in best)
    print(f"| {name} | {num_bytes / bandwidth * 1e3:.2f} | {times} |", flush=True)


def attention() -> None:
    """Layers with hardly anything but attention, and the same attention alone on dense tensors."""
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
        return torch.randn(shape, generator=dice) * shape[-1] ** -0.5

    decoder = Decoder(config, take, torch.bfloat16, kernels=find_kernels("native", torch.bfloat16))
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
        print(f"| {n} | {ours / LAYERS * 1e6:.0f} | {ours / found['dense']:.2f} |")


def read_few(runner: Runner, num_tokens: int) -> Callable[[], None]:
    """A pass that computes no logits."""

    def call() -> None:
        runner.read([Read(0, range(num_tokens))])
        runner.drop([0])

    return call


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantize", choices=QUANTIZATIONS)
    parser.add_argument("--layers", action="store_true")
    options, here = parser.parse_args(), Machine.here()
    bandwidth = max(bandwidth_bytes_per_s() for _ in range(3))
    name = kernels_name("native", torch.bfloat16)
    print(f"{here.processor}, {here.num_threads} threads, {name}, torch {here.torch}, {bandwidth / 1e9:.1f} GB/s\n")
    if options.layers:
        layers()
        return
    print("| model | tokens | ms | torch / kernels | over the memory limit | over 1 token |\n|---|---|---|---|---|---|")
    pair = Pair.widened()
    for model, title in ((pair.target, "0.51 B"), (pair.draft, "21 M"), ("stdlib-draft", "0.93 M")):
        bandwidth = max(bandwidth, bandwidth_bytes_per_s())
        passes(model, title, bandwidth, options.quantize)
    print(f"\n| queries, {LONG} tokens | µs per layer | over SDPA on dense tensors |\n|---|---|---|")
    attention()


if __name__ == "__main__":
    main()
