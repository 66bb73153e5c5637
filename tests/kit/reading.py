"""Texts read by a runner in pieces, and with other numbers of threads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from forerun.models.runner import Read, Runner


def logits_in_pieces(runner: Runner, tokens: Sequence[int], sizes: Sequence[int], seq_id: int = 0) -> Tensor:
    """The logits of a text read in pieces of these sizes, each made final before the next."""
    assert sum(sizes) == len(tokens)
    logits, start = [], 0
    for size in sizes:
        logits.append(runner.read([Read(seq_id, tokens[start : start + size], judged=range(size))]).logits)
        runner.keep([seq_id], [range(size)])
        start += size
    runner.release([seq_id])
    return torch.cat(logits)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within it torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
