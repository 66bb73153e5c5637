"""One round's noise, computed once and only where it can matter, and the tokens that win with it.

This file decides which noise is computed. Over a large vocabulary the noise is the main cost of a draw, and nearly all
of it belongs to tokens that cannot win. Noise above QUIET belongs to one id in 512, which the hash alone identifies.
Every other token needs a logit within QUIET of a score that was already found, and few have one. So some hundred of
150,000 tokens are examined, and the winner is, bit for bit, the one that all the noise would give.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.device import is_cpu
from forerun.sampling.noise import FAINTEST, QUIET, gumbel, gumbel_at, loud_ids

LEAST_VOCAB = 16_384  # below, all noise costs no more than looking for what may win
SLACK = 2.0**-4  # for the rounding of noise
FEW = 8  # largest scores that are looked for one after the other
ROUNDING = 2.0**-20  # for the rounding of a score, in parts of it: several units in the last place of float32


def first_largest(scores: Float[Tensor, "rows vocab"]) -> Int[Tensor, "rows 1"]:
    """Each row's largest element, the first among equals, a NaN if there is one: torch's argmax.

    On CPUs by numpy, which takes a twentieth of the time.
    """
    if scores.device.type != "cpu" or not scores.numel():
        return scores.argmax(1, keepdim=True)
    return torch.from_numpy(scores.detach().numpy().argmax(1))[:, None]


def all_on_largest(logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """The law of greedy rows: all on the largest logit, the lowest id among equals; NaN there if that is none."""
    first = first_largest(logits)
    there = torch.where(logits.gather(1, first) > -math.inf, 1.0, math.nan).to(logits.dtype)
    return torch.zeros_like(logits).scatter_(1, first, there)


def tamed(logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """Logits with NaN as -inf and infinity as the largest number, so that only -inf is impossible."""
    if logits.device.type == "cpu" and logits.amax(1).isfinite().all().numpy():  # elsewhere it would be waited for
        return logits
    return logits.nan_to_num(nan=-math.inf, posinf=torch.finfo(logits.dtype).max, neginf=-math.inf)


def largest(scores: Float[Tensor, "nodes vocab"], width: int) -> Int[Tensor, "nodes width"]:
    """The ids of the `width` largest scores of each row in falling order, ties to the lowest id.

    A few by repeated argmax: topk does not say which of equals it takes, and a stable sort of a whole vocabulary costs
    more than a handful of passes over it. Where fewer than `width` are above -inf, what follows them is any id.
    """
    if width <= 1:
        return first_largest(scores)[:, :width]
    if width > FEW:
        return many_largest(scores, width)
    scores, ids = scores.clone(), []
    for _ in range(width):
        ids.append(first_largest(scores))
        scores.scatter_(1, ids[-1], -math.inf)
    return torch.cat(ids, 1)


def many_largest(scores: Float[Tensor, "nodes vocab"], width: int) -> Int[Tensor, "nodes width"]:
    """What `largest` gives, for many ids: on CPUs only what is not below the last of them is sorted."""
    if not is_cpu(scores.device):
        return scores.sort(dim=1, descending=True, stable=True).indices[:, :width]
    least = scores.topk(width, dim=1).values[:, -1:]
    ids = []
    for row, reached in zip(scores.detach().numpy(), (~(scores < least)).numpy(), strict=True):
        near = np.flatnonzero(reached)
        ids.append(near[np.argsort(-row[near], kind="stable")[:width]])
    return torch.from_numpy(np.array(ids, dtype=np.int64).reshape(len(scores), width))


class RoundNoise:
    """Gumbel noise by key. Siblings, the drafter's steps and the target's pass ask for the same: on CPUs it is kept."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self._made: dict[int, Tensor] = {}
        self._loud: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def searches(self) -> bool:
        """Whether winners are found without making all noise."""
        return self.device.type == "cpu" and self.vocab >= LEAST_VOCAB

    def prepare(self, keys: Int[Tensor, " rows"]) -> None:
        """Make at once what will be asked for, where it is cheaper so."""
        if self.device.type == "cpu" and not self.searches:
            self.rows(keys)

    def rows(self, keys: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """All noise under every key."""
        if self.device.type != "cpu":
            return gumbel(keys, self.vocab)
        asked: list[int] = keys.tolist()
        missing = [key for key in dict.fromkeys(asked) if key not in self._made]
        if missing or not asked:
            made = gumbel(torch.tensor(missing, dtype=torch.int64), self.vocab)
            self._made |= zip(missing, made.unbind(0), strict=True)
            if missing == asked:
                return made
        return torch.stack([self._made[key] for key in asked])

    def winners(self, logits: Float[Tensor, "rows vocab"], keys: Int[Tensor, " rows"]) -> Int[Tensor, "rows 1"]:
        """The first largest of `logits + rows(keys)`, to the bit."""
        if not self.searches or not len(keys):
            return first_largest(logits + self.rows(keys))
        peak = logits.amax(1)
        if not peak.isfinite().all():
            return first_largest(logits + self.rows(keys))
        row, ids, noise = self.loud(keys)
        loud = logits[row, ids] + noise
        reached = (peak + FAINTEST).scatter_reduce_(0, row, loud, "amax")
        least = reached - (QUIET + SLACK) - ROUNDING * reached.abs()
        near = np.flatnonzero(logits.detach().numpy() >= least.numpy()[:, None])  # a tenth of the time of torch's
        near_row = near // self.vocab
        near_ids = torch.from_numpy(near - near_row * self.vocab)
        row, ids = torch.cat([row, torch.from_numpy(near_row)]), torch.cat([ids, near_ids])
        quiet = logits.take(torch.from_numpy(near)) + gumbel_at(keys[row[len(loud) :]], near_ids, self.vocab)
        return first_of_rows(torch.cat([loud, quiet]), row, ids, len(keys))

    def loud(self, keys: Int[Tensor, " rows"]) -> tuple[Tensor, Tensor, Tensor]:
        """(row, id, noise) of all that may be loud under these keys."""
        parts = []
        for i, key in enumerate(keys.tolist()):
            if key not in self._loud:
                ids = loud_ids(key, self.vocab)
                self._loud[key] = ids, gumbel_at(keys[i].expand(len(ids)), ids, self.vocab)
            parts.append(self._loud[key])
        sizes = torch.tensor([len(ids) for ids, _ in parts])
        row = torch.arange(len(parts)).repeat_interleave(sizes)
        return row, torch.cat([ids for ids, _ in parts]), torch.cat([noise for _, noise in parts])


def first_of_rows(
    scores: Float[Tensor, " pairs"], row: Int[Tensor, " pairs"], ids: Int[Tensor, " pairs"], rows: int
) -> Int[Tensor, "rows 1"]:
    """Of each row's pairs the one with the largest score, the lowest id among equals; every row has a pair."""
    best = scores.new_full((rows,), -torch.inf).scatter_reduce_(0, row, scores, "amax")
    most = torch.iinfo(ids.dtype).max
    first = ids.new_full((rows,), most).scatter_reduce_(0, row, torch.where(scores == best[row], ids, most), "amin")
    return first[:, None]
