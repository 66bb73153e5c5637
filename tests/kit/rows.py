"""Random rows of a round: every sampling parameter at any strength, texts with bad words, and grammars."""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from forerun.sampling.constraint import Allowed, Constraint
from forerun.sampling.params import SamplingParams
from forerun.sampling.tables import RowSampling

FEW = 12  # texts and lists are made of so few ids that they overlap


def odd(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """A logits processor: by the last token it excludes the odd or the even ids."""
    return logits.index_fill(0, torch.arange(tokens[-1] % 2, len(logits), 2), -math.inf)


class RandomMasks(Constraint):
    """A random grammar: the allowed ids are drawn for each path, now and then all ids, one or none."""

    def __init__(self, seed: int, vocab: int) -> None:
        self.seed, self.vocab = seed, vocab

    @override
    def suffix(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens)

    @override
    def after(self, behind: tuple[int, ...]) -> Allowed:
        rng = np.random.default_rng([self.seed, *behind])
        share = rng.choice([0.0, 1 / self.vocab, 0.1, 0.5, 1.0, -1.0], p=[0.05, 0.2, 0.25, 0.3, 0.1, 0.1])
        if share < 0:
            return Allowed()
        size = 32 * -(
            -(self.vocab + rng.integers(-40, 40).clip(1 - self.vocab)) // 32
        )  # a tokenizer's, not the model's
        bits = np.packbits(rng.random(size) < share, bitorder="little")
        return Allowed(bits.view(np.uint32))


def params_of(rng: random.Random, vocab: int, *, processors: bool = False) -> SamplingParams:
    """Random sampling parameters of any strength."""

    def some(*values: Any) -> Any:
        return rng.choice(values) if rng.random() < 0.4 else values[0]

    bias = {rng.randrange(min(vocab, FEW)): rng.choice([2.0, -5.0, 3e38, -math.inf, 1e-30]) for _ in range(4)}
    return SamplingParams(
        temperature=rng.choice([0.0, 1.0, 0.7, 1e-3, 3.0]),
        top_k=some(0, 1, 2, 20, vocab - 1, vocab, 10**6),
        top_p=some(1.0, 0.01, 0.5, 0.9, 0.95, 0.999, 0.9999999, 1 - 1e-9),
        min_p=some(0.0, 1e-3, 0.05, 0.5, 1.0),
        repetition_penalty=some(1.0, 1.1, 0.8, 3e38, 1.2e-38),
        presence_penalty=some(0.0, 0.5, -1.0, 2.0),
        frequency_penalty=some(0.0, 0.5, -1.0, 0.1),
        logit_bias=some(None, bias),
        banned_tokens=some((), tuple(rng.randrange(min(vocab, FEW)) for _ in range(3))),
        min_tokens=some(0, 1, 4, 9),
        stop_token_ids=some((), (rng.randrange(min(vocab, FEW)),)),
        logits_processors=(odd,) if processors and rng.random() < 0.3 else (),
        max_tokens=None,
    )


def rows_of(rng: random.Random, vocab: int, count: int, *, processors: bool = False) -> list[RowSampling]:
    """Random rows whose texts have few different ids, so that bad words occur and counts grow."""

    def text(least: int, most: int) -> list[int]:
        return [rng.randrange(min(vocab, FEW)) for _ in range(rng.randint(least, most))]

    rows = []
    for seq_id in range(count):
        tokens, words = text(1, 12), [text(2, 3) for _ in range(rng.choice([0, 0, 20]))]
        params, num_prompt, ends = (
            params_of(rng, vocab, processors=processors),
            rng.randint(1, len(tokens)),
            (vocab // 8,),
        )
        masks = RandomMasks(rng.getrandbits(32), vocab) if rng.random() < 0.4 else None
        seed = rng.getrandbits(64)
        rows.append(RowSampling(seq_id, params, seed, 0, tokens, num_prompt, ends, words, constraint=masks))
    return rows
