"""The loss of quality by each number format of the weights: cross-entropy on held-out files of the standard library.

    python -m benchmarks.loss [--model stdlib] [--kernels auto] [--windows 40]

Every token of the windows counts once, each window starts with `<s>`, and the code that serves requests computes the
logits. Printed are nats per token and the difference to float32. The bundled models were not trained on these files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from benchmarks.markdown import show, show_header
from benchmarks.options import option, options_of
from recipes.stdlib.corpus import read_corpus, standard_library
from torch.nn import functional

from forerun.config import KERNEL_CHOICES, KernelChoice, Quantization
from forerun.models.bundled import BUNDLED
from forerun.models.loading import Blueprint
from forerun.models.runner import Read

FORMATS: tuple[tuple[str, Quantization | None], ...] = (
    ("float32", None),
    ("bfloat16", None),
    ("float32", "int8"),
    ("float32", "int4"),
)
WINDOW = 1023  # with <s> before it, all positions of the bundled models


def held_out(name: str, num_windows: int) -> list[list[int]]:
    """Windows of held-out files, one after the other through every file."""
    tokenizer = Blueprint.of(name).tokenizer()
    texts = [tokenizer.encode(file.text) for file in read_corpus(standard_library()) if file.held_out]
    windows = [text[i : i + WINDOW] for text in texts for i in range(0, len(text) - WINDOW + 1, WINDOW)]
    step = max(1, len(windows) // num_windows)
    return windows[::step][:num_windows]


def loss(model: Blueprint, windows: list[list[int]]) -> float:
    """The mean cross-entropy over all tokens, in nats."""
    runner, total = model.load(WINDOW + 1), 0.0
    for i, window in enumerate(windows):
        logits = runner.read([Read(i, [0, *window[:-1]], judged=range(len(window)))]).logits
        runner.release([i])
        total += float(functional.cross_entropy(logits, torch.tensor(window), reduction="sum"))
    return total / sum(map(len, windows))


@dataclass(slots=True)
class Options:
    """The models and the amount of text."""

    model: Sequence[str] = option(tuple(BUNDLED), "models (default: all bundled ones)", nargs="*")
    kernels: KernelChoice = option("auto", "default %(default)s", choices=KERNEL_CHOICES, type=str)
    windows: int = option(40, "windows of held-out text (default %(default)s)")


@torch.inference_mode()
def main() -> None:
    options = options_of(Options)
    show_header("model", "tokens", "format", "nats per token", "over float32")
    for name in options.model:
        windows, first = held_out(name, options.windows), None
        for dtype, quantize in FORMATS:
            found = loss(Blueprint.of(name, dtype=dtype, quantize=quantize, kernels=options.kernels), windows)
            first = found if first is None else first
            show(name, sum(map(len, windows)), quantize or dtype, f"{found:.4f}", f"{found - first:+.4f}")


if __name__ == "__main__":
    main()
