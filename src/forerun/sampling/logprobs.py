"""Log-probabilities as reported to users: of the raw logits, before any transform (vLLM's default, raw_logprobs).

This file decides which alternatives are reported and how ranks count ties. The chosen token may be unlikely under the
raw law, because it was sampled from the transformed one. Grammars are applied, as in vLLM: the caller sets the logits
of forbidden tokens to -inf, so that the law is that of the allowed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.device import has_doubles, is_cpu, softmax, upload
from forerun.kernels.sampling import SamplingKernels
from forerun.sampling.winners import largest


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of one token and of the most likely tokens, on the host.

    `rank` is 1 for the most likely token. `top_ids` are in order of rank, so a token of rank r has index r - 1, if
    there are that many; ties go to the lowest id. Impossible tokens are left out.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]

    @classmethod
    def of(cls, numbers: Sequence[float], top: int) -> TokenLogprobs:
        """From a row of `ranked`, which may have more alternatives than `top`."""
        (token, logprob, rank, possible), tops = numbers[:4], numbers[4:]
        count, width = min(int(possible), top), len(tops) // 2
        top_ids = tuple(int(token) for token in tops[:count])
        return cls(int(token), logprob, int(rank), top_ids, tuple(tops[width : width + count]))


def token_logprobs(
    logits: Float[Tensor, "rows vocab"],
    chosen: Sequence[int] | Int[Tensor, " rows"],
    top: int,
    kernels: SamplingKernels | None = None,
) -> list[TokenLogprobs]:
    """The log-probability and rank of each row's `chosen` token, and of its `top` most likely tokens; in float32.

    `logits` are the model's own, without padding ids, and -inf for tokens that a grammar forbids; `top` is at most
    their number and may be 0. `kernels` compute the ranks faster, with the same results. Waits for a device once.
    """
    picked = chosen if isinstance(chosen, Tensor) else upload(chosen, torch.int64, logits.device)
    if not is_cpu(logits.device):
        return [TokenLogprobs.of(row, top) for row in ranked(logits, picked, top).tolist()]
    columns = columns_of(logits, picked, top, kernels)  # on a CPU, converting columns is faster than joining them
    return [
        TokenLogprobs(token, logprob, rank, tuple(ids[:count]), tuple(logprobs[:count]))
        for token, logprob, rank, count, ids, logprobs in zip(*(column.tolist() for column in columns), strict=True)
    ]


def ranked(
    logits: Float[Tensor, "rows vocab"], picked: Int[Tensor, " rows"], top: int
) -> Float[Tensor, "rows numbers"]:
    """The columns of `columns_of` as one tensor for `TokenLogprobs.of`: in float64, which is exact, if supported."""
    wide = torch.float64 if has_doubles(logits.device) else torch.float32
    return torch.cat([c.view(len(c), -1).to(wide) for c in columns_of(logits, picked, top)], dim=1)


def columns_of(
    logits: Float[Tensor, "rows vocab"], picked: Int[Tensor, " rows"], top: int, kernels: SamplingKernels | None = None
) -> tuple[Tensor, ...]:
    """For each row: the token, its log-probability and rank; of its `top` most likely tokens, the number of possible
    ones, their ids and their log-probabilities. Does not wait for a device."""
    law = softmax(logits.to(torch.float32), log=True)
    by_kernels = kernels.rank(law.contiguous(), picked, top) if kernels is not None and is_cpu(law.device) else None
    ranks, top_ids = (rank_of(law, picked), largest(law, top)) if by_kernels is None else by_kernels
    tops = law.gather(1, top_ids)
    return picked, law.gather(1, picked[:, None])[:, 0], ranks, (tops > -math.inf).sum(1), top_ids, tops


def rank_of(law: Float[Tensor, "rows vocab"], picked: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """One plus the number of tokens that are more likely than the picked one, or as likely with a lower id."""
    own_law, ids = law.gather(1, picked[:, None]), torch.arange(law.shape[1], device=law.device)
    return ((law > own_law) | ((law == own_law) & (ids < picked[:, None]))).sum(1) + 1
