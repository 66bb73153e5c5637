"""The tokens that two vocabularies share, and the mapping of logits between them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from draft.vocabularies import byte_level, sentence_piece, two_letters
from forerun.draft.vocab.vocabulary import SharedTokens, Vocabulary, shared_ids, shared_special, shared_weight
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import TARGET

STORIES = Tokenizer.load(TARGET)
TOKENIZERS = {
    "bytes": byte_level(330),
    "more bytes": byte_level(420),
    "pieces": sentence_piece(400),
    "pieces by metaspace": sentence_piece(400, metaspace=True),
    "stories": STORIES,
    "ab": two_letters(["a", "b", "ab", "ba", "aab"]),
}
VOCABULARIES = {name: Vocabulary(t, t.num_ids, [t.eos_token_id or 0]) for name, t in TOKENIZERS.items()}
PAIRS = [(one, other) for one in VOCABULARIES for other in VOCABULARIES]


@pytest.mark.short("more bytes")
@pytest.mark.parametrize("name", VOCABULARIES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_bytes_are_those_that_decoding_joins(name: str, data: st.DataObject) -> None:
    vocabulary = VOCABULARIES[name]
    ids = data.draw(st.lists(st.integers(0, vocabulary.num_ids - 1), max_size=20))
    spelled = vocabulary.to_bytes(ids).removeprefix(b" " * vocabulary.lead)
    try:
        text = spelled.decode()
    except UnicodeDecodeError:
        return
    assert text == vocabulary.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.short("stories")
@pytest.mark.parametrize("name", VOCABULARIES)
@given(texts=st.lists(st.text("ab cé👩\n</s>", max_size=8), min_size=2, max_size=2))
@settings(max_examples=100, deadline=None)
def test_text_encoded_inside_has_no_leading_blank_and_no_special_tokens(name: str, texts: list[str]) -> None:
    vocabulary = VOCABULARIES[name]
    inside, start = (vocabulary.tokenizer.encoder(inside=inside) for inside in (True, False))
    one, other = texts
    assert vocabulary.to_bytes(inside(one)) == one.encode()
    assert not vocabulary.special.keys() & {*inside(one + "</s>"), *start(one + "<s>")}
    whole, rest = one + "x", " y" + other
    assert start(whole) + inside(rest) == start(whole + rest), "at a seam"


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_shared_tokens_spell_the_same_and_are_one_to_one(pair: tuple[str, str]) -> None:
    target, own = (VOCABULARIES[name] for name in pair)
    shared = shared_ids(target, own)
    assert target.end is not None
    assert shared.pop(target.end) == own.end
    assert len(set(shared.values())) == len(shared)
    for token, own_token in shared.items():
        assert target.token_bytes[token] == own.token_bytes[own_token] not in (None, b"")
        assert token not in target.special
        assert own_token not in own.special
    everything = {*filter(None, target.token_bytes)} & {*filter(None, own.token_bytes)}
    assert {target.token_bytes[token] for token in shared} == everything
    back = shared_ids(own, target)
    assert {token: back[own_token] for token, own_token in shared.items()} == {token: token for token in shared}


def test_of_two_tokens_for_a_letter_the_plain_one_is_shared() -> None:
    stories, other = VOCABULARIES["stories"], VOCABULARIES["bytes"]
    for letter in "aT,\n":
        plain = other.tokenizer.encoder(inside=True)(letter)[0]
        (written,) = STORIES.encoder(inside=True)(letter)
        assert shared_ids(stories, other)[written] == plain
        assert 3 + ord(letter) == written or 3 + ord(letter) not in shared_ids(stories, other)
    assert stories.byte_tokens(b"\xf0") == [3 + 0xF0]


def test_the_end_token_is_shared_only_if_model_and_tokenizer_agree() -> None:
    byte_tokens, eos = TOKENIZERS["bytes"], TOKENIZERS["bytes"].eos_token_id
    assert eos is not None
    sure, unsure = (Vocabulary(byte_tokens, 330, [end]) for end in (eos, 17))
    assert (sure.end, unsure.end) == (eos, None)
    stories = VOCABULARIES["stories"]
    assert shared_ids(stories, sure)[2] == eos
    assert 2 not in shared_ids(stories, unsure)
    assert shared_special(stories, sure) == {1: byte_tokens.bos_token_id, 2: eos}
    assert shared_special(stories, unsure) == {1: byte_tokens.bos_token_id, 2: eos}  # they have the same names


def test_ids_beyond_the_models_embedding_are_ignored() -> None:
    tokenizer = TOKENIZERS["more bytes"]
    cut = Vocabulary(tokenizer, 300, [tokenizer.eos_token_id or 0])
    assert max(cut.ids.values()) < 300
    assert max(cut.encode("Once upon a time, there was", starts=True)) < 300
    assert max(shared_ids(VOCABULARIES["bytes"], cut).values()) < 300


@pytest.mark.parametrize("pair", [("stories", "bytes"), ("bytes", "stories"), ("ab", "more bytes")], ids="-".join)
def test_logits_map_to_the_targets_ids_and_draft_tokens_back(pair: tuple[str, str]) -> None:
    """Both models' logits are wider than their tokenizers' vocabularies."""
    target, own = (VOCABULARIES[name] for name in pair)
    vocab, num_model_ids = target.num_ids + 5, own.num_ids + 3
    shared = SharedTokens.of(target, own, vocab, num_model_ids, torch.device("cpu"))
    ids = shared_ids(target, own)
    logits = torch.randn(4, num_model_ids, generator=torch.Generator().manual_seed(0))
    spread = shared.target_logits(logits)
    assert spread.shape == (4, vocab)
    assert (spread > -math.inf).sum(1).tolist() == [len(ids)] * 4
    for token, own_token in ids.items():
        assert torch.equal(spread[:, token], logits[:, own_token])
    everything = torch.arange(vocab)
    there = shared.model_ids(everything)
    assert [int(own_token) for own_token in there if own_token >= 0] == [ids[t] for t in range(vocab) if t in ids]
    assert len(set(there.tolist())) == vocab, "those that are not shared stay apart"
    assert [shared.known[token] for token in range(vocab)] == there.tolist()
    assert shared.model_ids(torch.tensor([-1, 3])).tolist() == [-1, int(there[3])]


def test_the_probability_of_shared_tokens() -> None:
    ab = VOCABULARIES["ab"]
    ids = {name: ab.ids[name.encode()] for name in ("ab", "ba", "aab")}
    assert shared_weight(ab, shared_ids(ab, ab)) == 1
    assert shared_weight(ab, {}) == 0
    assert shared_weight(ab, {ids["ab"]: 1, ids["aab"]: 2}) == pytest.approx((1 + 1 / 3) / (1 + 1 / 2 + 1 / 3))
    assert shared_weight(ab, {ab.ids[b"a"]: 1}) == 0, "single letters are everybody's"
    letters = two_letters(["a", "b"])
    assert shared_weight(Vocabulary(letters, letters.num_ids), {}) == 1


def test_tokenizers_whose_tokens_are_no_bytes_are_not_supported() -> None:
    words = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="which bytes"):
        Vocabulary(Tokenizer(words), 3)
