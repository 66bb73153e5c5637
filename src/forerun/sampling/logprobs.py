"""Log-probabilities as reported to users: of the raw logits, before any transform (vLLM's default, raw_logprobs).

This file decides which alternatives are reported and how ranks count ties. The chosen token may be unlikely under the
raw law, because it was drawn from the transformed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.sampling.winners import largest


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of one token and of the likeliest alternatives to it; host numbers.

    `rank` is 1 for the likeliest token. `top_ids` fall in probability, ties to the lowest id, as `rank` counts them:
    a token of rank r stands at r - 1 there, if there are so many.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


def token_logprobs(
    logits: Float[Tensor, "rows vocab"], chosen: Sequence[int] | Int[Tensor, " rows"], top: int
) -> list[TokenLogprobs]:
    """The log-probability and rank of each row's `chosen` token, and its `top` likeliest tokens; in float32.

    `logits` are the model's own, of real ids alone; `top` is at most their number and may be 0.
    """
    law = logits.to(torch.float32).log_softmax(1)
    picked = torch.as_tensor(chosen, dtype=torch.int64, device=law.device)[:, None]
    mine = law.gather(1, picked)
    ids = torch.arange(law.shape[1], device=law.device)
    ahead = (law > mine) | ((law == mine) & (ids < picked))
    top_ids = largest(law, top)
    columns = (picked[:, 0], mine[:, 0], ahead.sum(1) + 1, top_ids, law.gather(1, top_ids))
    return [
        TokenLogprobs(token, logprob, rank, tuple(ids), tuple(logprobs))
        for token, logprob, rank, ids, logprobs in zip(*(column.tolist() for column in columns), strict=True)
    ]
