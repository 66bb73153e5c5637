"""Checks that a widened model computes the same function as its source: compares their logits on the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun.annotations import Float, ProgressCallback
from forerun.models.loading import Blueprint
from forerun.models.runner import Read

CHECK_CHUNKS = (1, 3, 60, 64, 128)  # the tokens are read in chunks of these sizes
CHECK_ROWS = 24  # logits are compared at the last positions of each chunk
FLOAT32_BOUND = 1e-4  # tolerance relative to the largest logit, since sums have another order
ROUNDING_BOUND = 3.0  # tolerance relative to the effect of 16-bit rounding on the source's logits


@dataclass(frozen=True, slots=True)
class Agreement:
    """The largest difference between the logits of a widened checkpoint and of its source, and the tolerance."""

    largest_difference: float
    tolerance: float
    largest_logit: float


def compare_logits(source: Blueprint, folder: Path, progress: ProgressCallback | None) -> Agreement:
    """Run both models on the same random tokens, in their own dtype, and compare their logits.

    In float32 only the order of sums differs. In 16 bits rounding differs too; its effect is measured on the source, as
    the difference between its logits in 16 bits and in float32.
    """
    num_tokens = min(sum(CHECK_CHUNKS), source.config.max_positions)
    tokens = torch.randint(source.config.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    half = source.config.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.bfloat16 if half else torch.float32
    exact = chunk_logits(Blueprint.of(source.spec, dtype=torch.float32), tokens, None)
    narrow = chunk_logits(Blueprint.of(source.spec, dtype=dtype), tokens, None) if half else exact
    wide = chunk_logits(Blueprint.of(str(folder), dtype=dtype), tokens, progress)
    noise = ROUNDING_BOUND * (narrow - exact).abs().max().item()
    largest = exact.abs().max().item()
    difference = (wide - narrow).abs().max().item()
    return Agreement(difference, max(noise, FLOAT32_BOUND * largest), largest)


def chunk_logits(
    model: Blueprint, tokens: list[int], progress: ProgressCallback | None
) -> Float[Tensor, "judged vocab"]:
    """The logits at the last positions of every chunk; chunks are read one after another, like those of a prompt."""
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
            progress("comparing logits", start / len(tokens))
    return torch.cat(logits)
