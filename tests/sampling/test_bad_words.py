"""Bad words are never completed: along every guessed path, by any token, drafted or not."""

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.config import Speculation
from forerun.engine.request_check import RequestChecker
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.request import Request
from forerun.sampling.draws import Draws, PathState, RowSampling
from forerun.sampling.params import SamplingParams
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import SMALL, TARGET

VOCAB = 6
tokens = st.integers(0, VOCAB - 1)
words = st.lists(st.lists(tokens, min_size=2, max_size=4), max_size=5)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.lists(tokens, min_size=1, max_size=6), words), min_size=1, max_size=3),
    st.lists(st.lists(tokens, max_size=3), min_size=1, max_size=4),
)
def test_the_last_token_is_banned_where_the_text_ends_with_the_others(
    texts: list[tuple[list[int], list[list[int]]]], paths: list[list[int]]
) -> None:
    """Every row behind every path, small alphabets, so that words are met often and share their last tokens."""
    rows = [RowSampling(i, SamplingParams(), 0, 0, text, 1, bad_words=own) for i, (text, own) in enumerate(texts)]
    nodes = [(row, path) for row in range(len(rows)) for path in paths]
    at = PathState(
        torch.tensor([row for row, _ in nodes]),
        torch.tensor([path + [-1] * (3 - len(path)) for _, path in nodes]),
        torch.tensor([len(rows[row].tokens) + len(path) for row, path in nodes]),
    )
    logits = torch.randn(len(nodes), VOCAB, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    shaped = Draws(rows, VOCAB).transforms.shape(logits, at)
    assert torch.equal(logits, before)
    for (row, path), own, got in zip(nodes, before.tolist(), shaped.tolist(), strict=True):
        text = [*rows[row].tokens[1:], *path]  # the first is the prompt
        met = {word[-1] for word in rows[row].bad_words if text[-(len(word) - 1) :] == word[:-1]}
        assert got == [-math.inf if token in met else value for token, value in enumerate(own)]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TARGET)


def test_words_of_one_token_are_banned_tokens_and_others_are_met_with_and_without_a_blank() -> None:
    made = RequestChecker(tokenizer(), 512, 64, eos_ids=(2,), default=Speculation(4))
    (sequence,) = made.sequences(
        Request.of("Once", SamplingParams(bad_words=["the", " the", "Lily's"], banned_tokens=[9]))
    )
    inside = tokenizer().encoder(inside=True)
    spelled = [inside(text) for text in ("the", " the", "Lily's", " Lily's")]
    assert {9, *(ids[0] for ids in spelled if len(ids) == 1)} == set(sequence.params.banned_tokens)
    assert {tuple(ids) for ids in spelled if len(ids) > 1} == set(map(tuple, sequence.bad_words))
    with pytest.raises(InvalidRequest, match="bad_words: words need a tokenizer"):
        RequestChecker(None, 512, 64, (2,), Speculation(4)).sequences(Request.of([1], SamplingParams(bad_words=["a"])))
    with pytest.raises(InvalidRequest, match="bad_words: a word is not valid Unicode"):
        made.sequences(Request.of("Once", SamplingParams(bad_words=["\ud800"])))


@pytest.mark.short("coupled")
@pytest.mark.parametrize("verification", ["coupled", "token"])
def test_no_bad_word_is_said_drafted_or_not(verification: str) -> None:
    draft = f"model:{SMALL}"
    llm = LLM(str(TARGET), draft, dtype="float32", max_model_len=128, verification=verification)  # type: ignore[arg-type]
    free = (
        llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=60), speculation=False)[0]
        .outputs[0]
        .text
    )
    bad = sorted({word.strip(".,!\"'") for word in free.split()} - {""})[:12]
    for temperature in (0.0, 1.0):
        asked = SamplingParams(temperature=temperature, max_tokens=60, seed=3, bad_words=bad, ignore_eos=True)
        plain, chain, tree = (
            llm.generate("Once upon a time", asked, speculation=wish)[0].outputs[0]
            for wish in (False, 3, Speculation(3, 2))
        )
        if verification == "coupled" or temperature == 0:
            assert plain.token_ids == chain.token_ids == tree.token_ids
        spelled = [ids for word in bad for ids in llm.tokenizer.spellings(word)]
        for answer in (plain, chain, tree):
            said = answer.token_ids
            for ids in spelled:
                assert all(said[i : i + len(ids)] != ids for i in range(len(said)))
    assert any(said in free for said in bad)
