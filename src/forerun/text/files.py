"""The files of a tokenizer: tokenizer.json, tokenizer_config.json and special_tokens_map.json of a Hugging Face folder.

This file decides which tokens are special, which have a name, and which file is used where they differ: tokenizer.json
for how texts become ids, blanks and tokens around them included; tokenizer_config.json for names and chats. Its keys
`add_bos_token`, `add_eos_token`, `add_prefix_space` and `legacy` repeat what tokenizer.json says, and are not read. The
result agrees with transformers 5, except that some classes there build their own steps from the last two. Damage of any
kind is a TokenizerError that names the file and the key.
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

TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")  # what the first says counts
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
LISTED = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token
MOST_IDS = 1 << 22  # several times what the largest vocabulary has
AGAIN = "download or copy it again"
GGUF_FILE = "gguf_file"  # in tokenizer_config.json: the file that such a folder stands for
PROBLEM = "tokenizer.problem.txt"  # why a folder that stands for a file has no tokenizer.json


def read_tokenizer(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """A folder's tokenizer, and its tokens with a name. Raises TokenizerError where a file is missing or damaged."""
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
    """The chat templates of a folder, which are read when they are needed."""
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
            ids = backend.encode("a b é\n").ids  # a post-processor may name tokens that it does not describe
            for count in range(min(len(ids), 8)):  # a decoder may fail on texts of some tokens
                backend.decode(ids[:count], skip_special_tokens=False)
                backend.decode(ids[count : count + 1], skip_special_tokens=False)
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read ({error.strerror}): make it a readable file") from error
    except ValueError as error:
        raise TokenizerError(f"{path} is damaged ({short(error)}): {AGAIN}") from error
    largest = max(backend.get_vocab().values(), default=0)
    if largest > MOST_IDS:
        raise TokenizerError(f"{path} is damaged (vocab has the id {largest}, and no vocabulary is so large): {AGAIN}")
    return backend


@contextmanager
def damage_as_errors(origin: str) -> Iterator[None]:
    """Within it what the tokenizers library raises of damage is a TokenizerError: panics, and plain Exceptions."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":  # which cannot be imported
            raise
        raise TokenizerError(f"{origin} is damaged ({short(error)}): {AGAIN}") from error


def read_optional(path: Path) -> Fields:
    """The object in a file that may be missing."""
    return read_fields(path, TokenizerError, TokenizerError) if path.exists() else Fields(path, {}, TokenizerError)


def token_text(fields: Fields, key: str) -> str | None:
    """The text of the token under a key; files write it plainly or as a description."""
    value = fields.values.get(key)
    return content_of(fields, key, value) if value else None


def token_texts(fields: Fields, key: str) -> list[str]:
    """The texts of the tokens under a key, in a list or by name."""
    value = fields.values.get(key) or []
    if not isinstance(value, list | dict):
        raise fields.refuse(key, f"it must be a list of tokens: {AGAIN}")
    return [content_of(fields, key, token) for token in (value.values() if isinstance(value, dict) else value)]


def content_of(fields: Fields, key: str, token: Any) -> str:
    """A token's text."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str) or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise fields.refuse(key, f"a token must be text, or an object with its text under content: {AGAIN}")
    return text


def bos_of_model(backend: tokenizers.Tokenizer, folder: Path) -> dict[str, str]:
    """The BOS token by config.json's id, for folders whose tokenizer does not name one."""
    bos_id = read_optional(folder / "config.json").values.get("bos_token_id")
    if not isinstance(bos_id, int) or not 0 <= bos_id <= INT32:
        return {}
    token = backend.id_to_token(bos_id)
    return {} if token is None else {"bos_token": token}


def declare_added_tokens(backend: tokenizers.Tokenizer, config: Fields) -> None:
    """Adds the tokens that tokenizer_config.json declares and tokenizer.json lacks, under the ids it declares."""
    key = "added_tokens_decoder"
    present = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
    declared = config.inside(key)
    if not all(name.isdecimal() and len(name) < 10 for name in declared.values):
        raise config.refuse(key, f"it must give tokens by their ids: {AGAIN}")
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
    """Named tokens are special even where tokenizer.json forgot to say so; tokens it lacks stay out."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    known = [text for text in texts if text not in special and backend.token_to_id(text) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in known])
