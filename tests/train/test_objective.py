"""Which positions count and how much, by brute force; drafts deeper than the predictions."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from forerun.heads.student import Predictions, Student, TargetText, TextBatch
from forerun.train.objective import LOSSES, SMOOTH, TUNED_WEIGHT, Objective, confidence_loss, d_pace, deepened, gathered
from forerun.train.settings import TrainSettings

VOCAB, HIDDEN = 11, 4
HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))


def text_of(num_prompt: int, num_tokens: int, seed: int) -> TargetText:
    dice = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (num_tokens,), generator=dice).tolist()
    states = torch.randn(num_tokens - 1, HIDDEN, generator=dice)
    return TargetText(tuple(tokens), num_prompt, seed, states[:, None], states)


class Fixed(Student):
    """A student with given logits at two depths."""

    @override
    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        generator = torch.Generator().manual_seed(7)
        size = VOCAB if self.vocabulary is None else len(self.vocabulary)
        shape = (*batch.roots.shape, size)
        return Predictions([torch.randn(shape, generator=generator) for _ in range(2)], batch.roots)


@pytest.mark.parametrize("vocabulary", [None, torch.tensor([1, 2, 5, 9])], ids=["whole", "part"])
def test_each_depth_is_compared_with_the_distribution_and_token_that_follow(vocabulary: Tensor | None) -> None:
    settings = TrainSettings(steps=1, loss="ce", temperature=0.5, decay=0.5)
    objective, student = (
        Objective(settings, lambda states: states @ HEAD.T, VOCAB),
        Fixed(values={}, dtype=torch.float32, weights={}, depth_weights=(1.0, 0.5), vocabulary=vocabulary),
    )
    texts = [text_of(3, 8, 1), text_of(2, 5, 2)]
    batch = TextBatch.of(texts)
    predictions = student.predict(batch, None)
    places = list(range(VOCAB)) if vocabulary is None else vocabulary.tolist()
    total, weight, overlaps = 0.0, 0.0, []
    for depth, each in zip((1, 2), objective.depths(student, predictions, batch), strict=True):
        laws = each.laws
        assert each.depth == depth
        for b, text in enumerate(texts):
            for r, root in enumerate(range(1, 7)):
                counts = text.num_prompt - 1 <= root and root + depth <= len(text.tokens) - 1
                assert bool(each.counted[b, r]) == counts
                if not counts:
                    continue
                row = b * 6 + r
                law = (text.last[root + depth - 1] @ HEAD.T / 0.5).log_softmax(-1)[places]
                assert torch.allclose(laws.log_p[row], law, atol=1e-6)
                log_q = (predictions.logits[depth - 1][b, r] / 0.5).log_softmax(-1)
                assert torch.allclose(laws.log_q[row], log_q, atol=1e-6)
                token = text.tokens[root + depth]
                assert int(laws.tokens[row]) == (places.index(token) if token in places else -1)
                own = (1.0, 0.5)[depth - 1] * 0.5 ** (depth - 1)
                weight += own
                total -= own * (float(log_q[places.index(token)]) if token in places else 0.0)
                if depth == 1:
                    overlaps.append(float(torch.minimum(law.exp(), log_q.exp()).sum()))
    loss, figures = objective.loss(student, batch, torch.Generator(), "ce")
    assert float(loss) == pytest.approx(total / weight, rel=1e-5)
    assert figures.overlap == pytest.approx(sum(overlaps) / len(overlaps), rel=1e-5)
    assert figures.num_places == len(overlaps)
    assert figures.weight == pytest.approx(weight)


class Extended(Fixed):
    """With confidence estimates and a tuned target."""

    @override
    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        generator, shape = torch.Generator().manual_seed(8), batch.roots.shape
        confidence = [torch.randn(shape, generator=generator) for _ in range(2)]
        tuned = torch.randn(*shape, VOCAB, generator=generator)
        return replace(super().predict(batch, dice), confidence=confidence, target=tuned)


def test_losses_of_confidence_and_the_distance_of_a_tuned_target_are_added_by_brute_force() -> None:
    settings = TrainSettings(steps=1, decay=0.5, temperature=0.7)
    objective = Objective(settings, lambda states: states @ HEAD.T, VOCAB)
    student = Extended(values={}, dtype=torch.float32, weights={}, depth_weights=(1.0, 0.8))
    texts = [text_of(3, 8, 1), text_of(2, 5, 2)]
    batch = TextBatch.of(texts)
    predictions = student.predict(batch, None)
    assert predictions.target is not None
    laws = list(objective.depths(student, predictions, batch))
    entropies, distances, terms, weights = [], [], [], []
    for b, text in enumerate(texts):
        for root in text.roots:
            old, new = ((x / 0.7).log_softmax(-1) for x in (text.last[root] @ HEAD.T, predictions.target[b, root - 1]))
            distances.append(float((old.exp() * (old - new)).sum()))
            entropies.append(-float((old.exp() * old).sum()))
            for d, weight in enumerate((1.0, 0.4)):
                if root + d in text.roots:
                    overlap, guess = (
                        float(laws[d].laws.overlap[b * 6 + root - 1]),
                        predictions.confidence[d][b, root - 1],
                    )
                    log_yes, log_no = float(guess.sigmoid().log()), float((-guess).sigmoid().log())
                    terms.append(weight * (float(LOSSES["kl"](laws[d].laws, laws[d].counted)[b * 6 + root - 1])))
                    terms.append(-weight * (overlap * log_yes + (1 - overlap) * log_no))
                    weights.append(weight)
    found = objective.tuned_distance(batch, predictions.target)
    expected = sum(distances) / len(distances)
    assert [float(each) for each in found] == pytest.approx([expected, sum(entropies) / len(entropies)], rel=1e-5)
    loss, _ = objective.loss(student, batch, torch.Generator(), "kl")
    assert float(loss) == pytest.approx(sum(terms) / sum(weights) + TUNED_WEIGHT * expected, rel=1e-5)
    tracked = [replace(each, laws=replace(each.laws, log_q=each.laws.log_q.requires_grad_())) for each in laws]
    assert not confidence_loss(predictions.confidence, tracked, objective.weights(student, laws)).requires_grad


@pytest.mark.parametrize(("asked", "most", "depth"), [(4, None, 4), (4, 2, 2), (1, 2, 1)])
def test_d_pace_looks_as_deep_as_drafts_in_evaluations(asked: int, most: int | None, depth: int) -> None:
    """Beyond the predictions with the acceptance of later roots, whose prediction gets the weight."""
    settings = TrainSettings(steps=1, place_weights="d-pace", draft_depth=asked)
    objective = Objective(settings, lambda states: states @ HEAD.T, VOCAB)
    student = Fixed(values={}, dtype=torch.float32, weights={}, depth_weights=(1.0, 1.0), most_depth=most)
    assert objective.draft_depth(student) == depth
    batch = TextBatch.of([text_of(2, 9, 3)])
    laws = list(objective.depths(student, student.predict(batch, None), batch))
    overlap = [each.laws.overlap.tolist() for each in laws]
    expected = torch.zeros(2, 7)
    for root in range(7):
        chances, cells = [], []
        for d in range(max(depth, 2)):
            cell = min(d, 1), root + d - min(d, 1)
            if root + d >= 7:
                break
            cells.append(cell)
            chances.append((chances[-1] if d else 1.0) * ((1 - SMOOTH) * overlap[cell[0]][cell[1]] + SMOOTH))
        for d, cell in enumerate(cells):
            expected[cell] += sum(chances[d:])
    assert torch.allclose(torch.cat(objective.weights(student, laws)), expected)


def test_unused_ids_have_no_probability_in_either_distribution() -> None:
    objective = Objective(TrainSettings(steps=1), lambda states: states @ HEAD.T, VOCAB - 3)
    law = objective.law_of(torch.randn(2, VOCAB))
    assert law.shape == (2, VOCAB - 3)
    assert torch.allclose(law.exp().sum(1), torch.ones(2))


def test_d_pace_weights_are_sums_of_the_probabilities_of_reaching_each_depth() -> None:
    dice = torch.Generator().manual_seed(4)
    overlaps = [torch.rand(1, 6, generator=dice) for _ in range(4)]
    counted = [torch.arange(6)[None] + d < 6 for d in range(4)]
    found = d_pace(overlaps, counted)
    for root in range(6):
        chances, reached = [], 1.0
        for d in range(4):
            reached *= ((1 - SMOOTH) * float(overlaps[d][0, root]) + SMOOTH) * bool(counted[d][0, root])
            chances.append(reached)
        for d in range(4):
            expected = sum(chances[d:]) * bool(counted[d][0, root])
            assert float(found[d][0, root]) == pytest.approx(expected)


def test_deeper_draft_tokens_use_the_deepest_prediction_of_later_roots_and_weights_return_there() -> None:
    """`gathered` is the adjoint of `deepened`: both give the same sum over all depths."""
    dice = torch.Generator().manual_seed(2)
    values = [torch.rand(2, 7, generator=dice) for _ in range(2)]
    deep = deepened(values, 5)
    for depth in range(2, 5):
        for root in range(7):
            further = root + depth - 1
            expected = values[1][:, further] if further < 7 else torch.zeros(2)
            assert torch.equal(deep[depth][:, root], expected)
    weights = [torch.rand(2, 7, generator=dice) for _ in range(5)]
    apart = sum(float((w * v).sum()) for w, v in zip(weights, deep, strict=True))
    together = sum(float((w * v).sum()) for w, v in zip(gathered(weights, 2), values, strict=True))
    assert together == pytest.approx(apart, rel=1e-5)
