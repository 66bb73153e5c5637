"""What each number format of the weights costs in quality: cross-entropy of held-out files of the standard library.

    python benchmarks/loss.py [--model stdlib] [--kernels auto] [--windows 40]

Every token of the windows once, each window behind `<s>`, by the code that serves; nats per token, and by how much that
is more than in float32. The files are those that the bundled models were not trained on.
"""

import argparse

import torch
from recipes.stdlib.corpus import read_corpus, standard_library
from torch.nn import functional

from forerun.config import KERNEL_CHOICES, Quantization
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
    """The mean over all tokens, in nats."""
    runner, total = model.load(WINDOW + 1), 0.0
    for i, window in enumerate(windows):
        logits = runner.read([Read(i, [0, *window[:-1]], judged=range(len(window)))]).logits
        runner.release([i])
        total += float(functional.cross_entropy(logits, torch.tensor(window), reduction="sum"))
    return total / sum(map(len, windows))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=list(BUNDLED))
    parser.add_argument("--kernels", choices=KERNEL_CHOICES, default="auto")
    parser.add_argument("--windows", type=int, default=40)
    options = parser.parse_args()
    print("| model | tokens | format | nats per token | over float32 |\n|---|---|---|---|---|")
    for name in options.model:
        windows, first = held_out(name, options.windows), None
        for dtype, quantize in FORMATS:
            found = loss(Blueprint.of(name, dtype=dtype, quantize=quantize, kernels=options.kernels), windows)
            first = found if first is None else first
            title = quantize or dtype
            print(f"| {name} | {sum(map(len, windows))} | {title} | {found:.4f} | {found - first:+.4f} |", flush=True)


if __name__ == "__main__":
    main()
