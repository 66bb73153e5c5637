"""A slow reference for sampling parameters, step by step; and a chi-square test of counts against a law."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.sampling.params import SamplingParams

Reals = NDArray[np.float64]


def edited_logits(
    logits: Reals,
    text: Sequence[int],
    num_prompt: int,
    params: SamplingParams,
    ends: Sequence[int],
    words: Sequence[Sequence[int]] = (),
) -> Reals:
    """The logits after all steps before temperature; `ends` are the model's end ids, `words` excluded token runs."""
    logits = logits.copy()
    for token in params.banned_tokens:
        logits[token] = -np.inf
    if len(text) - num_prompt < params.min_tokens:
        for token in (*ends, *params.stop_token_ids):
            logits[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for word in words:
        if list(text[max(num_prompt, len(text) - len(word) + 1) :]) == list(word[:-1]):
            logits[word[-1]] = -np.inf
    for processor in params.logits_processors:
        logits = processor(list(text), torch.from_numpy(logits)).numpy().copy()
    for token in set(text):
        by = params.repetition_penalty
        logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
    for token, count in Counter(text[num_prompt:]).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def softmax(logits: Reals) -> Reals:
    """The softmax of the logits."""
    weights: Reals = np.exp(logits - logits.max())
    return weights / weights.sum()


def filtered_logits(logits: Reals, params: SamplingParams) -> Reals:
    """The logits after temperature and the filters in their order; equal logits are kept or removed together."""
    logits = logits / params.temperature
    if params.min_p > 0:
        law = softmax(logits)
        logits = np.where(law >= params.min_p * law.max(), logits, -np.inf)
    if 0 < params.top_k < len(logits):
        logits = np.where(logits >= np.sort(logits)[-params.top_k], logits, -np.inf)
    if params.top_p < 1:
        law = softmax(logits)
        ranked = np.sort(law)[::-1]
        needed = next(i for i in range(len(law)) if ranked[: i + 1].sum() >= params.top_p or i == len(law) - 1)
        logits = np.where(law >= ranked[needed], logits, -np.inf)
    return logits


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """P-value of Pearson's test on [rows, cells], each row with its own total; cells that expect under 5 are pooled."""
    statistic, freedom = 0.0, 0
    for seen, mean in zip(torch.atleast_2d(counts).double(), torch.atleast_2d(expected), strict=True):
        assert not seen[mean == 0].any(), "drawn, but of probability 0"
        small = mean < 5
        seen = torch.cat([seen[~small], seen[small].sum()[None]])
        mean = torch.cat([mean[~small], mean[small].sum()[None]])
        if mean[-1] < 5:
            seen, mean = seen[:-1], mean[:-1]
        if len(mean) > 1:
            statistic += float(((seen - mean) ** 2 / mean).sum())
            freedom += len(mean) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2).double()))
