"""What a student learns by: the distance between its law and the target's, with acceptance as the aim.

A guess is accepted with the overlap of both laws as probability, the sum of min(p, q), which is 1 less the total
variation. KL teaches from far away; total variation is the aim itself, but has hardly a gradient there; LK-lambda goes
from one to the other as the laws come to overlap (2602.23881). This file holds the table of losses, row by row. Which
rows count, and how much, is decided in `objective.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from forerun.annotations import Bool, Float, Int

KL_FADES = 3.0  # how fast LK-lambda leaves KL behind as the overlap grows


@dataclass(frozen=True)
class LawPair:
    """The target's law p and the draft's law q after the same texts, as log-probabilities over the draft's vocabulary.

    Where that is a part of the target's, the mass of p there is below 1: overlaps are of p as it is, divergences of p
    made to sum to 1. `tokens` are what the target chose, by their places in the draft's vocabulary, -1 outside of it.
    """

    log_p: Float[Tensor, "rows vocab"]
    log_q: Float[Tensor, "rows vocab"]
    tokens: Int[Tensor, " rows"]

    @cached_property
    def p(self) -> Float[Tensor, "rows vocab"]:
        return self.log_p.exp()

    @cached_property
    def q(self) -> Float[Tensor, "rows vocab"]:
        return self.log_q.exp()

    @cached_property
    def overlap(self) -> Float[Tensor, " rows"]:
        """The chance that rejection sampling accepts a guess drawn from q."""
        return torch.minimum(self.p, self.q).sum(-1)

    @cached_property
    def kl(self) -> Float[Tensor, " rows"]:
        """KL(p || q) in nats, p made to sum to 1."""
        log_p = self.log_p - self.log_p.logsumexp(-1, keepdim=True)
        return (log_p.exp() * (log_p - self.log_q)).sum(-1)

    @cached_property
    def cross_entropy(self) -> Float[Tensor, " rows"]:
        """Of the token that the target chose; 0 where the draft's vocabulary does not have it."""
        losses = -self.log_q.gather(1, self.tokens.clamp(min=0)[:, None])[:, 0]
        return torch.where(self.tokens >= 0, losses, 0.0)


Loss = Callable[[LawPair, Bool[Tensor, " rows"]], Float[Tensor, " rows"]]


def lk_lambda(laws: LawPair, counted: Bool[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """KL and total variation, mixed by the mean overlap of the rows that count, which has no gradient."""
    mean = laws.overlap.detach()[counted].mean() if bool(counted.any()) else laws.overlap.new_zeros(())
    share = torch.exp(-KL_FADES * mean)
    return share * laws.kl + (1 - share) * (1 - laws.overlap)


def jensen_shannon(laws: LawPair, _: Bool[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """The mean of the divergences of p and of q from their mean."""
    middle = (0.5 * (laws.p + laws.q)).clamp(min=torch.finfo(laws.p.dtype).tiny).log()
    return 0.5 * (laws.p * (laws.log_p - middle) + laws.q * (laws.log_q - middle)).sum(-1)


def reverse_kl(laws: LawPair, _: Bool[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """KL(q || p), which seeks a mode of p and leaves out what q cannot reach."""
    return (laws.q * (laws.log_q - laws.log_p)).sum(-1)


def dspark(laws: LawPair, _: Bool[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """A tenth of cross-entropy and nine tenths of the L1 distance, which is twice the total variation (2607.05147)."""
    return 0.1 * laws.cross_entropy + 0.9 * (laws.p - laws.q).abs().sum(-1)


LOSSES: Mapping[str, Loss] = {
    "ce": lambda laws, _: laws.cross_entropy,
    "kl": lambda laws, _: laws.kl,
    "reverse-kl": reverse_kl,
    "jsd": jensen_shannon,
    "tv": lambda laws, _: 1 - laws.overlap,
    "lk-alpha": lambda laws, _: -laws.overlap.clamp(min=torch.finfo(laws.overlap.dtype).tiny).log(),
    "lk-lambda": lk_lambda,
    "dspark": dspark,
}
