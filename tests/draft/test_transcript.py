"""A text in other tokens: byte for byte the same, whatever the steps, and mostly what encoding it at once gives."""

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
LOSSY = ("blank", "metaspace")  # they put a blank in front of most texts, and do not tell it from one that was there
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


def told(way: Transcriber, steps: Sequence[Sequence[int]]) -> tuple[Transcript, list[int]]:
    """A text told in steps: what is known of it, and its tokens."""
    transcript, closed = Transcript(), []
    for step in steps:
        closed += way.extend(transcript, step)
    assert transcript.num_closed == len(closed)
    assert len(transcript.open) <= LONGEST
    return transcript, closed + way.ending(transcript)


def cut(tokens: Sequence[int], rng: random.Random) -> list[Sequence[int]]:
    """Random pieces, some of them empty."""
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
    """Also bytes that are no text, and characters that end in the middle."""
    way, rng = transcriber(pair), random.Random(seed)
    sound = [token for token, spelled in enumerate(way.target.token_bytes) if spelled]
    tokens = data.draw(st.lists(st.sampled_from(sound), max_size=150))
    if rng.random() < 0.5:
        tokens = way.target.tokenizer.encode(data.draw(TEXTS), add_special_tokens=False)
        tokens = [token for token in tokens if token in way.target.special or rng.random() < 0.97]
    transcript, own = told(way, [tokens])
    assert told(way, cut(tokens, rng)) == (transcript, own)
    if not pair[1].endswith(LOSSY):
        assert spelled(way.drafter, own) == spelled(way.target, tokens)


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
def test_with_seams_the_tokens_are_those_of_the_whole_text(pair: tuple[str, str], text: str) -> None:
    way = transcriber(pair)
    tokens = way.target.encode(text, starts=True)
    whole = spelled(way.target, tokens).decode("utf-8", "surrogateescape")
    if any(len(piece) > LONGEST - 32 for piece in module.SEAM.split(whole)):
        return
    _, own = told(way, [tokens])
    assert own == way.drafter.front + way.drafter.encode(whole, starts=True)


def test_a_long_text_is_encoded_once_and_a_step_only_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    way, encoded = transcriber(("stories", "bytes")), []
    cut_text = Vocabulary.encode

    def counting(self: Vocabulary, text: str, *, starts: bool) -> list[int]:
        encoded.append(len(text))
        return cut_text(self, text, starts=starts)

    monkeypatch.setattr(Vocabulary, "encode", counting)
    for words in (500, 1000):
        text = " ".join(random.Random(1).choices(PROSE[0].split(" "), k=words))
        tokens = way.target.tokenizer.encode(text)
        encoded.clear()
        transcript, _ = told(way, [tokens])
        assert sum(encoded) <= len(text)
        encoded.clear()
        for token in tokens[:100]:
            way.extend(transcript, [token])
            way.ending(transcript)
        assert max(encoded) <= LONGEST


def test_special_tokens_are_what_they_are_for_and_end_a_word() -> None:
    way = transcriber(("stories", "more bytes"))
    stories, other = (v.tokenizer for v in (way.target, way.drafter))
    one, two = stories.encode("Once upon"), stories.encode("a time")
    begin, end, unknown = stories.bos_token_id, stories.eos_token_id, 0
    _, own = told(way, [[begin, *one, end, *two], [unknown, *two]])
    texts = [other.encoder(inside=i > 0)(t) for i, t in enumerate(("Once upon", " a time", " a time"))]
    assert own == [other.bos_token_id, *texts[0], other.eos_token_id, *texts[1], *texts[2]]
    spelled_out = stories.encode("<") + [token for c in "/s>" for token in stories.encoder(inside=True)(c)]
    _, own = told(way, [spelled_out])
    assert other.eos_token_id not in own
    assert way.drafter.to_bytes(own) == b"</s>"


def test_a_front_is_put_there_once() -> None:
    target, own = Tokenizer.load(TARGET), byte_level(330)
    own._backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    way = Transcriber(Vocabulary(target, 512, [2]), Vocabulary(own, own.num_ids, [own.eos_token_id]))
    text = target.encode("Once")
    assert way.drafter.front == [own.bos_token_id]
    for tokens in (text, [1, *text]):
        assert told(way, [tokens])[1] == own.encode("Once")


@pytest.mark.short("bytes-*", "pieces by metaspace-bytes", "stories-bytes", "stories-pieces", "more bytes-stories")
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "ab" not in pair], ids="-".join)
@given(text=TEXTS, more=TEXTS, seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_what_guesses_add_is_what_encoding_it_behind_the_text_adds(
    pair: tuple[str, str], text: str, more: str, seed: int
) -> None:
    way, rng = transcriber(pair), random.Random(seed)
    tokens = way.target.encode(text, starts=True)
    transcript, _ = told(way, [tokens])
    guesses = way.drafter.encode(more, starts=transcript.empty)
    if rng.random() < 0.3:
        guesses = guesses[: rng.randint(0, len(guesses))]
    found = way.continuation(transcript, guesses)
    added = way.drafter.to_bytes(guesses)
    whole = spelled(way.target, tokens) + added
    if not transcript.empty:
        assert added.startswith(way.target.to_bytes(found)), "nothing but what was guessed"
        assert len(added) - len(way.target.to_bytes(found)) < 4, "and all of it but an unfinished character"
    try:
        at_once = way.target.encode(whole.decode(), starts=True)
    except UnicodeDecodeError:
        return
    short = all(len(piece) < LONGEST - 32 for piece in module.SEAM.split(whole.decode()))
    lossy = pair[0].endswith(LOSSY) and whole.startswith(b" ")
    if short and at_once[: len(tokens)] == tokens and not transcript.empty and not lossy:
        assert [*tokens, *found] == at_once


@pytest.mark.parametrize("pair", [("more bytes", "stories"), ("bytes", "pieces")], ids="-".join)
def test_the_rest_of_a_character_is_cut_as_the_target_cuts_it(pair: tuple[str, str]) -> None:
    """Its last bytes may be one token, which they are not by themselves."""
    way, together = transcriber(pair), 0
    for character in sorted({c for c in " ".join(PROSE) if ord(c) > 0x7F}):
        text = f"x {character} y"
        tokens = way.target.encode(text, starts=True)
        for count in range(1, len(tokens)):
            transcript, _ = told(way, [tokens[:count]])
            rest = way.target.to_bytes(tokens[count:])
            assert way.continuation(transcript, way.drafter.byte_tokens(rest)) == tokens[count:], text
            together += bool(transcript.unfinished) and len(way.target.token_bytes[tokens[count]] or b"") > 1
    assert together > 1


def test_merges_across_the_boundary_are_those_of_the_place_or_none() -> None:
    """The target has said "a"; the guess is "b...", which the target would have said as one token with it."""
    way = transcriber(("ab", "bytes"))
    target = way.target.tokenizer
    by_name = {name: target.encoder(inside=True)(name) for name in ("a", "b", "ab", "ba", "aab", "baab")}
    assert [len(tokens) for tokens in by_name.values()] == [1, 1, 1, 1, 1, 2]

    def goes_on(said: str, guessed: str) -> list[int]:
        transcript, _ = told(way, [[token for c in said.split() for token in by_name[c]]])
        return way.continuation(transcript, way.drafter.encode(guessed, starts=False))

    assert goes_on("a", "ba") == by_name["ba"]  # "aba" would be "ab", "a": what is said is said
    assert goes_on("ab", "ab") == by_name["ab"]
    assert goes_on("ba", "aab") == by_name["aab"]
    assert goes_on("b", "aab") == by_name["aab"]  # "baab" is "ba", "ab"
    assert goes_on("ba ab", "") == []
    emoji = "👩‍👧".encode()
    way = transcriber(("bytes", "stories"))
    said = [way.target.ids[bytes([byte])] for byte in emoji[:2]]
    transcript, _ = told(way, [said])
    found = way.continuation(transcript, way.drafter.byte_tokens(emoji[2:]))
    assert way.target.to_bytes([*said, *found]) == emoji
    unfinished = way.drafter.byte_tokens(emoji[2:3])
    assert way.continuation(transcript, unfinished) == [], "an unfinished character is left out"
