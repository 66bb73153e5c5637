"""The training objective: a divergence between the student's and the target's law, and the weight of each position.

A draft token is accepted with probability sum(min(p, q)), the overlap of both laws, which is 1 - total variation. Total
variation is the actual goal, but its gradients vanish if the laws are far apart, where KL works; LK-lambda moves from
KL to total variation as the overlap grows (2602.23881).

A draft from root r has at depth d the token d positions later. It is compared with the target's law at the position
before that token; only drafts that start and end inside the answer count. Weights are by depth, or by D-PACE, where a
position's weight is its effect on the expected number of accepted tokens (with overlaps as acceptance probabilities).
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
TUNED_WEIGHT = 20.0  # of the tuned target's KL from the original one, relative to the drafter's loss
SMOOTH = 0.5  # of D-PACE: mixes acceptance probabilities with 1
KL_FADES = 3.0  # of LK-lambda: how fast the weight of KL decays with the overlap


@dataclass(frozen=True)
class LawPair:
    """The target's law p and the draft's law q after the same texts, as log-probabilities over the draft vocabulary.

    If that is smaller than the target's, p sums to less than 1: overlaps use p as it is, divergences normalize it.
    `tokens` are the target's tokens as indices into the draft vocabulary, -1 outside of it.
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
        """The probability that rejection sampling accepts a token sampled from q."""
        return torch.minimum(self.p, self.q).sum(-1)

    @cached_property
    def kl(self) -> Float[Tensor, " rows"]:
        """KL(p || q) in nats, with p normalized."""
        log_p = self.log_p - self.log_p.logsumexp(-1, keepdim=True)
        return (log_p.exp() * (log_p - self.log_q)).sum(-1)

    @cached_property
    def cross_entropy(self) -> Float[Tensor, " rows"]:
        """Cross-entropy of the target's token; 0 if it is outside the draft vocabulary."""
        losses = -self.log_q.gather(1, self.tokens.clamp(min=0)[:, None])[:, 0]
        return torch.where(self.tokens >= 0, losses, 0.0)


Loss = Callable[[LawPair, Bool[Tensor, " rows"]], Float[Tensor, " rows"]]


def lk_lambda(laws: LawPair, counted: Bool[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """KL and total variation, mixed by the mean overlap of the counted rows, which gets no gradient."""
    mean = laws.overlap.detach()[counted].mean() if bool(counted.any()) else laws.overlap.new_zeros(())
    share = torch.exp(-KL_FADES * mean)
    return share * laws.kl + (1 - share) * (1 - laws.overlap)


def jensen_shannon(laws: LawPair, _: Bool[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """The mean of the KL divergences of p and q from their mean."""
    middle = (0.5 * (laws.p + laws.q)).clamp(min=torch.finfo(laws.p.dtype).tiny).log()
    return 0.5 * (laws.p * (laws.log_p - middle) + laws.q * (laws.log_q - middle)).sum(-1)


LOSSES: Mapping[str, Loss] = {
    "ce": lambda laws, _: laws.cross_entropy,
    "kl": lambda laws, _: laws.kl,
    "reverse-kl": lambda laws, _: (laws.q * (laws.log_q - laws.log_p)).sum(-1),  # KL(q || p), which is mode-seeking
    "jsd": jensen_shannon,
    "tv": lambda laws, _: 1 - laws.overlap,
    "lk-alpha": lambda laws, _: -laws.overlap.clamp(min=torch.finfo(laws.overlap.dtype).tiny).log(),
    "lk-lambda": lk_lambda,
    # The L1 distance is twice the total variation (2607.05147).
    "dspark": lambda laws, _: 0.1 * laws.cross_entropy + 0.9 * (laws.p - laws.q).abs().sum(-1),
}


@dataclass(frozen=True, slots=True)
class DepthLaws:
    """Both laws at one depth, for all roots of a batch; `counted`: roots whose draft is inside the answer."""

    depth: int
    laws: LawPair
    counted: Bool[Tensor, "batch roots"]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of a step: the loss, and the mean overlap of the counted positions at depth 1.

    `num_places`: their number; `weight`: the sum of the weights of all depths, of which the loss is the mean.
    """

    loss: float
    overlap: float
    num_places: int
    weight: float


@dataclass(frozen=True)
class Objective:
    """The loss of a student. `num_ids`: the number of ids of the tokenizer; padding ids above are excluded."""

    settings: TrainSettings
    target_logits: LogitsOf
    num_ids: int

    def depths(
        self, student: Student, predictions: Predictions, batch: TextBatch, is_exact: bool = True
    ) -> Iterator[DepthLaws]:
        """Both laws at each depth that the student predicts.

        Unless `is_exact`, the target's law may be normalized over the draft vocabulary, which saves the rest of the
        output matrix.
        """
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
        """The draft depth used for weights and evaluation."""
        return min(self.settings.draft_depth, student.most_depth or self.settings.draft_depth)

    def target_law(
        self,
        batch: TextBatch,
        vocabulary: Int[Tensor, " ids"] | None = None,
        tuned: Float[Tensor, "batch places vocab"] | None = None,
    ) -> Float[Tensor, "batch places vocab"]:
        """The target's log-probabilities after each token from the first root on, over the draft vocabulary.

        With `tuned` logits they are those of the tuned target.
        """
        with torch.no_grad():
            last = batch.last[:, batch.first_root :]
            logits = self.target_logits(last.flatten(0, 1)) if tuned is None else tuned.flatten(0, 1)
            law: Tensor = self.law_of(logits, vocabulary)
            return law.view(*last.shape[:2], -1)

    def draft_law(self, student: Student, batch: TextBatch) -> Float[Tensor, "batch places ids"] | None:
        """The target's log-probabilities normalized over the draft vocabulary, at the positions of `target_law`."""
        with torch.no_grad():
            logits = student.target_logits(batch.last[:, batch.first_root :])
            return None if logits is None else (logits.float() / self.settings.law_temperature).log_softmax(-1)

    def tuned_distance(
        self, batch: TextBatch, tuned: Float[Tensor, "batch places vocab"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """KL of the tuned target from the original one, and the original one's entropy: means over answers, in nats."""
        old, new = self.target_law(batch), self.law_of(tuned.flatten(0, 1)).view(*tuned.shape[:2], -1)
        p, counted = old.exp(), batch.inside(batch.roots)
        distance, loss = (p * (old - new)).sum(-1), -(p * old).sum(-1)
        return distance[counted].mean(), loss[counted].mean()

    def law_of(
        self, logits: Float[Tensor, "rows vocab"], vocabulary: Int[Tensor, " ids"] | None = None
    ) -> Float[Tensor, "rows ids"]:
        """Log-probabilities at the training's temperature, of all ids or of those in `vocabulary`."""
        heated = logits[:, : self.num_ids].float() / self.settings.law_temperature
        if vocabulary is None:
            return heated.log_softmax(-1)
        return heated.index_select(-1, vocabulary) - heated.logsumexp(-1, keepdim=True)

    def places_of(self, tokens: Int[Tensor, "batch longest"], vocabulary: Int[Tensor, " ids"] | None) -> Tensor:
        """Tokens as indices into the draft vocabulary; -1 outside of it."""
        if vocabulary is None:
            return tokens
        places = torch.full((self.num_ids,), -1, device=tokens.device)
        places[vocabulary] = torch.arange(len(vocabulary), device=tokens.device)
        return places[tokens]

    def loss(
        self, student: Student, batch: TextBatch, generator: torch.Generator, name: str
    ) -> tuple[Float[Tensor, ""], StepFigures]:
        """The weighted mean loss, with gradients, and the figures of the step."""
        predictions = student.predict(batch, generator)
        depths = list(self.depths(student, predictions, batch, is_exact=False))
        weights = self.weights(student, depths)
        total = torch.stack([weight.sum() for weight in weights]).sum().clamp(min=1e-9)
        losses = [
            (LOSSES[name](each.laws, each.counted.flatten()) * weight.flatten()).sum()
            for each, weight in zip(depths, weights, strict=True)
        ]
        loss = torch.stack(losses).sum() / total
        if predictions.target is not None:
            loss = loss + TUNED_WEIGHT * self.tuned_distance(batch, predictions.target)[0]
        if predictions.confidence:
            loss = loss + confidence_loss(predictions.confidence, depths, weights) / total
        first = depths[0]
        overlap = first.laws.overlap.detach()[first.counted.flatten()]
        return loss, StepFigures(float(loss.detach()), float(overlap.mean()), len(overlap), float(total))

    def weights(self, student: Student, depths: Sequence[DepthLaws]) -> list[Float[Tensor, "batch roots"]]:
        """The weight of each root at each depth; 0 outside the answer."""
        if self.settings.place_weights == "decay":
            by_depth = [w * self.settings.decay**d for d, w in enumerate(student.depth_weights)]
            return [w * each.counted for w, each in zip(by_depth, depths, strict=True)]
        overlaps = [each.laws.overlap.detach().view(each.counted.shape) for each in depths]
        counted = [each.counted for each in depths]
        weights = d_pace(*(deepened(values, self.draft_depth(student)) for values in (overlaps, counted)))
        return gathered(weights, len(depths))


def confidence_loss(
    estimates: Sequence[Float[Tensor, "batch roots"]],
    depths: Sequence[DepthLaws],
    weights: Sequence[Float[Tensor, "batch roots"]],
) -> Float[Tensor, ""]:
    """Weighted cross-entropy between the confidence estimates and the overlaps, which get no gradient (DSpark)."""
    losses = []
    for estimate, each, weight in zip(estimates, depths, weights, strict=True):
        overlap = each.laws.overlap.detach().view(weight.shape).clamp(max=1.0)
        losses.append((binary_cross_entropy_with_logits(estimate.float(), overlap, reduction="none") * weight).sum())
    return torch.stack(losses).sum()


def d_pace(
    overlaps: Sequence[Float[Tensor, "batch roots"]], counted: Sequence[Bool[Tensor, "batch roots"]]
) -> list[Float[Tensor, "batch roots"]]:
    """Weights by depth: the sum over this depth and all deeper ones of the smoothed probability of reaching them."""
    reached, chances = torch.ones_like(overlaps[0]), []
    for overlap, counted_here in zip(overlaps, counted, strict=True):
        reached = reached * ((1 - SMOOTH) * overlap + SMOOTH) * counted_here
        chances.append(reached)
    weights = list[Tensor]()
    for chance, counted_here in zip(reversed(chances), reversed(counted), strict=True):
        weights.append((chance + (weights[-1] if weights else 0)) * counted_here)
    return weights[::-1]


def deepened(values: Sequence[Tensor], depth: int) -> list[Tensor]:
    """Values by depth, `[batch, roots]`, extended to at least `depth` depths.

    Beyond the deepest prediction, a draft continues as the deepest prediction from a later root.
    """
    deep = list(values)
    for _ in range(len(values), depth):
        shifted = torch.zeros_like(deep[-1])
        shifted[:, :-1] = deep[-1][:, 1:]
        deep.append(shifted)
    return deep


def gathered(weights: Sequence[Tensor], num_depths: int) -> list[Tensor]:
    """The transpose of `deepened`: weights of deeper depths are added to the prediction that they repeat."""
    sums = list(weights[:num_depths])
    for number, weight in enumerate(weights[num_depths:], start=1):
        moved = torch.zeros_like(weight)
        moved[:, number:] = weight[:, :-number] if number < weight.shape[1] else 0
        sums[-1] = sums[-1] + moved
    return sums
