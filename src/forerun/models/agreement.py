"""Whether two models compute the same function: their logits on the same tokens, compared.

This file decides which tokens are read, how far logits may differ, and why that far.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun.annotations import Float, ProgressCallback
from forerun.models.loading import Blueprint
from forerun.models.runner import Read

CHECK_CHUNKS = (1, 3, 60, 64, 128)  # how the check reads its tokens
CHECK_ROWS = 24  # last positions of each chunk whose logits are compared
FLOAT32_BOUND = 1e-4  # of the largest logit: sums in another order
ROUNDING_BOUND = 3.0  # times what rounding to 16 bits does to the source's own logits, for both models' roundings


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the logits of a widened checkpoint are from its source's, at most, and how far they may be."""

    largest_difference: float
    tolerance: float
    largest_logit: float


def agreement(source: Blueprint, folder: Path, progress: ProgressCallback | None) -> Agreement:
    """Run both models on the same random tokens, in their own number format, and compare logits.

    In float32 only the order of sums differs. In 16 bits roundings differ too; how much they may move logits is
    measured on the source itself, as the distance between its logits in 16 bits and in 32.
    """
    num_tokens = min(sum(CHECK_CHUNKS), source.config.max_positions)
    tokens = torch.randint(source.config.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    half = source.config.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.bfloat16 if half else torch.float32
    exact = judged_logits(Blueprint.of(source.spec, dtype=torch.float32), tokens, None)
    narrow = judged_logits(Blueprint.of(source.spec, dtype=dtype), tokens, None) if half else exact
    wide = judged_logits(Blueprint.of(str(folder), dtype=dtype), tokens, progress)
    noise = ROUNDING_BOUND * (narrow - exact).abs().max().item()
    largest = exact.abs().max().item()
    difference = (wide[:, : source.config.vocab_size] - narrow).abs().max().item()
    return Agreement(difference, max(noise, FLOAT32_BOUND * largest), largest)


def judged_logits(
    model: Blueprint, tokens: list[int], progress: ProgressCallback | None
) -> Float[Tensor, "judged vocab"]:
    """Logits at the last positions of every chunk, read one after the other as a prompt would be."""
    runner = model.load(len(tokens), progress, max_model_len=len(tokens))
    logits, start = [], 0
    for size in CHECK_CHUNKS:
        chunk = tokens[start : start + size]
        if not chunk:
            break
        judged = range(max(0, len(chunk) - CHECK_ROWS), len(chunk))
        logits.append(runner.read([Read(0, chunk, judged=judged)]).logits)
        runner.keep([0], [range(len(chunk))])
        start += len(chunk)
        if progress is not None:
            progress("checking that the logits agree", start / len(tokens))
    return torch.cat(logits)
