"""Tokens to text one at a time is tokens to text at once; ids agree with transformers; damage has a name."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer
from typing_extensions import override

from draft import vocabularies
from forerun.errors import InvalidRequest, PromptTooLong, TokenizerError
from forerun.text.tokenizer import LONG_TEXT, Tokenizer
from kit.checkpoints import DATA, SMALL, TARGET
from kit.servers import until

CORPUS = [
    "the naïve café costs 3 €, 你好世界, 今日は, Привет 👩‍👩‍👧‍👦 🎉🇩🇪 e\u0301 a\u0308\u0323 \u200d x",
    "def f(x):\n    return x ** 2  # ∑ ≥ 2\n\n\n\tend — ok",
]
PROSE = "Once upon a time, Lily's dog said:\n\n  «naïve café» 你好 👩‍👩‍👧 e\u0301\n\tEnd."


def stories() -> Tokenizer:
    return Tokenizer.load(TARGET)


def byte_level() -> Tokenizer:
    """A byte-level BPE whose tokens cut through characters, with added tokens plain, spaced and special."""
    tokenizer = vocabularies.byte_level(330, CORPUS * 3)
    tokenizer._backend.add_tokens(["<|tool|>", "two words é"])
    return Tokenizer(tokenizer._backend, named={"bos_token": "<s>", "eos_token": "</s>"})


def word_piece() -> Tokenizer:
    """A decoder that only the window reads: "##" joins, words are spaced."""
    words = ["[UNK]", "hello", "wor", "##ld", "##s", "a", "b", ".", ",", "é", "##你", "'", "s", "n", "##'t"]
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend)


def gemma_like() -> Tokenizer:
    """Byte fallback without a stripped space, as Gemma spells it."""
    backend = tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend)


def unknown() -> Tokenizer:
    """Bytes again, behind a decoder that is not recognised: the window has to wait for whole characters."""
    backend = byte_level()._backend
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return Tokenizer(backend)


TOKENIZERS = {t.__name__: t() for t in (stories, byte_level, word_piece, gemma_like)}
UNKNOWN = unknown()
BYTES_OF_STORIES = st.sampled_from([3 + byte for byte in "aé€👩\n ".encode()] + [3 + 0xFF, 35, 410])


def joined(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    decoder = tokenizer.decoder(skip)
    return "".join(decoder.push(token) for token in ids) + decoder.finish()


@pytest.mark.short("stories", "gemma_like")
@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_the_decoded_whole(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    known = st.integers(0, tokenizer.num_ids + 3)  # a few ids that the vocabulary does not have
    bytes_mostly = BYTES_OF_STORIES | known if name != "word_piece" else known
    ids = data.draw(st.lists(known, max_size=30) | st.lists(bytes_mostly, max_size=30))
    assert joined(tokenizer, ids, skip) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", ["stories", "byte_level", "gemma_like", "unknown"])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_special_tokens_that_are_shown_are_pieces_that_say_so(name: str, data: st.DataObject) -> None:
    tokenizer = UNKNOWN if name == "unknown" else TOKENIZERS[name]
    special = st.sampled_from(sorted(tokenizer.special_ids))
    ordinary = BYTES_OF_STORIES | st.integers(0, tokenizer.num_ids - 1)
    if name == "unknown":  # bytes that are no text are not promised there
        ordinary = st.sampled_from(tokenizer.encode("a few words of text", add_special_tokens=False))
    ids = data.draw(st.lists(special | ordinary, max_size=20))
    shown = data.draw(st.sets(special))
    decoder = tokenizer.decoder(shown=shown)
    pieces = [piece for token in ids for piece in decoder.feed(token)] + decoder.close()
    kept = [token for token in ids if token in shown or token not in tokenizer.special_ids]
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(kept)
    marked = [piece for piece in pieces if piece.special]
    assert [ids[piece.ordinal] for piece in marked] == [token for token in ids if token in shown]
    assert all(piece.text.endswith(tokenizer.surface(ids[piece.ordinal]) or "") for piece in marked)


@pytest.mark.short("stories", "byte_level")
@pytest.mark.parametrize("name", ["stories", "byte_level", "gemma_like", "unknown"])
@given(text=st.text(st.characters(codec="utf-8") | st.sampled_from("👩‍👧e\u0301你é\n  ab"), max_size=25))
@settings(max_examples=150, deadline=None)
def test_real_text_is_never_split_inside_a_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS.get(name, UNKNOWN)
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoder = tokenizer.decoder(skip_special_tokens=False)
    pieces = [decoder.push(token) for token in ids] + [decoder.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@pytest.mark.parametrize("name", ["stories", "byte_level"])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_every_piece_carries_the_ordinal_of_the_token_that_completed_it(name: str, data: st.DataObject) -> None:
    """Whatever the ids: the text of the tokens up to a piece's ordinal holds the piece, that of fewer does not."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.num_ids - 1), max_size=15))
    if name != "byte_level":
        ids = [token for token in ids if token < 3 or token >= 259]  # a broken byte run is known by its end alone
    decoder = tokenizer.decoder(skip_special_tokens=False)
    pieces = [piece for token in ids for piece in decoder.feed(token)]
    length = 0
    for piece in pieces:
        length += len(piece.text)
        so_far = tokenizer.decode(ids[: piece.ordinal + 1], skip_special_tokens=False).rstrip("\ufffd")
        before = tokenizer.decode(ids[: piece.ordinal], skip_special_tokens=False).rstrip("\ufffd")
        assert len(before) < length
        assert len(so_far) >= length or "\ufffd" in piece.text


@pytest.mark.parametrize("name", ["stories", "byte_level", "gemma_like", "unknown"])
def test_the_rest_of_a_text_carries_the_ordinal_of_its_last_token(name: str) -> None:
    """The text ends inside a character."""
    tokenizer = TOKENIZERS.get(name, UNKNOWN)
    ids = tokenizer.encode("Once \N{GOTHIC LETTER AHSA}", add_special_tokens=False)[:-1]
    decoder = tokenizer.decoder()
    before = "".join(decoder.push(token) for token in ids)
    rest = decoder.close()
    assert before + "".join(piece.text for piece in rest) == tokenizer.decode(ids)
    assert rest[-1] == ("\ufffd", len(ids) - 1, False)


@pytest.mark.parametrize("num_stripped", [0, 1, 2, 3])
def test_as_many_leading_blanks_are_left_out_as_the_decoder_strips(num_stripped: int) -> None:
    backend = tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", num_stripped, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = Tokenizer(backend)
    blank, word = tokenizer.convert_tokens_to_ids("▁"), 403
    assert blank is not None
    for ids in ([word, word], [blank] * 4, [blank, word], [blank, blank, blank, word], [3 + ord(" "), blank, word]):
        assert joined(tokenizer, ids, skip=False) == tokenizer.decode(ids)


def test_text_appears_as_soon_as_it_is_certain() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    decoder = tokenizer.decoder()
    ids = tokenizer.encode("a é b", add_special_tokens=False)
    shown = ""
    for i, token in enumerate(ids):
        shown += decoder.push(token)
        whole = tokenizer.decode(ids[: i + 1], skip_special_tokens=True)
        assert shown == whole.removesuffix("\ufffd")
    tokenizer = TOKENIZERS["stories"]
    decoder = tokenizer.decoder()
    words = tokenizer.encode("Once upon a time")
    assert [decoder.push(token) for token in words] == ["Once", " upon", " a", " time"]


def test_a_byte_run_is_known_before_it_is_final() -> None:
    """ "\\n" is a byte token here: a stop string must see it although an invalid byte could still spoil it."""
    decoder = TOKENIZERS["stories"].decoder()
    assert decoder.push(3 + ord("\n")) == ""
    assert [piece.text for piece in decoder.undecided()] == ["\n"]
    assert decoder.push(3 + 0xE2) == ""
    assert list(decoder.undecided()) == []
    assert decoder.push(3 + 0xFF) == "\ufffd" * 3
    assert list(decoder.undecided()) == []


def test_work_per_token_does_not_grow_with_the_text() -> None:
    """No spelling keeps what it has handed out: its state stays small over thousands of tokens."""
    for tokenizer in TOKENIZERS.values():
        decoder = tokenizer.decoder()
        for i in range(3000):
            decoder.push(i * 7 % tokenizer.num_ids)
            held = [v for v in vars(decoder._spelling).values() if isinstance(v, list)]
            assert sum(map(len, held)) <= 8
            assert len(decoder.undecided()) <= 300


@pytest.mark.parametrize("name", ["stories", "byte_level", "gemma_like", "word_piece"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_text_that_goes_on_from_a_prompt_keeps_its_leading_space(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    first = 259 if name in ("stories", "gemma_like") else 0  # whole words: a prompt ends between characters
    words = st.lists(st.integers(first, tokenizer.num_ids - 1), min_size=1, max_size=6)
    prompt, ids = data.draw(words), data.draw(words)
    if name == "byte_level":
        prompt = tokenizer.encode(data.draw(st.text(max_size=6)), add_special_tokens=False)
    decoder = tokenizer.decoder(after=prompt)
    added = "".join(decoder.push(token) for token in ids) + decoder.finish()
    shown = [tokenizer.decode(some, skip_special_tokens=True) for some in (prompt, [*prompt, *ids])]
    assert shown[0] + added == shown[1]


def test_a_bos_token_before_the_text_is_no_text() -> None:
    tokenizer = TOKENIZERS["stories"]
    decoder = tokenizer.decoder(after=[1])
    assert decoder.push(403) == "Once"


def save(folder: Path, backend: tokenizers.Tokenizer, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def llama_like() -> tokenizers.Tokenizer:
    """The stories tokenizer with Llama's post-processor, which puts <s> in front."""
    backend = tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


@pytest.mark.parametrize("text", ["Once upon a time", " two  spaces ", PROSE, "</s>x<s>"])
@pytest.mark.parametrize("kind", ["stories260k", "stories280k", "llama", "llama_config", "byte_level"])
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, kind: str, text: str) -> None:
    folder = DATA / kind
    named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if kind.startswith("llama"):
        extra = {"add_bos_token": True} if kind == "llama_config" else {}
        folder = save(tmp_path / "t", llama_like(), unk_token="<unk>", **named, **extra)
    if kind == "byte_level":
        backend = TOKENIZERS["byte_level"]._backend
        backend.normalizer = normalizers.NFC()
        folder = save(tmp_path / "t", backend, **named)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    ids = theirs(text).input_ids
    assert ours.encode(text) == ids
    assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.special_ids == set(theirs.all_special_ids)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)


def test_text_inside_other_text_gets_no_blank_that_a_tokenizer_adds_at_the_start() -> None:
    with_blank = byte_level()
    with_blank._backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for tokenizer in (stories(), byte_level(), with_blank):
        for text in ("the", " the"):
            assert tokenizer.decode(tokenizer.encode("x") + tokenizer.encode_inside(text)).endswith(f"x{text}")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("text", ["Once upon a time, é\n", "x", " ", "<s>"])
def test_a_long_text_has_the_ids_of_a_text_by_itself(text: str, special: bool) -> None:
    tokenizer, text = stories(), text * LONG_TEXT + "."
    assert tokenizer.encode(text, special) == tokenizer._backend.encode(text, add_special_tokens=special).ids


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    """More than once, in one of many attempts: on a busy machine a thread may wait for its turn."""
    tokenizer, text, ticks, ended = stories(), "Once upon a time " * 20_000, list[float](), threading.Event()

    def ticks_meanwhile() -> int:
        began_s = time.perf_counter()
        encoding = tokenizer._encoding(text, add_special_tokens=False)
        ended_s = time.perf_counter()
        assert len(encoding.ids) > 20_000
        return sum(began_s < each < ended_s for each in ticks)

    def tick() -> None:
        while not ended.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        until(lambda: ticks_meanwhile() > 3)
    finally:
        ended.set()
        thread.join()


def test_an_empty_text_is_the_bos_token() -> None:
    tokenizer = TOKENIZERS["stories"]
    assert tokenizer.encode("") == [tokenizer.bos_token_id] == [1]
    assert tokenizer.encode("", add_special_tokens=False) == []
    assert TOKENIZERS["word_piece"].encode("") == []


def test_bos_by_the_id_in_the_models_configuration(tmp_path: Path) -> None:
    source = TARGET
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(source / name, tmp_path)
    assert Tokenizer.load(tmp_path).bos_token_id == 1


def test_truncation_and_padding_of_training_do_not_reach_prompts(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.load(save(tmp_path, backend))
    assert tokenizer.encode("Once upon a time there was") == TOKENIZERS["stories"].encode("Once upon a time there was")
    assert tokenizer.encode("Once") == [403]


def test_tokens_that_only_the_configuration_declares(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    token = {"content": "<|end|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    folder = save(tmp_path, backend, eos_token="<|end|>", added_tokens_decoder={"512": token})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_token_id == 512
    assert 512 in tokenizer.special_ids
    assert tokenizer.encode("Once<|end|>") == AutoTokenizer.from_pretrained(folder)("Once<|end|>").input_ids
    folder = save(tmp_path, backend, added_tokens_decoder={"700": token})
    with pytest.raises(TokenizerError, match=r"the id 700, tokenizer\.json the id 512"):
        Tokenizer.load(folder)


def test_a_named_token_is_special_even_where_tokenizer_json_forgot(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "<end>": 2}, []))
    tokenizer = Tokenizer.load(save(tmp_path, backend, eos_token="<end>", additional_special_tokens=["b", "none"]))
    assert tokenizer.special_ids == {1, 2}
    assert tokenizer.decode([0, 1, 2], skip_special_tokens=True) == "a"
    assert tokenizer.decode([0, 1, 2]) == "a b <end>"


def test_fingerprints_are_equal_exactly_where_ids_mean_the_same(tmp_path: Path) -> None:
    same = Tokenizer.load(SMALL)
    assert TOKENIZERS["stories"].fingerprint() == same.fingerprint()
    spec = json.loads((TARGET / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    vocab["▁Once"], vocab["▁time"] = vocab["▁time"], vocab["▁Once"]
    swapped = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)))
    assert swapped.fingerprint() != same.fingerprint()
    assert swapped.vocab_size == same.vocab_size == same.num_ids == 512


def test_a_missing_tokenizer_says_which_file_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing.*save_pretrained"):
        Tokenizer.load(tmp_path)


def test_text_that_is_not_unicode_is_the_users_mistake() -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        TOKENIZERS["stories"].encode("\ud800")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["stories", "byte_level"]), st.text(max_size=400), st.integers(1, 12), st.integers(0, 6))
def test_a_text_within_a_limit_has_its_own_tokens(name: str, text: str, limit: int, doublings: int) -> None:
    """Refused is only what has too many, whole or by its beginning."""
    tokenizer, text = TOKENIZERS[name], text * 2**doublings
    tokens = tokenizer.encode(text)
    try:
        assert tokenizer.encode_within(text, limit) == tokens
    except PromptTooLong:
        assert len(tokens) >= limit


@pytest.mark.parametrize("text", ["once upon a time ", "a", " ", "é", "\n\n"])
def test_no_more_of_a_long_text_is_cut_into_tokens_than_shows_its_length(text: str) -> None:
    """A limit of 64 tokens and texts of a million characters: 512, 1,024, ... are looked at, no token is so long."""
    cut = []

    class Watched(Tokenizer):
        @override
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            cut.append(len(text))
            return super().encode(text, add_special_tokens)

    watched = Watched(tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json")))
    with pytest.raises(PromptTooLong, match=r"length is 64 tokens, and its first .*: shorten it"):
        watched.encode_within(text * (10**6 // len(text)), 64)
    assert sum(cut) <= 2 * 64 * 32
    cut.clear()
    assert watched.encode_within("once", 64)
    assert cut == [4]
