"""The files of a tokenizer: tokenizer.json, tokenizer_config.json and special_tokens_map.json of a Hugging Face folder.

This file decides which tokens are special, which have a name, and which file is used if they differ: tokenizer.json for
tokenization, including blanks and special tokens around a text; tokenizer_config.json for names and chat templates. Its
keys `add_bos_token`, `add_eos_token`, `add_prefix_space` and `legacy` repeat tokenizer.json and are not read. The
result agrees with transformers 5, except for some classes there that build their own steps from the last two keys.
Damage of any kind is a TokenizerError that names the file and the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from forerun.errors import TokenizerError
from forerun.fields import INT32, Fields, mistaken, read_fields, short
from forerun.text.chat import ChatTemplate

TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")  # the first has precedence
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
LISTED = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token
MOST_IDS = 1 << 22  # several times the largest vocabulary
AGAIN = "download or copy it again"
GGUF_FILE = "gguf_file"  # key in tokenizer_config.json: the GGUF file of which the folder is the cache
PROBLEM = "tokenizer.problem.txt"  # says why the cache of a GGUF file has no tokenizer.json


def read_tokenizer(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """A folder's tokenizer, and its named tokens. Raises TokenizerError if a file is missing or damaged."""
    backend = read_backend(folder / "tokenizer.json")
    config, listed = (read_optional(folder / name) for name in TOKEN_FILES)
    declare_added_tokens(backend, config)
    tokens = {name: token_text(config if config.values.get(name) else listed, name) for name in NAMED}
    named = {name: text for name, text in tokens.items() if text and backend.token_to_id(text) is not None}
    if "bos_token" not in named:
        named |= bos_of_model(backend, folder)
    others = [text for key in LISTED for text in token_texts(config if key in config.values else listed, key)]
    mark_special(backend, [*named.values(), *others])
    return backend, named


def template_of(folder: Path) -> ChatTemplate:
    """The chat templates of a folder, which are read at first use."""
    values = read_optional(folder / TOKEN_FILES[0]).values
    return ChatTemplate.load(folder, values.get("chat_template"), values.get(GGUF_FILE))


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer that tokenizer.json describes."""
    if not path.exists():
        problem = path.with_name(PROBLEM)
        if problem.exists():
            raise TokenizerError(problem.read_text(encoding="utf-8"))
        raise TokenizerError(
            f"{path} is missing: forerun reads tokenizers in this format only. Save it with transformers "
            "(AutoTokenizer.from_pretrained(model).save_pretrained(folder)), or give a folder that has it"
        )
    try:
        if what := mistaken(path):
            raise TokenizerError(f"{path} {what}")
        with damage_as_errors(str(path)):
            backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
            ids = backend.encode("a b é\n").ids  # raises if a post-processor names tokens that it does not describe
            for count in range(min(len(ids), 8)):  # raises if the decoder fails on some tokens
                backend.decode(ids[:count], skip_special_tokens=False)
                backend.decode(ids[count : count + 1], skip_special_tokens=False)
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read ({error.strerror}): make it a readable file") from error
    except ValueError as error:
        raise TokenizerError(f"{path} is damaged ({short(error)}): {AGAIN}") from error
    largest = max(backend.get_vocab().values(), default=0)
    if largest > MOST_IDS:
        raise TokenizerError(f"{path} is damaged (its largest id, {largest}, exceeds {MOST_IDS}): {AGAIN}")
    return backend


@contextmanager
def damage_as_errors(origin: str) -> Iterator[None]:
    """Turns errors of the tokenizers library about damaged files into TokenizerErrors: panics and plain Exceptions."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":  # a class without a module
            raise
        raise TokenizerError(f"{origin} is damaged ({short(error)}): {AGAIN}") from error


def read_optional(path: Path) -> Fields:
    """The JSON object in a file; an empty one if the file is missing."""
    return read_fields(path, TokenizerError, TokenizerError) if path.exists() else Fields(path, {}, TokenizerError)


def token_text(fields: Fields, key: str) -> str | None:
    """The text of the token under a key, which is a string or an object."""
    value = fields.values.get(key)
    return content_of(fields, key, value) if value else None


def token_texts(fields: Fields, key: str) -> list[str]:
    """The texts of the tokens under a key, which has a list or an object of tokens."""
    value = fields.values.get(key) or []
    if not isinstance(value, list | dict):
        raise fields.refuse(key, f"it must be a list of tokens: {AGAIN}")
    return [content_of(fields, key, token) for token in (value.values() if isinstance(value, dict) else value)]


def content_of(fields: Fields, key: str, token: Any) -> str:
    """The text of a token, which is a string or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str) or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise fields.refuse(key, f"a token must be text, or an object with its text under content: {AGAIN}")
    return text


def bos_of_model(backend: tokenizers.Tokenizer, folder: Path) -> dict[str, str]:
    """The BOS token from the id in config.json, for folders whose tokenizer does not name one."""
    bos_id = read_optional(folder / "config.json").values.get("bos_token_id")
    if not isinstance(bos_id, int) or not 0 <= bos_id <= INT32:
        return {}
    token = backend.id_to_token(bos_id)
    return {} if token is None else {"bos_token": token}


def declare_added_tokens(backend: tokenizers.Tokenizer, config: Fields) -> None:
    """Add the tokens that tokenizer_config.json declares and tokenizer.json lacks, with the declared ids."""
    key = "added_tokens_decoder"
    present = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
    declared = config.inside(key)
    if not all(name.isdecimal() and len(name) < 10 for name in declared.values):
        raise config.refuse(key, f"it must be an object of tokens by id: {AGAIN}")
    for name in sorted(declared.values, key=int):
        token_id, description = int(name), declared.inside(name)
        content = content_of(declared, name, description.values)
        if present.get(token_id) == content:
            continue
        flags = {flag: description.flag(flag) for flag in FLAGS if description.values.get(flag) is not None}
        token = tokenizers.AddedToken(content, **flags)
        backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
        if backend.token_to_id(content) != token_id:
            raise TokenizerError(
                f"{config.path}: {key} gives {content[:100]!r} the id {token_id}, tokenizer.json the id "
                f"{backend.token_to_id(content)}: take both files from the same checkpoint"
            )


def mark_special(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> None:
    """Mark these tokens as special, which tokenizer.json may have forgotten; tokens that it lacks are not added."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    known = [text for text in texts if text not in special and backend.token_to_id(text) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in known])
