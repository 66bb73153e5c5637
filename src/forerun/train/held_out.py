"""What a student is worth, judged on held-out answers as serving would judge it.

The target's answers are there, with the seeds of their draws, so the guess that a drafter would have made behind any
root is known: the draw from its own law under the very noise of the target's. Rounds are replayed on these guesses at
each depth. They begin where rounds of an engine would begin, behind what the last one gave, so acceptance by depth is
what `coupled` verification will show. The overlap of both laws is smoother; it decides when to stop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forerun.annotations import ProgressCallback
from forerun.heads.student import Student, TargetText, TextBatch
from forerun.sampling.draws import Draws, PathState, RowSampling
from forerun.train.objective import Objective, deepened

Hits = Sequence[Sequence[bool]]  # by depth and then by root: whether the guess is what the target drew


@dataclass(frozen=True, slots=True)
class ReplayedText:
    """One answer's guesses: which of them the target drew too, from the first root on, and what limits rounds."""

    hits: Hits
    num_tokens: int  # of the answer
    is_cut: bool

    def rounds(self, depth: int) -> list[tuple[int, int]]:
        """(guesses, accepted ones) of each round; the first token comes from reading the prompt, without guesses."""
        found, root = [], 1
        while root < self.num_tokens:
            left = self.num_tokens - root
            guesses = min(depth, left - 1) if self.is_cut else min(depth, left)
            accepted = 0
            while accepted < guesses and self.hits[accepted][root]:
                accepted += 1
            found.append((guesses, accepted))
            root += accepted + 1
        return found


@dataclass(frozen=True, slots=True)
class HeldOutFigures:
    """`acceptance_at_depth[j - 1]` is P(guess j accepted | those before it were); `tokens_per_round` by depth, from 1.

    `overlap` is the mean of the sum of min(p, q) at the places that the loss counts. `target_rise` is the share by
    which the loss of a target that is tuned too is above the old one's; None for one that stays as it is.
    """

    overlap: float
    acceptance_at_depth: tuple[float, ...]
    tokens_per_round: tuple[float, ...]
    target_rise: float | None = None

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        told = {
            "overlap": self.overlap,
            "acceptance_at_depth": list(self.acceptance_at_depth),
            "tokens_per_round": list(self.tokens_per_round),
        }
        return told if self.target_rise is None else told | {"target_rise": self.target_rise}

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> HeldOutFigures:
        """The inverse."""
        rates, tokens = tuple(found["acceptance_at_depth"]), tuple(found["tokens_per_round"])
        return cls(found["overlap"], rates, tokens, found.get("target_rise"))


@torch.no_grad()
def judge_held_out(
    objective: Objective, student: Student, texts: Sequence[TargetText], progress: ProgressCallback
) -> HeldOutFigures:
    """The figures of a student on these answers."""
    overlaps, weights, replayed, distances = 0.0, 0.0, list[ReplayedText](), list[tuple[Tensor, Tensor]]()
    deepest = objective.draft_depth(student)
    for number, text in enumerate(texts):
        progress("judging held-out answers", number / len(texts))
        batch = TextBatch.of([text])
        predictions = student.predict(batch, None)
        found = list(objective.depths(student, predictions, batch))
        for each, own in zip(found, objective.weights(student, found), strict=True):
            overlaps += float((each.laws.overlap * own.flatten()).sum())
            weights += float(own.sum())
        if predictions.target is not None:
            distances.append(objective.tuned_distance(batch, predictions.target))
        hits = []
        for depth, logits in enumerate(predictions.logits, start=1):
            hits.append(guessed(objective, text, spread(objective, student, logits)[0].float(), depth))
        own_hits = [row.tolist() for row in deepened(hits, deepest)][:deepest]
        replayed.append(ReplayedText([row[0] for row in own_hits], len(text.roots), text.is_cut))
    figures = figures_of(overlaps / max(1e-9, weights), replayed, deepest)
    above, before = (sum(map(float, column)) for column in zip(*distances, strict=True)) if distances else (0.0, 0.0)
    return replace(figures, target_rise=above / max(1e-9, before)) if distances else figures


def spread(objective: Objective, student: Student, logits: torch.Tensor) -> torch.Tensor:
    """Logits over the target's ids, -inf where the student has no such token."""
    if student.vocabulary is None:
        return logits
    whole = logits.new_full((*logits.shape[:-1], objective.num_ids), -torch.inf)
    return whole.index_copy(-1, student.vocabulary, logits)


def guessed(objective: Objective, text: TargetText, logits: torch.Tensor, depth: int) -> torch.Tensor:
    """Whether the guess at this depth, behind each root, is the text's token.  # [1, roots]"""
    return (ranked(objective, text, logits, depth, 1) == 0)[None]


def ranked(objective: Objective, text: TargetText, logits: torch.Tensor, depth: int, width: int) -> torch.Tensor:
    """Which of `width` guesses at this depth, behind each root, is the text's token; -1 where none is.  # [roots]"""
    count = len(text.roots)
    params = objective.settings.sampling(text.seed)
    row = RowSampling(0, params, text.seed, 0, text.tokens, text.num_prompt)
    draws = Draws([row], logits.shape[1], num_ids=objective.num_ids, device=logits.device)
    position = torch.arange(count, device=logits.device) + text.num_prompt - 1 + depth
    at = PathState(torch.zeros_like(position), position.new_empty(count, 0), position)
    tokens = draws.children(logits[:count], at, width, survival=False).tokens
    told = torch.tensor([*text.tokens, *[-2] * depth], device=logits.device)  # nothing is guessed right behind the end
    hits = tokens == told[position][:, None]
    return torch.where(hits.any(-1), hits.int().argmax(-1), -1)


def figures_of(overlap: float, texts: Sequence[ReplayedText], depth: int) -> HeldOutFigures:
    """Acceptance from rounds at the full depth, and tokens per round at every depth up to it."""
    offered, accepted = [0] * depth, [0] * depth
    for guesses, num in (each for text in texts for each in text.rounds(depth)):
        for j in range(min(guesses, num + 1)):
            offered[j] += 1
            accepted[j] += j < num
    rates = [a / o for a, o in zip(accepted, offered, strict=True) if o]
    per_round = []
    for each in range(1, depth + 1):
        rounds = [num for text in texts for _, num in text.rounds(each)]
        per_round.append(1 + sum(rounds) / max(1, len(rounds)))
    return HeldOutFigures(overlap, tuple(rates), tuple(per_round))
