"""Replayed answers: every token once, the same choices in every run, and no gain where nothing repeats itself."""

import random
from collections.abc import Sequence

import pytest
from benchmarks.replay import DRAFTED, LOOKED, PLAIN, Answer, Options, Running, replayed

from forerun.draft.text.ngram import NgramDrafter
from forerun.draft.text.suffix import SuffixDrafter

OPTIONS = Options("unused")
VOCAB = 500
PROMPT = [*range(100, 120)]
REPEATED = Answer(PROMPT, PROMPT * 12)
DISTINCT = Answer(PROMPT, random.Random(0).sample(range(200, VOCAB), 240))


@pytest.mark.parametrize("drafter", [NgramDrafter, SuffixDrafter])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_token_is_emitted_once_and_runs_are_alike(
    drafter: type[NgramDrafter | SuffixDrafter], batch: int
) -> None:
    answers = [REPEATED, DISTINCT, Answer(PROMPT, PROMPT * 3), Answer([7], [8, 9])]
    runs = [list(replayed(answers, drafter(), batch, OPTIONS, VOCAB)) for _ in range(2)]
    assert sum(each.num_tokens for each in runs[0]) == sum(len(each.tokens) - 1 for each in answers)
    assert [each.kind for each in runs[0]] == [each.kind for each in runs[1]]
    assert {each.num_drafted > 0 for each in runs[0] if each.kind == DRAFTED} == {True}
    assert {each.num_drafted for each in runs[0] if each.kind in (PLAIN, LOOKED)} == {0}


def speedup(answer: Answer) -> float:
    rounds = list(replayed([answer], NgramDrafter(), 1, OPTIONS, VOCAB))
    return sum(each.plain_s for each in rounds) / sum(each.round_s for each in rounds)


def test_repeated_text_is_faster_and_distinct_text_at_most_as_fast_as_plain_decoding() -> None:
    assert speedup(REPEATED) > 2
    assert 0.9 < speedup(DISTINCT) <= 1


@pytest.mark.parametrize(
    ("chain", "accepted"), [((), 0), ((3,), 1), ((3, 4), 2), ((3, 5), 1), ((5, 4), 0), ((3, 4, 5), 2)]
)
def test_a_draft_token_is_accepted_if_the_answer_has_it_and_all_before_it(chain: Sequence[int], accepted: int) -> None:
    assert Running(0, Answer([1], [2, 3, 4])).num_accepted(chain) == accepted
