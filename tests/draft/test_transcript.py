"""A text in another tokenizer's tokens: the same bytes in any steps, and mostly the tokens of encoding it at once."""

import random
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from draft.vocabularies import PROSE, byte_level, sentence_piece, two_letters
from forerun.draft.vocab import transcript as module
from forerun.draft.vocab.transcript import LONGEST, Transcriber, Transcript
from forerun.draft.vocab.vocabulary import Vocabulary
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import TARGET


@cache
def vocabularies() -> dict[str, Vocabulary]:
    tokenizers = {
        "bytes": byte_level(330),
        "more bytes": byte_level(420),
        "bytes behind a blank": byte_level(380, blank_first=True),
        "pieces": sentence_piece(400),
        "pieces by metaspace": sentence_piece(400, metaspace=True),
        "stories": Tokenizer.load(TARGET),
        "ab": two_letters(["a", "b", "ab", "ba", "aab"]),
    }
    return {name: Vocabulary(t, t.num_ids, [t.eos_token_id or 0]) for name, t in tokenizers.items()}


NAMES = ("bytes", "more bytes", "bytes behind a blank", "pieces", "pieces by metaspace", "stories", "ab")
LOSSY = ("blank", "metaspace")  # they prepend a blank to most texts, which then cannot be told from one in the text
PAIRS = [(one, other) for one in NAMES for other in NAMES if one != other]
CHARACTERS = "ab Once upon,. '\"\n\t12345(){}éж你好👩‍👧🇩🇪e\u0301\u3000\u00a0\u2028"
TEXTS = st.one_of(
    st.text(CHARACTERS, max_size=300),
    st.lists(st.sampled_from([*" ".join(PROSE).split(" "), " ", "\n", "你好" * 40, "x" * 80]), max_size=40).map(
        " ".join
    ),
)


def transcriber(pair: tuple[str, str]) -> Transcriber:
    return Transcriber(*(vocabularies()[name] for name in pair))


def transcribed(transcriber_: Transcriber, steps: Sequence[Sequence[int]]) -> tuple[Transcript, list[int]]:
    """The transcript of a text that arrives in steps, and the drafter's tokens of it."""
    transcript, closed = Transcript(), []
    for step in steps:
        closed += transcriber_.extend(transcript, step)
    assert transcript.num_closed == len(closed)
    assert len(transcript.open) <= LONGEST
    return transcript, closed + transcriber_.ending(transcript)


def cut(tokens: Sequence[int], rng: random.Random) -> list[Sequence[int]]:
    """The tokens in random pieces, some of them empty."""
    ends = sorted(rng.randint(0, len(tokens)) for _ in range(rng.randint(0, 12)))
    return [tokens[a:b] for a, b in zip([0, *ends], [*ends, len(tokens)], strict=True)]


def spelled(vocabulary: Vocabulary, tokens: Sequence[int]) -> bytes:
    """The bytes of a text, without the blank that is put in front of texts."""
    return vocabulary.to_bytes(tokens).removeprefix(b" " * vocabulary.lead)


@pytest.mark.short(
    "bytes-pieces", "pieces-more bytes", "stories-bytes", "ab-stories", "pieces by metaspace-bytes behind a blank"
)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@given(data=st.data(), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_any_tokens_in_any_steps_keep_their_bytes(pair: tuple[str, str], data: st.DataObject, seed: int) -> None:
    """Also bytes that are not valid UTF-8, and characters that are split."""
    transcriber_, rng = transcriber(pair), random.Random(seed)
    with_bytes = [token for token, spelled in enumerate(transcriber_.target.token_bytes) if spelled]
    tokens = data.draw(st.lists(st.sampled_from(with_bytes), max_size=150))
    if rng.random() < 0.5:
        tokens = transcriber_.target.tokenizer.encode(data.draw(TEXTS), add_special_tokens=False)
        tokens = [token for token in tokens if token in transcriber_.target.special or rng.random() < 0.97]
    transcript, drafter_tokens = transcribed(transcriber_, [tokens])
    assert transcribed(transcriber_, cut(tokens, rng)) == (transcript, drafter_tokens)
    if not pair[1].endswith(LOSSY):
        assert spelled(transcriber_.drafter, drafter_tokens) == spelled(transcriber_.target, tokens)


@pytest.mark.short(
    "bytes-pieces",
    "bytes behind a blank-bytes",
    "pieces-more bytes",
    "pieces by metaspace-bytes",
    "stories-pieces by metaspace",
    "ab-stories",
    "more bytes-ab",
)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@given(text=TEXTS)
@settings(max_examples=40, deadline=None)
@example(text=" ".join(PROSE * 4))
@example(text=" ".join("x" * count + "    def f" for count in range(1, 60)))
def test_text_with_seams_gets_the_tokens_of_the_text_encoded_at_once(pair: tuple[str, str], text: str) -> None:
    transcriber_ = transcriber(pair)
    tokens = transcriber_.target.encode(text, starts=True)
    whole = spelled(transcriber_.target, tokens).decode("utf-8", "surrogateescape")
    if any(len(piece) > LONGEST - 32 for piece in module.SEAM.split(whole)):
        return
    _, drafter_tokens = transcribed(transcriber_, [tokens])
    assert drafter_tokens == transcriber_.drafter.front + transcriber_.drafter.encode(whole, starts=True)


def test_a_long_text_is_encoded_once_and_a_step_encodes_only_the_open_end(monkeypatch: pytest.MonkeyPatch) -> None:
    transcriber_, encoded = transcriber(("stories", "bytes")), []
    cut_text = Vocabulary.encode

    def counting(self: Vocabulary, text: str, *, starts: bool) -> list[int]:
        encoded.append(len(text))
        return cut_text(self, text, starts=starts)

    monkeypatch.setattr(Vocabulary, "encode", counting)
    for words in (500, 1000):
        text = " ".join(random.Random(1).choices(PROSE[0].split(" "), k=words))
        tokens = transcriber_.target.tokenizer.encode(text)
        encoded.clear()
        transcript, _ = transcribed(transcriber_, [tokens])
        assert sum(encoded) <= len(text)
        encoded.clear()
        for token in tokens[:100]:
            transcriber_.extend(transcript, [token])
            transcriber_.ending(transcript)
        assert max(encoded) <= LONGEST


def test_special_tokens_are_translated_by_meaning_and_end_a_word() -> None:
    transcriber_ = transcriber(("stories", "more bytes"))
    stories, other = (v.tokenizer for v in (transcriber_.target, transcriber_.drafter))
    one, two = stories.encode("Once upon"), stories.encode("a time")
    begin, end, unknown = stories.bos_token_id, stories.eos_token_id, 0
    assert begin is not None
    assert end is not None
    _, drafter_tokens = transcribed(transcriber_, [[begin, *one, end, *two], [unknown, *two]])
    texts = [other.encoder(inside=i > 0)(t) for i, t in enumerate(("Once upon", " a time", " a time"))]
    assert drafter_tokens == [other.bos_token_id, *texts[0], other.eos_token_id, *texts[1], *texts[2]]
    spelled_out = stories.encode("<") + [token for c in "/s>" for token in stories.encoder(inside=True)(c)]
    _, drafter_tokens = transcribed(transcriber_, [spelled_out])
    assert other.eos_token_id not in drafter_tokens
    assert transcriber_.drafter.to_bytes(drafter_tokens) == b"</s>"


def test_the_drafters_begin_token_is_added_once() -> None:
    target, drafter_tokens = Tokenizer.load(TARGET), byte_level(330)
    drafter_tokens._backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert drafter_tokens.eos_token_id is not None
    vocabulary = Vocabulary(drafter_tokens, drafter_tokens.num_ids, [drafter_tokens.eos_token_id])
    transcriber_ = Transcriber(Vocabulary(target, 512, [2]), vocabulary)
    text = target.encode("Once")
    assert transcriber_.drafter.front == [drafter_tokens.bos_token_id]
    for tokens in (text, [1, *text]):
        assert transcribed(transcriber_, [tokens])[1] == drafter_tokens.encode("Once")


@pytest.mark.short("bytes-*", "pieces by metaspace-bytes", "stories-bytes", "stories-pieces", "more bytes-stories")
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "ab" not in pair], ids="-".join)
@given(text=TEXTS, more=TEXTS, seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_a_draft_is_translated_as_encoding_it_after_the_text_would(
    pair: tuple[str, str], text: str, more: str, seed: int
) -> None:
    transcriber_, rng = transcriber(pair), random.Random(seed)
    tokens = transcriber_.target.encode(text, starts=True)
    transcript, _ = transcribed(transcriber_, [tokens])
    draft_tokens = transcriber_.drafter.encode(more, starts=transcript.empty)
    if rng.random() < 0.3:
        draft_tokens = draft_tokens[: rng.randint(0, len(draft_tokens))]
    found = transcriber_.continuation(transcript, draft_tokens)
    added = transcriber_.drafter.to_bytes(draft_tokens)
    whole = spelled(transcriber_.target, tokens) + added
    if not transcript.empty:
        assert added.startswith(transcriber_.target.to_bytes(found)), "nothing but the draft tokens"
        assert len(added) - len(transcriber_.target.to_bytes(found)) < 4, "and all of it but an unfinished character"
    try:
        at_once = transcriber_.target.encode(whole.decode(), starts=True)
    except UnicodeDecodeError:
        return
    short = all(len(piece) < LONGEST - 32 for piece in module.SEAM.split(whole.decode()))
    lossy = pair[0].endswith(LOSSY) and whole.startswith(b" ")
    if short and at_once[: len(tokens)] == tokens and not transcript.empty and not lossy:
        assert [*tokens, *found] == at_once


@pytest.mark.parametrize("pair", [("more bytes", "stories"), ("bytes", "pieces")], ids="-".join)
def test_the_rest_of_a_split_character_is_tokenized_as_the_target_does(pair: tuple[str, str]) -> None:
    """Its last bytes may be one token, which they are not by themselves."""
    transcriber_, together = transcriber(pair), 0
    for character in sorted({c for c in " ".join(PROSE) if ord(c) > 0x7F}):
        text = f"x {character} y"
        tokens = transcriber_.target.encode(text, starts=True)
        for count in range(1, len(tokens)):
            transcript, _ = transcribed(transcriber_, [tokens[:count]])
            rest = transcriber_.target.to_bytes(tokens[count:])
            assert transcriber_.continuation(transcript, transcriber_.drafter.byte_tokens(rest)) == tokens[count:], text
            together += bool(transcript.unfinished) and len(transcriber_.target.token_bytes[tokens[count]] or b"") > 1
    assert together > 1


def test_draft_tokens_are_not_merged_with_committed_tokens() -> None:
    """After the target's "a" the drafter drafts "b...", although the target has one token for both."""
    transcriber_ = transcriber(("ab", "bytes"))
    target = transcriber_.target.tokenizer
    by_name = {name: target.encoder(inside=True)(name) for name in ("a", "b", "ab", "ba", "aab", "baab")}
    assert [len(tokens) for tokens in by_name.values()] == [1, 1, 1, 1, 1, 2]

    def goes_on(text: str, draft: str) -> list[int]:
        transcript, _ = transcribed(transcriber_, [[token for c in text.split() for token in by_name[c]]])
        return transcriber_.continuation(transcript, transcriber_.drafter.encode(draft, starts=False))

    assert goes_on("a", "ba") == by_name["ba"]  # "aba" would be "ab", "a", but "a" is final
    assert goes_on("ab", "ab") == by_name["ab"]
    assert goes_on("ba", "aab") == by_name["aab"]
    assert goes_on("b", "aab") == by_name["aab"]  # "baab" is "ba", "ab"
    assert goes_on("ba ab", "") == []
    emoji = "👩‍👧".encode()
    transcriber_ = transcriber(("bytes", "stories"))
    first = [transcriber_.target.ids[bytes([byte])] for byte in emoji[:2]]
    transcript, _ = transcribed(transcriber_, [first])
    found = transcriber_.continuation(transcript, transcriber_.drafter.byte_tokens(emoji[2:]))
    assert transcriber_.target.to_bytes([*first, *found]) == emoji
    unfinished = transcriber_.drafter.byte_tokens(emoji[2:3])
    assert transcriber_.continuation(transcript, unfinished) == [], "an unfinished character is left out"
