"""What the compiled kernels bring: passes against torch's operators and the memory limit, attention against SDPA.

    python benchmarks/kernels.py [--quantize]

Passes over 1 to 32 tokens behind 300 of the widened pair and of the bundled draft model, both ways in one process by
turns; medians. The limit is the weights over the bandwidth of a sum over 1 GB, the best of several before each model.
Attention: a stack of layers that is little else, over 4,000 tokens, against torch's attention on dense tensors.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional

from forerun.demo.material import Pair
from forerun.machine import Machine, bandwidth_bytes_per_s
from forerun.models.decoder import Decoder
from forerun.models.loading import Blueprint
from forerun.models.native import find_kernels, kernels_name
from forerun.models.runner import Read, Runner

ROWS = (1, 2, 5, 8, 16, 32)
CONTEXT, REPEATS = 300, 21
LONG, LAYERS = 4000, 8


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


def passes(name: str, title: str, bandwidth: float, quantize: bool) -> None:
    """One model's table."""
    choices = ("native", "torch")
    plans = {c: Blueprint.of(name, quantize="int8" if quantize else None, kernels=c) for c in choices}
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
    here, quantize = Machine.here(), "--quantize" in sys.argv[1:]
    bandwidth = max(bandwidth_bytes_per_s() for _ in range(3))
    name = kernels_name("native", torch.bfloat16)
    print(f"{here.processor}, {here.num_threads} threads, {name}, torch {here.torch}, {bandwidth / 1e9:.1f} GB/s\n")
    print("| model | tokens | ms | torch / kernels | over the memory limit | over 1 token |\n|---|---|---|---|---|---|")
    pair = Pair.widened()
    for model, title in ((pair.target, "0.51 B"), (pair.draft, "21 M"), ("stdlib-draft", "0.93 M")):
        bandwidth = max(bandwidth, bandwidth_bytes_per_s())
        passes(model, title, bandwidth, quantize)
    print(f"\n| queries, {LONG} tokens | µs per layer | over SDPA on dense tensors |\n|---|---|---|")
    attention()


if __name__ == "__main__":
    main()
