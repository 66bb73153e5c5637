"""The cost of multiplying many rows in pieces that keep results bit-equal: 512 rows, packed bfloat16 layers.

    python -m benchmarks.pieces

For every shape: the number of rows per piece for which results are bit-equal on this machine, and the time in such
pieces over the time of one call; median and quartiles of alternating pairs.
"""

import time

import torch
from benchmarks.markdown import show, show_header, spread_cells

from forerun.bench.figures import Spread
from forerun.models.backends.torch_cpu.linear import PackedLinear, trusted_rows

SHAPES = ((1024, 384), (384, 1024), (4864, 896), (896, 2432), (14336, 4096))  # outputs, inputs
NUM_ROWS, NUM_PAIRS = 512, 41


def seconds(layer: PackedLinear, x: torch.Tensor) -> float:
    """The seconds of one call."""
    started = time.perf_counter()
    layer(x)
    return time.perf_counter() - started


@torch.inference_mode()
def main() -> None:
    print(f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}")
    show_header("outputs", "inputs", "rows at a time", "in pieces / in one call", "quartiles")
    for outputs, inputs in SHAPES:
        rows = trusted_rows(outputs, inputs, torch.bfloat16, False, torch.get_num_threads())
        if not rows:
            show(outputs, inputs, "none: fixed blocks", "", "")
            continue
        weight, x = torch.randn(outputs, inputs).bfloat16(), torch.randn(NUM_ROWS, inputs).bfloat16()
        pieces, whole = PackedLinear(weight, None, rows), PackedLinear(weight, None, NUM_ROWS)
        pairs = [(seconds(pieces, x), seconds(whole, x)) for _ in range(NUM_PAIRS + 3)][3:]
        show(outputs, inputs, rows, *spread_cells(Spread.of(a / b for a, b in pairs)))


if __name__ == "__main__":
    main()
