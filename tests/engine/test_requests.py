"""Request checks without a tokenizer: what can be served, and what is refused with which message."""

from typing import Any

import pytest

from forerun.config import Speculation
from forerun.engine.request_check import RequestChecker
from forerun.errors import InvalidRequest, PromptTooLong
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from kit.texts import TOKENIZER


def maker(drafters: tuple[str, ...] = ()) -> RequestChecker:
    return RequestChecker(
        None, vocab_size=9, max_length=6, eos_ids=(2,), default=Speculation(4), drafter_names=drafters
    )


def test_samples_share_all_but_their_number() -> None:
    made = maker()
    first = made.sequences(Request.of([1, 5], SamplingParams(n=3, max_tokens=None)))
    second = made.sequences(Request.of((1, 5), SamplingParams(n=2, seed=-2, max_tokens=2), False))
    assert [s.id for s in [*first, *second]] == [0, 1, 2, 3, 4]
    assert [s.request_id for s in [*first, *second]] == [0, 0, 0, 1, 1]
    assert [s.sample for s in [*first, *second]] == [0, 1, 2, 0, 1]
    assert len({s.seed for s in first}) == 1
    assert {s.seed for s in second} == {2**64 - 2}
    assert [s.room for s in [*first, *second]] == [4, 4, 4, 2, 2]
    assert {s.speculation for s in first} == {Speculation(4)}
    assert {s.speculation.depth for s in second} == {0}
    first[0].tokens.append(3)
    assert first[1].tokens == [1, 5]
    assert first[0].stop is not first[1].stop


@pytest.mark.parametrize(
    ("prompt", "params", "speculation", "message"),
    [
        ("text", {}, None, "prompt: this model has no tokenizer: give token ids"),
        ([1, 9], {}, None, "prompt: 9 is not a token id from 0 to 8"),
        ([], {}, None, "prompt: it is empty"),
        ([1], {"stop": "x"}, None, "stop: .*stop_token_ids"),
        ([1], {"logprobs": 10}, None, "logprobs: 10 .*vocabulary size, 9"),
        ([1], {}, Speculation(drafter="b"), "speculation.drafter: 'b' is not a drafter of this engine; it has: a"),
        ([1], {}, -3, "speculation.depth: -3"),
        ([1], {"bad_words": "a"}, None, "bad_words: this model has no tokenizer"),
    ],
)
def test_invalid_requests_are_refused_with_the_field_and_reason(
    prompt: str | list[int], params: dict[str, Any], speculation: Any, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        maker(("a",)).sequences(Request.of(prompt, SamplingParams(**params), speculation))


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    assert maker().sequences(Request.of([1] * 5, SamplingParams(max_tokens=None)))[0].room == 1
    for length in (6, 7):
        with pytest.raises(PromptTooLong, match=f"context length is 6 tokens, and {length} of the prompt"):
            maker().sequences(Request.of([1] * length, SamplingParams()))


def test_changing_parameters_after_submission_has_no_effect() -> None:
    params = SamplingParams(max_tokens=2, seed=1)
    (sequence,) = maker().sequences(Request.of([1, 5], params))
    params.max_tokens = params.seed = 4
    assert (sequence.room, sequence.params.seed) == (2, 1)
    (default,) = maker().sequences(Request.of([1, 5]))
    assert default.params == SamplingParams()
    assert default.params is not maker().default_params


def test_bad_words_are_banned_in_every_spelling_with_and_without_a_space() -> None:
    with_texts = RequestChecker(TOKENIZER, 512, 64, eos_ids=(2,), default=Speculation(4))
    params = SamplingParams(bad_words=["the", " the", "Lily's"], banned_tokens=[9])
    (sequence,) = with_texts.sequences(Request.of("Once", params))
    inside = TOKENIZER.encoder(inside=True)
    spelled = [inside(text) for text in ("the", " the", "Lily's", " Lily's")]
    assert {9, *(ids[0] for ids in spelled if len(ids) == 1)} == set(sequence.params.banned_tokens)
    assert {tuple(ids) for ids in spelled if len(ids) > 1} == set(map(tuple, sequence.bad_words))
    with pytest.raises(InvalidRequest, match="bad_words: a word is not valid Unicode"):
        with_texts.sequences(Request.of("Once", SamplingParams(bad_words=["\ud800"])))
