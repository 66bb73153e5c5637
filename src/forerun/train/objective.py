"""What a student learns by: the distance of its law from the target's, place by place, and how much a place counts.

A guess is accepted with the overlap of both laws as probability, the sum of min(p, q), which is 1 less the total
variation. KL teaches from far away; total variation is the aim itself, but has hardly a gradient there; LK-lambda goes
from one to the other as the laws come to overlap (2602.23881).

A draft from root r has at depth d the token d places further on. It is judged by the target's law behind the place
before that one, so of all roots and depths those count whose draft begins and ends inside the answer. This file decides
the weights: by depth, or by D-PACE, under which a place counts as much as the length of drafts depends on it (with
overlaps in the place of probabilities).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from forerun.annotations import Bool, Float, Int
from forerun.heads.student import Predictions, Student, TextBatch
from forerun.train.settings import TrainSettings

LogitsOf = Callable[[Float[Tensor, "rows hidden"]], Float[Tensor, "rows vocab"]]  # the target's, of its last states
TUNED_WEIGHT = 20.0  # of the distance of a tuned target's law from the old one, where the drafter's loss counts 1
SMOOTH = 0.5  # of D-PACE: how much of a depth's chance counts as certain
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


@dataclass(frozen=True, slots=True)
class DepthLaws:
    """Both laws at one depth, at every root of a batch, packed; `counted` are the roots whose draft gets so far."""

    depth: int
    laws: LawPair
    counted: Bool[Tensor, "batch roots"]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What a batch gave: the loss, the mean overlap of the places that count, and how many these are."""

    loss: float
    overlap: float
    num_places: int


@dataclass(frozen=True)
class Objective:
    """The loss of a student. `num_ids` are the ids that the tokenizer has; neither law has any above."""

    settings: TrainSettings
    target_logits: LogitsOf
    num_ids: int

    def depths(
        self, student: Student, predictions: Predictions, batch: TextBatch, is_exact: bool = True
    ) -> Iterator[DepthLaws]:
        """The laws of both at each depth that the student predicts. Where they need not be exact, the target's may be
        one of the draft's vocabulary alone, which its whole head is not read for."""
        roots = predictions.roots
        log_p = None if is_exact else self.draft_law(student, batch)
        log_p = self.target_law(batch, student.vocabulary, predictions.target) if log_p is None else log_p
        chosen = self.places_of(batch.tokens, student.vocabulary)
        rows = torch.arange(len(batch.texts), device=roots.device)[:, None]
        for depth, logits in enumerate(predictions.logits, start=1):
            counted = batch.inside(roots, depth - 1)
            judged = (roots + depth - 1).clamp(max=batch.read.shape[1] - 1)
            log_q = self.law_of(logits.flatten(0, 1))
            tokens = chosen[rows, judged + 1].flatten()
            laws = LawPair(log_p[rows, judged - batch.first_root].flatten(0, 1), log_q, tokens)
            yield DepthLaws(depth, laws, counted)

    def draft_depth(self, student: Student) -> int:
        """How deep drafts are taken to be."""
        return min(self.settings.draft_depth, student.most_depth or self.settings.draft_depth)

    def target_law(
        self,
        batch: TextBatch,
        vocabulary: Int[Tensor, " ids"] | None = None,
        tuned: Float[Tensor, "batch places vocab"] | None = None,
    ) -> Float[Tensor, "batch places vocab"]:
        """The target's log-law behind every token from the first root on, of the ids that the draft has. It is that of
        the tuned target where its logits are given."""
        with torch.no_grad():
            last = batch.last[:, batch.first_root :]
            logits = self.target_logits(last.flatten(0, 1)) if tuned is None else tuned.flatten(0, 1)
            law: Tensor = self.law_of(logits, vocabulary)
            return law.view(*last.shape[:2], -1)

    def draft_law(self, student: Student, batch: TextBatch) -> Float[Tensor, "batch places ids"] | None:
        """The target's log-law among the draft's tokens, as if there were no others, at the places of `target_law`."""
        with torch.no_grad():
            logits = student.target_logits(batch.last[:, batch.first_root :])
            return None if logits is None else (logits.float() / self.settings.law_temperature).log_softmax(-1)

    def tuned_distance(
        self, batch: TextBatch, tuned: Float[Tensor, "batch places vocab"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """How much the loss of the tuned target is above that of the old one, and that of the old one, in nats: means
        over the places of the answers. The losses are the expected ones under the old target's law."""
        old, new = self.target_law(batch), self.law_of(tuned.flatten(0, 1)).view(*tuned.shape[:2], -1)
        p, counted = old.exp(), batch.inside(batch.roots)
        distance, loss = (p * (old - new)).sum(-1), -(p * old).sum(-1)
        return distance[counted].mean(), loss[counted].mean()

    def law_of(
        self, logits: Float[Tensor, "rows vocab"], vocabulary: Int[Tensor, " ids"] | None = None
    ) -> Float[Tensor, "rows ids"]:
        """Log-probabilities at the temperature of the training, of all ids that a token has or of these."""
        heated = logits[:, : self.num_ids].float() / self.settings.law_temperature
        if vocabulary is None:
            return heated.log_softmax(-1)
        return heated.index_select(-1, vocabulary) - heated.logsumexp(-1, keepdim=True)

    def places_of(self, tokens: Int[Tensor, "batch longest"], vocabulary: Int[Tensor, " ids"] | None) -> Tensor:
        """The tokens by their places in the draft's vocabulary; -1 outside of it."""
        if vocabulary is None:
            return tokens
        places = torch.full((self.num_ids,), -1, device=tokens.device)
        places[vocabulary] = torch.arange(len(vocabulary), device=tokens.device)
        return places[tokens]

    def loss(
        self, student: Student, batch: TextBatch, dice: torch.Generator, name: str
    ) -> tuple[Float[Tensor, ""], StepFigures]:
        """The mean loss of the places that count, by their weights, with gradients; and what the batch gave."""
        predictions = student.predict(batch, dice)
        depths = list(self.depths(student, predictions, batch, is_exact=False))
        weights = self.weights(student, depths)
        total = torch.stack([weight.sum() for weight in weights]).sum().clamp(min=1e-9)
        losses = [
            (LOSSES[name](each.laws, each.counted.flatten()) * weight.flatten()).sum()
            for each, weight in zip(depths, weights, strict=True)
        ]
        loss = torch.stack(losses).sum() / total
        for more in predictions.more.values():
            loss = loss + more
        if predictions.target is not None:
            loss = loss + TUNED_WEIGHT * self.tuned_distance(batch, predictions.target)[0]
        if predictions.confidence:
            loss = loss + confidence_loss(predictions.confidence, depths, weights) / total
        first = depths[0]
        overlap = first.laws.overlap.detach()[first.counted.flatten()]
        return loss, StepFigures(float(loss.detach()), float(overlap.mean()), len(overlap))

    def weights(self, student: Student, found: Sequence[DepthLaws]) -> list[Float[Tensor, "batch roots"]]:
        """How much each root counts at each depth; 0 where it does not."""
        if self.settings.place_weights == "decay":
            by_depth = [w * self.settings.decay**d for d, w in enumerate(student.depth_weights)]
            return [w * each.counted for w, each in zip(by_depth, found, strict=True)]
        overlaps = [each.laws.overlap.detach().view(each.counted.shape) for each in found]
        counted = [each.counted for each in found]
        weighed = d_pace(*(deepened(values, self.draft_depth(student)) for values in (overlaps, counted)))
        return gathered(weighed, len(found))


def confidence_loss(
    estimates: Sequence[Float[Tensor, "batch roots"]],
    found: Sequence[DepthLaws],
    weights: Sequence[Float[Tensor, "batch roots"]],
) -> Float[Tensor, ""]:
    """The sum of cross-entropies between the estimates and the overlaps of the laws, which get no gradient (DSpark)."""
    losses = []
    for estimate, each, weight in zip(estimates, found, weights, strict=True):
        overlap = each.laws.overlap.detach().view(weight.shape).clamp(max=1.0)
        losses.append((binary_cross_entropy_with_logits(estimate.float(), overlap, reduction="none") * weight).sum())
    return torch.stack(losses).sum()


def d_pace(
    overlaps: Sequence[Float[Tensor, "batch roots"]], counted: Sequence[Bool[Tensor, "batch roots"]]
) -> list[Float[Tensor, "batch roots"]]:
    """By depth: the sum, over this and all deeper ones, of the chance that a draft gets there (smoothed)."""
    reached, chances = torch.ones_like(overlaps[0]), []
    for overlap, counted_here in zip(overlaps, counted, strict=True):
        reached = reached * ((1 - SMOOTH) * overlap + SMOOTH) * counted_here
        chances.append(reached)
    weights = list[Tensor]()
    for chance, counted_here in zip(reversed(chances), reversed(counted), strict=True):
        weights.append((chance + (weights[-1] if weights else 0)) * counted_here)
    return weights[::-1]


def deepened(values: Sequence[Tensor], depth: int) -> list[Tensor]:
    """Values by depth, `[batch, roots]`, for at least `depth` depths.

    A draft that gets deeper than what was predicted goes on as the deepest prediction does from a root further on.
    """
    deep = list(values)
    for _ in range(len(values), depth):
        shifted = torch.zeros_like(deep[-1])
        shifted[:, :-1] = deep[-1][:, 1:]
        deep.append(shifted)
    return deep


def gathered(weights: Sequence[Tensor], num_depths: int) -> list[Tensor]:
    """The inverse: what is deeper than the deepest prediction is added where that was made."""
    sums = list(weights[:num_depths])
    for number, weight in enumerate(weights[num_depths:], start=1):
        moved = torch.zeros_like(weight)
        moved[:, number:] = weight[:, :-number] if number < weight.shape[1] else 0
        sums[-1] = sums[-1] + moved
    return sums
