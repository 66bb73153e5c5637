"""What it costs to multiply many rows in the pieces that keep their bits: 512 rows, packed bfloat16 layers.

    python benchmarks/pieces.py

For every shape: how many rows this machine is trusted with at a time, and the time in such pieces over that in one
call; median and quartiles of alternating pairs.
"""

import statistics
import time

import torch

from forerun.models.backends.torch_cpu.linear import PackedLinear, trusted_rows

SHAPES = ((1024, 384), (384, 1024), (4864, 896), (896, 2432), (14336, 4096))  # outputs, inputs
NUM_ROWS, NUM_PAIRS = 512, 41


def seconds(layer: PackedLinear, x: torch.Tensor) -> float:
    """One call."""
    started = time.perf_counter()
    layer(x)
    return time.perf_counter() - started


@torch.inference_mode()
def main() -> None:
    print(f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}")
    print("| outputs | inputs | rows at a time | in pieces / in one call | quartiles |")
    print("|---|---|---|---|---|")
    for outputs, inputs in SHAPES:
        rows = trusted_rows(outputs, inputs, torch.bfloat16, False, torch.get_num_threads())
        if not rows:
            print(f"| {outputs} | {inputs} | none: fixed blocks | | |")
            continue
        weight, x = torch.randn(outputs, inputs).bfloat16(), torch.randn(NUM_ROWS, inputs).bfloat16()
        pieces, whole = PackedLinear(weight, None, rows), PackedLinear(weight, None, NUM_ROWS)
        pairs = [(seconds(pieces, x), seconds(whole, x)) for _ in range(NUM_PAIRS + 3)][3:]
        low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        print(f"| {outputs} | {inputs} | {rows} | {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True)


if __name__ == "__main__":
    main()
