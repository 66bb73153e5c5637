"""What sampling parameters say of logits, step by step: a slow reference for transforms; and how counts fit a law."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.sampling.params import SamplingParams

Reals = NDArray[np.float64]


def shaped(
    logits: Reals,
    text: Sequence[int],
    num_prompt: int,
    params: SamplingParams,
    ends: Sequence[int],
    words: Sequence[Sequence[int]] = (),
) -> Reals:
    """What comes before temperature; `ends` are ids that end a text of the model's, `words` are not to be said."""
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
    """As probabilities."""
    weights: Reals = np.exp(logits - logits.max())
    return weights / weights.sum()


def narrowed(logits: Reals, params: SamplingParams) -> Reals:
    """Temperature, then the filters in their order; equals are kept together."""
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
    for seen, wanted in zip(torch.atleast_2d(counts).double(), torch.atleast_2d(expected), strict=True):
        assert not seen[wanted == 0].any(), "drawn, but of probability 0"
        small = wanted < 5
        seen = torch.cat([seen[~small], seen[small].sum()[None]])
        wanted = torch.cat([wanted[~small], wanted[small].sum()[None]])
        if wanted[-1] < 5:
            seen, wanted = seen[:-1], wanted[:-1]
        if len(wanted) > 1:
            statistic += float(((seen - wanted) ** 2 / wanted).sum())
            freedom += len(wanted) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2).double()))
