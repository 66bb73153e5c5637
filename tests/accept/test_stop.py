"""A run of tokens ends where the same tokens one at a time end, and where a search of the entire decoded text says."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from forerun.accept.stop import StopChecker
from forerun.errors import InvalidRequest
from forerun.sampling.params import SamplingParams
from forerun.text.detokenize import Piece
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import TARGET

STORIES = Tokenizer.load(TARGET)
EOS = 2


def letters() -> Tokenizer:
    """Few letters, so that stop strings occur often: a b c, two- and three-letter tokens, halves of "é", <s>."""
    words = ["<s>", "a", "b", "c", "ab", "ba", "abc", "aab", "Ã", "©", "<e>"]  # "Ã", "©": the two bytes of "é"
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


LETTERS = letters()
LETTER_EOS = 0  # <s> is special; <e>, the last, is not


@dataclass(frozen=True)
class Ending:
    """The visible end of a sequence."""

    num_tokens: int
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


def play(checker: StopChecker, runs: Iterator[Sequence[int]], restarts: bool = False) -> tuple[Ending, list[Piece]]:
    """The end and the text of a sequence that comes in these runs; it `restarts` before each, as after an error."""
    pieces: list[Piece] = []
    tokens: list[int] = []
    kept = 0
    for run in runs:
        checker = checker.restarted(tokens) if restarts else checker
        tokens += run
        stop = checker.push(run)
        pieces += stop.pieces
        kept += stop.num_kept
        assert stop.finish_reason is not None or stop.num_kept == len(run)
        if stop.finish_reason is not None:
            break
    assert kept == checker.num_tokens
    text = "".join(piece.text for piece in pieces)
    return Ending(kept, text, stop.finish_reason, stop.stop_reason), pieces


def oracle(ids: Sequence[int], params: SamplingParams, eos: int, limit: int, tokenizer: Tokenizer) -> Ending:
    """The definition: for every number of tokens, decode all and search all."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (eos,))}

    def decoded(count: int) -> str:
        shown = ids[:count]
        if count and ids[count - 1] in ends & tokenizer.special_ids and count > params.min_tokens:
            shown = shown[:-1]
        return tokenizer.decode(list(shown), params.skip_special_tokens)

    for count in range(1, min(limit, len(ids)) + 1):
        text = decoded(count)
        early = len(decoded(params.min_tokens).rstrip("\ufffd")) if params.min_tokens < count else len(text)
        found = [
            (at + len(stop), at, stop)
            for stop in params.stop
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > early
        ]
        if found:
            end, start, stop = min(found)
            text = text[: end if params.include_stop_str_in_output else start]
            return Ending(count, text, "stop", stop)
        if ids[count - 1] in ends and count > params.min_tokens:
            return Ending(count, text, "stop", ids[count - 1])
    return Ending(limit, decoded(limit), "length", None)


def stops_within(text: str) -> st.SearchStrategy[list[str]]:
    """Up to three stop strings, mostly parts of the text, so that they occur and overlap."""
    parts = st.tuples(st.integers(0, len(text)), st.integers(1, 6)).map(lambda cut: text[cut[0] : sum(cut)])
    clean = parts.filter(lambda part: part and "\ufffd" not in part)  # half a character is no text yet
    return st.lists(clean | st.text("abcé", min_size=1, max_size=4), max_size=3)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_runs_end_where_the_definition_says_they_end(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=14))
    most = data.draw(st.integers(1, len(ids)))
    max_tokens = data.draw(st.sampled_from([most, most + 5, None]))
    params = SamplingParams(
        stop=data.draw(stops_within(LETTERS.decode(ids, skip_special_tokens=True))),
        stop_token_ids=data.draw(st.sampled_from([(), (10,), (3, 10), (0,)])),
        include_stop_str_in_output=data.draw(st.booleans()),
        ignore_eos=data.draw(st.booleans()),
        min_tokens=data.draw(st.integers(0, most)),
        max_tokens=max_tokens,
        skip_special_tokens=data.draw(st.booleans()),
    )
    limit = data.draw(st.integers(most, 20)) if max_tokens == most else most
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids)))) | {0, len(ids)})
    runs = [ids[a:b] for a, b in itertools.pairwise(cuts)]
    expected = oracle(ids, params, LETTER_EOS, most, LETTERS)
    in_runs, pieces = play(StopChecker(params, [LETTER_EOS], LETTERS, limit), iter(runs))
    one_by_one, single = play(StopChecker(params, [LETTER_EOS], LETTERS, limit), iter([[i] for i in ids]))
    restarted, same = play(StopChecker(params, [LETTER_EOS], LETTERS, limit), iter(runs), restarts=True)
    assert in_runs == one_by_one == restarted == expected
    assert pieces == single == same
    assert all(piece.text for piece in pieces)
    ordinals = [piece.ordinal for piece in pieces]
    assert ordinals == sorted(ordinals)


CHUNKS = st.sampled_from([[3 + byte for byte in char.encode()] for char in "\n é€é€"] + [[3 + 0xFF], [3 + 0xC3]])


def joined(parts: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


WORDS = st.sampled_from([[1], [410], [403], [429]])


@given(ids=st.lists(CHUNKS | CHUNKS | WORDS, min_size=1, max_size=9).map(joined))
@example(ids=[3 + 10, 3 + 0xFF, 403])
@settings(max_examples=300, deadline=None)
def test_byte_tokens_end_a_text_as_soon_as_its_decoded_form_has_a_stop_string(ids: list[int]) -> None:
    """Later bytes might still turn the run's text into U+FFFD, but if it ends there it is the text."""
    params = SamplingParams(stop=["\n", "é\u20ac", "  "], max_tokens=len(ids))
    ending, _ = play(StopChecker(params, [EOS], STORIES, 99), iter([ids]))
    for count in range(1, len(ids) + 1):
        text = STORIES.decode(ids[:count], skip_special_tokens=True)
        hits = [(text.find(s) + len(s), text.find(s), s) for s in ("\n", "é\u20ac", "  ") if s in text]
        if hits:
            assert ending == Ending(count, text[: min(hits)[1]], "stop", min(hits)[2])
            return
    assert ending == Ending(len(ids), STORIES.decode(ids, skip_special_tokens=True), "length", None)


def test_text_that_may_begin_a_stop_string_is_held_back_and_then_released() -> None:
    checker = StopChecker(SamplingParams(stop="abcab", max_tokens=50), [], LETTERS, 50)
    a, b, c, abc = 1, 2, 3, 6
    assert checker.push([a, b]).pieces == ()
    assert checker.push([c]).pieces == ()
    stop = checker.push([c])
    assert stop.pieces == (Piece("a", 0), Piece("b", 1), Piece("c", 2), Piece("c", 3))
    stop = checker.push([c, abc, abc])  # completed in the middle of the third token
    assert (stop.num_kept, stop.finish_reason, stop.stop_reason) == (3, "stop", "abcab")
    assert stop.pieces == (Piece("c", 4),)


@pytest.mark.parametrize(("stops", "first"), [(["abc", "b"], "b"), (["b", "abc", "ab"], "ab"), (["c", "bc"], "bc")])
def test_of_stop_strings_in_one_token_the_first_to_end_wins_then_the_longest(stops: list[str], first: str) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=True)
    stop = StopChecker(params, [], LETTERS, 50).push([6])  # abc
    assert stop.stop_reason == first
    assert "".join(piece.text for piece in stop.pieces) == "abc"[: "abc".index(first) + len(first)]


def test_leading_spaces_depend_on_the_prompt() -> None:
    """A leading space belongs to the text where words precede it, and not at the start of all text."""
    assert StopChecker(SamplingParams(), [EOS], STORIES, 9, prompt=[1]).push([407]).pieces[0].text == "upon"
    assert StopChecker(SamplingParams(), [EOS], STORIES, 9, prompt=[1, 403]).push([407]).pieces[0].text == " upon"


def test_without_a_tokenizer_ids_and_limits_still_end_a_sequence() -> None:
    stop = StopChecker(SamplingParams(stop_token_ids=[7]), [EOS], None, 99).push([5, 6, 7, 8])
    assert (stop.num_kept, stop.stop_reason, stop.pieces) == (3, 7, ())
    checker = StopChecker(SamplingParams(min_tokens=2, max_tokens=5), [EOS], None, 4)
    assert checker.push([EOS, EOS]).finish_reason is None
    assert checker.push([5, 5]).finish_reason == "length"
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        StopChecker(SamplingParams(stop="x"), [EOS], None, 99)


def test_an_ended_sequence_accepts_no_more_tokens() -> None:
    checker = StopChecker(SamplingParams(), [EOS], STORIES, 99)
    assert checker.push([]).num_kept == 0
    checker.push([EOS])
    with pytest.raises(AssertionError, match="has ended"):
        checker.push([403])
