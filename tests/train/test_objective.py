"""Which positions count and how much, by brute force; drafts deeper than the predictions."""

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from forerun.heads.student import Predictions, Student, TargetText, TextBatch
from forerun.train.objective import SMOOTH, Objective, d_pace, deepened, gathered
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
