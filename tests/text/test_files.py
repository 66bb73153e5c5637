"""A damaged tokenizer loads and works, or is a TokenizerError that names the file and the key."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ModelError, TokenizerError
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import TARGET
from models.damage import TEXTS, VALUES, copied, judged, places, write

TEXT = "Once upon a time é 你好 \n\0 </s> <|im_end|>"
CONFIG: dict[str, Any] = {
    "bos_token": {"content": "<s>", "special": True},
    "eos_token": "</s>",
    "add_bos_token": True,
    "additional_special_tokens": ["<unk>", {"content": "</s>"}],
    "extra_special_tokens": {"image_token": "<unk>"},
    "added_tokens_decoder": {
        "1": {"content": "<s>", "special": True, "lstrip": False},
        "512": {"content": "<|im_end|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False},
    },
    "chat_template": "{{ messages }}",
}


def used(folder: Path) -> ModelError | None:
    """The error of loading and using a tokenizer; None where there is none. Any other exception fails the test."""

    def work() -> None:
        tokenizer = Tokenizer.load(folder)
        ids = tokenizer.encode(TEXT)
        tokenizer.decode(ids)
        decoder = tokenizer.decoder()
        assert isinstance("".join(map(decoder.push, ids)) + decoder.finish(), str)
        tokenizer.byte_table()

    return judged(work, TokenizerError)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a tokenizer, to be damaged."""
    return copied(TARGET, tmp_path / "model")


@pytest.mark.short("2")
@pytest.mark.parametrize("depth", [2, 4])
def test_no_value_in_tokenizer_json_raises_another_error(folder: Path, depth: int) -> None:
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    if depth > 2:  # with a small vocabulary, which is read again and again
        whole["model"] |= {"vocab": dict(list(whole["model"]["vocab"].items())[:300]), "merges": []}
    num_loaded = 0
    for place in places(whole, depth):
        for value in VALUES.values():
            write(path, place.replaced(whole, value))
            error = used(folder)
            num_loaded += error is None
            assert error is None or "tokenizer.json" in str(error)
    assert num_loaded > 10


@pytest.mark.short("special_tokens_map.json")
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_no_value_in_the_other_files_raises_another_error(folder: Path, name: str) -> None:
    named = {key: value for key, value in CONFIG.items() if key != "added_tokens_decoder"}
    whole = CONFIG if name == "tokenizer_config.json" else named
    (folder / "tokenizer_config.json").unlink()
    write(folder / name, whole)
    assert used(folder) is None
    for place in places(whole, 3):
        for value in VALUES.values():
            write(folder / name, place.replaced(whole, value))
            error = used(folder)
            assert error is None or (name in str(error) and any(str(key) in str(error) for key in place.path)), error


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_file_of_anything_else_is_named(folder: Path, name: str) -> None:
    damages: list[Callable[[Path], object]] = [
        lambda path, text=text: path.write_bytes(text) for text in TEXTS.values()
    ]
    for damage in (*damages, lambda path: (path.unlink(), path.mkdir())):
        damage(folder / name)
        error = used(folder)
        assert (error is None and name != "tokenizer.json") or name in str(error)
        assert "is damaged" not in str(error) or "again" in str(error)
    assert "cannot be read" in str(error)
