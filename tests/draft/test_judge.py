"""A draft model as judge: its logits behind any guesses are those of reading it all anew, and nothing is read twice."""

import random
from collections.abc import Sequence

import pytest
import torch

from draft.rounds import Row, committed, draws_of
from forerun.draft.base import Budget, Judge, JudgeLogits, Question
from forerun.draft.model.model import ModelDrafter
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from kit.checkpoints import SMALL
from kit.engines import CountingRunner
from kit.texts import VOCAB


@pytest.fixture(scope="module")
def loaded() -> Runner:
    return Blueprint.of(str(SMALL), dtype="float32").load(64)


def make(loaded: Runner, num_tokens: int = 2048) -> ModelDrafter:
    return ModelDrafter(CountingRunner.of(loaded.decoder, num_tokens), VOCAB)


def some(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(rng.randint(0, most))]


def anew(loaded: Runner, text: Sequence[int], num_judged: int) -> torch.Tensor:
    """The last logits of a text, read in one go."""
    runner = Runner.of(loaded.decoder, 512)
    return runner.read([Read(0, text, judged=range(len(text) - num_judged, len(text)))]).logits


def check(loaded: Runner, texts: dict[int, list[int]], questions: Sequence[Question], judged: JudgeLogits) -> None:
    """Every answer, packed in the order of the questions, is that of a fresh runner."""
    expected = [
        anew(loaded, [*texts[q.seq_id][:-1], *q.late, *q.guesses], 1 + len(q.guesses))
        for q in (questions[i] for i in judged.answered)
    ]
    assert torch.equal(judged.logits, torch.cat([*expected, torch.empty(0, VOCAB)]))


@pytest.mark.short("0", "1", "2")
@pytest.mark.parametrize("seed", range(6))
def test_logits_are_those_of_reading_all_anew(loaded: Runner, seed: int) -> None:
    """Questions that go on from others, drafts between them, and text that becomes final as asked or otherwise."""
    rng = random.Random(seed)
    judge = make(loaded, 2048 if seed % 2 else 384)
    texts = {s: [1, *some(rng, 40)] for s in range(4)}
    judge.observe(committed([Row(s, t) for s, t in texts.items()]))
    emitted: dict[int, list[int]] = {s: [] for s in texts}
    for _ in range(25):
        chosen = rng.sample(sorted(texts), rng.randint(1, 4))
        questions = [Question(s, [texts[s][-1], *emitted[s]], some(rng, 5)) for s in chosen]
        judged = judge.judge(questions)
        assert judged.pass_s > 0
        assert list(judged.answered) == sorted(judged.answered)
        assert len(judged.answered) == len(questions) or seed % 2 == 0
        check(loaded, texts, questions, judged)
        for question in questions:
            emitted[question.seq_id] += [*question.guesses[: rng.randint(0, 5)], *some(rng, 1)]
        what = rng.random()
        rows = [Row(s, texts[s]) for s in chosen]
        if what < 0.2:
            judge.propose(draws_of(rows, VOCAB), [Budget(rng.randint(0, 4), rng.choice([1, 3]), 6) for _ in rows])
        elif what < 0.6:
            before = [len(texts[s]) - 1 for s in chosen]
            for s in chosen:
                texts[s] += [*emitted[s][: rng.randint(0, 9)], *some(rng, 1)]
                emitted[s] = []
            judge.observe(committed([Row(s, texts[s]) for s in chosen], before))
        judge.runner.cache.check()
        assert set(judge.runner.tails) <= {s for s in texts if judge.sequences[s].tail}


def test_what_a_question_goes_on_from_is_not_read_again(loaded: Runner) -> None:
    judge, text = make(loaded), [1, *range(3, 33)]
    judge.observe(committed([Row(0, text)]))
    judge.judge([Question(0, [32], [5, 6, 7])])
    for late, guesses, num_read in (
        ([32, 5, 6, 9], [8], 2),  # two guesses stand: the new root, and the new guess
        ([32, 5, 6, 9, 8], [], 1),  # the last token's logits are wanted, so it is read once more
        ([32, 5, 6, 9, 8, 4, 3], [7, 7], 4),
        ([32, 1], [], 1),
        ([32], [1, 1, 1], 4),
    ):
        before = judge.runner.num_read
        judge.judge([Question(0, late, guesses)])
        assert judge.runner.num_read - before == num_read


def test_questions_without_room_are_not_answered(loaded: Runner) -> None:
    """The others are, and nobody is the worse for it."""
    judge = make(loaded, 128)  # two blocks
    rows = [Row(s, [1, *range(3, 40)]) for s in range(3)] + [Row(3, [1] * 300)]
    texts = {row.seq_id: list(row.text) for row in rows}
    judge.observe(committed(rows))
    questions = [Question(s, [texts[s][-1]], [4, 5]) for s in (2, 3, 1, 0)]
    judged = judge.judge(questions)
    assert judged.answered == [2, 3]  # the youngest gives way, and one is longer than the context
    check(loaded, texts, questions, judged)
    assert judge.judge([Question(0, [39], range(4, 400))]).answered == []
    assert isinstance(judge, Judge)
