"""The tokenizer and chat template in a GGUF file."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import LLM
from forerun.commands.answering import require_template
from forerun.errors import ChatTemplateError
from forerun.models.gguf.file import GgufFile
from forerun.models.gguf.tokenizer import PRE, byte_level, sentence_piece, splits, tokenizer_files
from forerun.models.loading import Blueprint
from forerun.models.source import find_checkpoint
from forerun.models.spec import ModelSpec
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import TARGET
from kit.gguf_files import stories

SENTENCES = (
    "Once upon a time, there was 1 little girl.",
    "  two blanks\n\nand lines\t\t",
    "naïve 你好 😀 <s> ▁x",
    "",
    " ",
)


def test_the_tokenizer_template_and_ends_of_a_file_are_its_own(tmp_path: Path) -> None:
    file = str(stories(tmp_path / "model.gguf"))
    llm, original = LLM(file), Tokenizer.load(TARGET)
    for text in SENTENCES:
        assert llm.tokenizer.encode(text) == original.encode(text), text
        assert llm.tokenizer.decode(original.encode(text)) == original.decode(original.encode(text))
    asked = [{"role": "user", "content": "hi"}]
    assert llm.tokenizer.apply_chat_template(asked, tokenize=False) == "[user]hi"
    assert Blueprint.of(file).config.eos_ids == (2,)
    named = {"tokenizer.chat_template.tool_use": "{{ tools }}"}
    template = Tokenizer.load(find_checkpoint(str(stories(tmp_path / "named.gguf", **named)))).template()
    assert template.source("tool_use") == "{{ tools }}"
    assert template.source().startswith("{% for m")


@pytest.mark.parametrize("text", ["<s>", "<s:1>", "a:1", "$A", "$x", ""])
def test_every_text_begins_and_ends_with_the_tokens_of_these_ids_whatever_their_texts(
    tmp_path: Path, text: str
) -> None:
    file = GgufFile.read(stories(tmp_path / "model.gguf", **dict[str, Any]({"tokenizer.ggml.add_eos_token": True})))
    tokens = list(file.metadata["tokenizer.ggml.tokens"])
    plain = backend_of(file).encode("a b", add_special_tokens=False).ids
    tokens[1] = text
    metadata = {**file.metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.add_bos_token": True}
    assert backend_of(replace(file, metadata=metadata)).encode("a b").ids == [1, *plain, 2]


def backend_of(file: GgufFile) -> tokenizers.Tokenizer:
    """The tokenizer of a file."""
    return tokenizers.Tokenizer.from_str(tokenizer_files(file)["tokenizer.json"])


def test_without_a_chat_template_the_error_names_the_users_file(tmp_path: Path) -> None:
    file = stories(tmp_path / "mine.gguf", **dict[str, Any]({"tokenizer.chat_template": None}))
    with pytest.raises(ChatTemplateError) as refusal:
        require_template(ModelSpec(str(file)))
    assert f"no chat template in {file} (tokenizer.chat_template)" in str(refusal.value)
    assert "name a folder that has one with --tokenizer" in str(refusal.value)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40), st.sampled_from(sorted(PRE)))
def test_byte_level_texts_are_decoded_unchanged(text: str, pre: str) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "Ġt", "he", "Ġthe"]
    metadata = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġt he"]}
    backend = byte_level(GgufFile(Path("model.gguf"), metadata, {}), tokens)
    normal = backend.normalizer.normalize_str(text) if backend.normalizer else text
    assert backend.decode(backend.encode(text).ids, skip_special_tokens=False) == normal


TOKENS = st.lists(st.text("ab▁", max_size=9) | st.sampled_from(["a" * n for n in range(20)]), max_size=40)


@given(tokens=TOKENS, data=st.data())
def test_merges_of_sentencepiece_are_those_of_every_split_looked_up(tokens: list[str], data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.sampled_from([-1.5, 0, 0.25, 3]), min_size=len(tokens), max_size=len(tokens)))
    vocab = {text: i for i, text in enumerate(tokens)}
    expected = [
        (vocab[text[:cut]], vocab[text[cut:]], i)
        for text, i in vocab.items()
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]
    assert list(splits(vocab)) == expected
    file = SimpleNamespace(path="file", metadata={"tokenizer.ggml.scores": scores})
    ranked = sorted((-scores[merged], left, right) for left, right, merged in expected)
    model = json.loads(sentence_piece(cast(GgufFile, file), tokens).to_str())["model"]
    assert model["merges"] == [[tokens[left], tokens[right]] for _, left, right in ranked]


def test_the_merges_of_a_very_long_token_are_found_at_once() -> None:
    """Looking up every part of this token would take minutes: they have 10¹² characters."""
    half = "ab" * 250_000
    vocab = {text: i for i, text in enumerate(("a", "b", "ab", half, half + half))}
    assert list(splits(vocab)) == [(0, 1, 2), (3, 3, 4)]
