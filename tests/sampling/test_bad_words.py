"""Words that may not be said are not said, drafted or not; the token that completes one is ruled out, and no other."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun import LLM, InvalidRequest, SamplingParams
from forerun.config import Speculation
from forerun.engine.request import Requests
from forerun.request import Request
from forerun.sampling.bad_words import BadWords, spellings

DATA = Path(__file__).resolve().parents[1] / "data"
TARGET, SMALL = DATA / "stories260k", DATA / "stories280k"
PROMPT = "Once upon a time, there was a"
TOKENS = st.lists(st.integers(0, 3), max_size=8)


@given(st.lists(TOKENS.filter(len), max_size=4), TOKENS, st.integers(0, 8))
def test_a_token_is_ruled_out_where_it_completes_a_word_of_the_answer(
    words: Sequence[list[int]], text: list[int], num_prompt: int
) -> None:
    num_prompt = min(num_prompt, len(text))
    logits = BadWords(frozenset(map(tuple, words)), num_prompt)(text, torch.zeros(4))
    for token in range(4):
        said = [*text[num_prompt:], token]
        completes = any(said[-len(word) :] == word for word in words)
        assert (logits[token] == -torch.inf) == completes


@cache
def llm(draft: str | None) -> LLM:
    return LLM(str(TARGET), draft, dtype="float32")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_banned_is_not_said_and_drafting_changes_nothing(temperature: float) -> None:
    free = SamplingParams(temperature=temperature, seed=4, max_tokens=16, ignore_eos=True)
    (said,) = llm(None).generate(PROMPT, free)[0].outputs
    words = [word for word in said.text.split() if word.isalpha()][:2]
    assert words
    banned = SamplingParams(temperature=temperature, seed=4, max_tokens=16, ignore_eos=True, bad_words=words)
    (plain,) = llm(None).generate(PROMPT, banned)[0].outputs
    encode = llm(None).get_tokenizer().encoder(inside=True)
    for ids in spellings(words, encode):
        places = range(len(plain.token_ids) - len(ids) + 1)
        assert ids not in [plain.token_ids[place : place + len(ids)] for place in places]
    assert plain.token_ids != said.token_ids
    for draft in ("ngram", f"model:{SMALL}"):
        assert llm(draft).generate(PROMPT, banned)[0].outputs[0].token_ids == plain.token_ids


def test_a_blank_in_front_makes_no_difference() -> None:
    encode = llm(None).get_tokenizer().encoder(inside=True)
    assert spellings(["dog"], encode) >= spellings([" dog"], encode)
    assert len(spellings(["dog"], encode)) == 2


def test_words_need_a_tokenizer() -> None:
    requests = Requests(None, 9, 6, eos_ids=(2,), default=Speculation())
    with pytest.raises(InvalidRequest, match="bad_words: words need a tokenizer"):
        requests.sequences(Request.of([1], SamplingParams(bad_words=["a"])))
