"""Logits of many kinds, usual and extreme ones."""

import math

import torch
from torch import Tensor

SHAPES = ["steep", "flat", "tied", "bfloat16", "far", "tiny", "filtered", "NaN", "infinite", "nothing", "two"]


def logits_of(shape: str, rows: int, vocab: int, seed: int) -> Tensor:
    """Rows of one kind; the first row is always peaked, so that a batch has two kinds."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=random)
    ranks = torch.stack([torch.randperm(vocab, generator=random) for _ in range(rows)])
    steep = -1.5 * (ranks + 1.0).log()
    made = {
        "steep": steep,
        "flat": x,
        "tied": torch.zeros_like(x),
        "bfloat16": (steep * 3).bfloat16().float(),
        "far": steep * 1e6 + 1e8,
        "tiny": x * 1e-30,
        "filtered": steep.masked_fill(ranks > 40, -math.inf),
        "NaN": steep.masked_fill(ranks == vocab // 2, math.nan),
        "infinite": x.masked_fill(ranks < 3, math.inf),
        "nothing": torch.full_like(x, -math.inf),
        "two": torch.full_like(x, -3e38).masked_fill(ranks < 2, 3e38),
    }[shape]
    return torch.cat([steep[:1], made[1:]]) if rows > 1 else made
