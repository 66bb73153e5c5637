"""Winners: the argmax of logits plus noise, without computing noise that cannot matter.

For a large vocabulary the noise is the main cost of sampling, and nearly all of it belongs to tokens that cannot win.
Only one id in 512 has noise above QUIET, and its hash alone shows it. Any other token can win only if its logit is
within QUIET of a score that is already known, and few have such a logit. So some hundred of 150,000 tokens are
examined, and the winner is, bit for bit, the argmax over all of them.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.device import is_cpu
from forerun.sampling.noise import FAINTEST, QUIET, gumbel, gumbel_at, loud_ids

LEAST_VOCAB = 16_384  # for a smaller vocabulary, computing all noise takes no longer than this search
SLACK = 2.0**-4  # bound of the rounding errors of noise
FEW = 8  # up to this many largest scores are found by repeated argmax
ROUNDING = 2.0**-20  # bound of a score's relative rounding error: several units in the last place of float32


def first_largest(scores: Float[Tensor, "rows vocab"]) -> Int[Tensor, "rows 1"]:
    """The index of each row's largest element, the first among equals, of a NaN if there is one: torch's argmax.

    On CPUs computed by numpy, which takes a twentieth of the time.
    """
    if scores.device.type != "cpu" or not scores.numel():
        return scores.argmax(1, keepdim=True)
    return torch.from_numpy(scores.detach().numpy().argmax(1))[:, None]


def point_mass(logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """The law of greedy rows: probability 1 at the largest logit, the lowest id among equals; NaN there if no logit is
    above -inf."""
    first = first_largest(logits)
    mass = torch.where(logits.gather(1, first) > -math.inf, 1.0, math.nan).to(logits.dtype)
    return torch.zeros_like(logits).scatter_(1, first, mass)


def without_nan(logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """Logits with NaN replaced by -inf, and infinity by the largest finite number."""
    if logits.device.type == "cpu" and logits.amax(1).isfinite().all().numpy():  # on a GPU this would wait for it
        return logits
    return logits.nan_to_num(nan=-math.inf, posinf=torch.finfo(logits.dtype).max, neginf=-math.inf)


def largest(scores: Float[Tensor, "nodes vocab"], width: int) -> Int[Tensor, "nodes width"]:
    """The ids of the `width` largest scores of each row in falling order, ties to the lowest id.

    If fewer than `width` scores are above -inf, the last ids are arbitrary. A few ids are found by repeated argmax:
    topk does not define which of equal scores it returns, and a stable sort of the entire vocabulary takes longer.
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
    """`largest` for many ids: on CPUs only scores that are not below the last of them are sorted."""
    if not is_cpu(scores.device):
        return scores.sort(dim=1, descending=True, stable=True).indices[:, :width]
    least = scores.topk(width, dim=1).values[:, -1:]
    ids = []
    for row, is_large in zip(scores.detach().numpy(), (~(scores < least)).numpy(), strict=True):
        large = np.flatnonzero(is_large)
        ids.append(large[np.argsort(-row[large], kind="stable")[:width]])
    return torch.from_numpy(np.array(ids, dtype=np.int64).reshape(len(scores), width))


class RoundNoise:
    """Gumbel noise by key. On CPUs it is cached, since drafter and target need the same noise in a round."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self._made: dict[int, Tensor] = {}
        self._loud: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def searches(self) -> bool:
        """Whether winners are found without computing all noise."""
        return self.device.type == "cpu" and self.vocab >= LEAST_VOCAB

    def prepare(self, keys: Int[Tensor, " rows"]) -> None:
        """Compute and cache the noise of these keys, if computing it at once is faster."""
        if self.device.type == "cpu" and not self.searches:
            self.rows(keys)

    def rows(self, keys: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """The noise of all ids, for each key."""
        if self.device.type != "cpu":
            return gumbel(keys, self.vocab)
        host_keys: list[int] = keys.tolist()
        missing = [key for key in dict.fromkeys(host_keys) if key not in self._made]
        if missing or not host_keys:
            made = gumbel(torch.tensor(missing, dtype=torch.int64), self.vocab)
            self._made |= zip(missing, made.unbind(0), strict=True)
            if missing == host_keys:
                return made
        return torch.stack([self._made[key] for key in host_keys])

    def winners(self, logits: Float[Tensor, "rows vocab"], keys: Int[Tensor, " rows"]) -> Int[Tensor, "rows 1"]:
        """The argmax of `logits + rows(keys)`, the first among equals."""
        if not self.searches or not len(keys) or not (peak := logits.amax(1)).isfinite().all():
            return first_largest(logits + self.rows(keys))
        row, ids, noise = self.loud(keys)
        loud = logits[row, ids] + noise
        known_best = (peak + FAINTEST).scatter_reduce_(0, row, loud, "amax")
        least = known_best - (QUIET + SLACK) - ROUNDING * known_best.abs()
        near = np.flatnonzero(logits.detach().numpy() >= least.numpy()[:, None])  # in a tenth of torch's time
        near_row = near // self.vocab
        near_ids = torch.from_numpy(near - near_row * self.vocab)
        row, ids = torch.cat([row, torch.from_numpy(near_row)]), torch.cat([ids, near_ids])
        quiet = logits.take(torch.from_numpy(near)) + gumbel_at(keys[row[len(loud) :]], near_ids, self.vocab)
        return first_of_rows(torch.cat([loud, quiet]), row, ids, len(keys))

    def loud(self, keys: Int[Tensor, " rows"]) -> tuple[Tensor, Tensor, Tensor]:
        """(row, id, noise) of all ids whose noise under these keys may be above QUIET."""
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
    """The id of the largest score among each row's pairs, the lowest id among equals; every row has a pair."""
    best = scores.new_full((rows,), -torch.inf).scatter_reduce_(0, row, scores, "amax")
    most = torch.iinfo(ids.dtype).max
    first = ids.new_full((rows,), most).scatter_reduce_(0, row, torch.where(scores == best[row], ids, most), "amin")
    return first[:, None]
