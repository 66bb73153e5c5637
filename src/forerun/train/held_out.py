"""Evaluation of a student on held-out answers: its acceptance with coupled verification, computed without drafting.

The target's answers and their sampling seeds are known, so the tokens that the drafter would draft after any root are
known too: they are sampled from its own law with the target's noise. Rounds are replayed with these drafts at each
depth, each round starting where the one before ended, so acceptance by depth equals that of coupled verification. The
overlap of both laws is a smoother measure, which decides early stopping.

Drafters with parallel heads also get a static tree, for requests that fix the tree. The accuracy of the r-th most
likely token at each depth is counted on these answers, a path's value is the product of these accuracies, and nodes are
added greedily by value, as in Medusa (2401.10774, section 2.3.3).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forerun.annotations import Float, Int, ProgressCallback
from forerun.heads.student import Student, TargetText, TextBatch
from forerun.sampling.draws import Draws, PathState, RowSampling
from forerun.shape import RankPath, StaticTree
from forerun.train.objective import Objective, deepened
from forerun.tune.predict import DraftOutcome, TextRounds, acceptance_at_depth

TREE = "tree.json"
MOST_CHILDREN, NUM_NODES = 8, 16


@dataclass(frozen=True, slots=True)
class HeldOutFigures:
    """`acceptance_at_depth[j - 1]` is P(token j accepted | those before are); `tokens_per_round` is by depth, from 1.

    `overlap` is the mean of the sum of min(p, q) over the positions in the loss. `target_rise` is the relative increase
    of the loss of a target that is tuned too; None for a fixed target.
    """

    overlap: float
    acceptance_at_depth: tuple[float, ...]
    tokens_per_round: tuple[float, ...]
    target_rise: float | None = None

    def as_object(self) -> dict[str, Any]:
        """The figures as a JSON object; `HeldOutFigures(**...)` is the inverse."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@torch.no_grad()
def judge_held_out(
    objective: Objective, student: Student, texts: Sequence[TargetText], progress: ProgressCallback
) -> HeldOutFigures:
    """Evaluate a student on these answers."""
    overlaps, weights, replayed, distances = 0.0, 0.0, list[TextRounds](), list[tuple[Tensor, Tensor]]()
    deepest = objective.draft_depth(student)
    for number, text in enumerate(texts):
        progress("evaluating held-out answers", number / len(texts))
        batch = TextBatch.of([text])
        predictions = student.predict(batch, None)
        laws = list(objective.depths(student, predictions, batch))
        for each, weight in zip(laws, objective.weights(student, laws), strict=True):
            overlaps += float((each.laws.overlap * weight.flatten()).sum())
            weights += float(weight.sum())
        if predictions.target is not None:
            distances.append(objective.tuned_distance(batch, predictions.target))
        ranks = [ranks_of(objective, student, text, each, d, 1) for d, each in enumerate(predictions.logits, start=1)]
        hits = deepened([(each == 0)[None] for each in ranks], deepest)[:deepest]
        replayed.append(rounds_of([each[0].tolist() for each in hits], len(text.roots), text.is_cut))
    figures = figures_of(overlaps / max(1e-9, weights), replayed, deepest)
    above, before = (sum(map(float, column)) for column in zip(*distances, strict=True)) if distances else (0.0, 0.0)
    return replace(figures, target_rise=above / max(1e-9, before)) if distances else figures


def ranks_of(
    objective: Objective,
    student: Student,
    text: TargetText,
    logits: Float[Tensor, "1 roots vocab"],
    depth: int,
    width: int,
) -> Int[Tensor, " roots"]:
    """The rank of the text's token among `width` draft tokens at this depth, after each root; -1 if it is not drafted.

    `logits` are over the student's vocabulary.
    """
    rows, count = logits[0], len(text.roots)
    if student.vocabulary is not None:
        rows = rows.new_full((len(rows), objective.num_ids), -torch.inf).index_copy(-1, student.vocabulary, rows)
    row = RowSampling(0, objective.settings.sampling(text.seed), text.seed, 0, text.tokens, text.num_prompt)
    draws = Draws([row], rows.shape[1], num_ids=objective.num_ids, device=rows.device)
    position = torch.arange(count, device=rows.device) + text.num_prompt - 1 + depth
    at = PathState(torch.zeros_like(position), position.new_empty(count, 0), position)
    draft_tokens = draws.children(rows[:count].float(), at, width, survival=False).tokens
    tokens = torch.tensor([*text.tokens, *[-2] * depth], device=rows.device)  # nothing is accepted after the end
    hits = draft_tokens == tokens[position][:, None]
    return torch.where(hits.any(-1), hits.int().argmax(-1), -1)


def rounds_of(hits: Sequence[Sequence[bool]], num_tokens: int, is_cut: bool) -> TextRounds:
    """The rounds of an answer of `num_tokens`; `hits[depth][root]`: whether the draft token is the target's token.

    The last token of a truncated answer is never drafted, because the answer ends with it in any case.
    """
    places = []
    for root in range(num_tokens):
        most = num_tokens - root - is_cut
        right = next((depth for depth, at_depth in enumerate(hits) if not at_depth[root]), len(hits))
        places.append([DraftOutcome(min(d, most), min(d, most, right)) for d in range(1, len(hits) + 1)])
    return TextRounds("", 0, num_tokens, places)


def figures_of(overlap: float, texts: Sequence[TextRounds], depth: int) -> HeldOutFigures:
    """Acceptance from rounds of this depth, and tokens per round at every depth up to it."""
    per_round = []
    for each in range(1, depth + 1):
        rounds = [outcome.accepted for text in texts for outcome in text.at_depth(each)]
        per_round.append(1 + sum(rounds) / max(1, len(rounds)))
    return HeldOutFigures(overlap, acceptance_at_depth(texts, depth, least=1), tuple(per_round))


@torch.no_grad()
def accuracies(objective: Objective, student: Student, texts: Sequence[TargetText]) -> list[list[float]]:
    """[depth][rank]: the share of positions where the draft token of this rank is the target's token."""
    counts, places = list[Tensor](), list[int]()
    for text in texts:
        predictions = student.predict(TextBatch.of([text]), None)
        for d, logits in enumerate(predictions.logits):
            ranks = ranks_of(objective, student, text, logits, d + 1, MOST_CHILDREN)
            judged = ranks[: max(0, len(text.roots) - d)]
            if d == len(counts):
                counts.append(torch.zeros(MOST_CHILDREN, dtype=torch.long))
                places.append(0)
            counts[d] += torch.bincount(judged[judged >= 0].cpu(), minlength=MOST_CHILDREN)
            places[d] += len(judged)
    return [(count / max(1, num)).tolist() for count, num in zip(counts, places, strict=True)]


def likeliest_tree(accuracy: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """The tree of the `num_nodes` paths with the greatest products of accuracies, by depth and rank."""
    heap: list[tuple[float, int, RankPath]] = [(-share, 1, (rank,)) for rank, share in enumerate(accuracy[0])]
    heapq.heapify(heap)
    chosen: list[RankPath] = []
    while heap and len(chosen) < num_nodes:
        minus, depth, path = heapq.heappop(heap)
        chosen.append(path)
        if depth < len(accuracy):
            for rank, share in enumerate(accuracy[depth]):
                heapq.heappush(heap, (minus * share, depth + 1, (*path, rank)))
    return StaticTree(chosen)
