"""The tokenizer of a checkpoint: text to ids, ids to text, and a conversation to its prompt.

Reads a Hugging Face folder as it is (tokenizer.json, tokenizer_config.json, special_tokens_map.json) and agrees with
transformers about ids, special tokens and the token put in front. It knows nothing of models or requests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers

from forerun.errors import InvalidRequest, PromptTooLong, TokenizerError
from forerun.text.chat import ChatTemplate
from forerun.text.detokenize import ByteTable, IncrementalDecoder, byte_table, spelling_of

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_CONTEXT_TOKENS = 4
CHARACTERS_PER_TOKEN = 8  # texts have fewer; few that fit their context are cut into tokens twice


class Tokenizer:
    """Text to token ids and back, as the checkpoint's own tokenizer does it.

    Ids that the vocabulary does not have (a model's padding rows) decode to nothing.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named: Mapping[str, str] | None = None,
        always_bos: bool = False,
        template: ChatTemplate | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._named = dict(named or {})
        self._always_bos = always_bos
        self._template = template or ChatTemplate(None, "this tokenizer")
        self._spelling = spelling_of(backend)
        self.bos_id = self._id_of("bos_token")
        self.eos_id = self._id_of("eos_token")
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder. Raises TokenizerError where a file is missing or damaged."""
        folder = Path(folder)
        backend = _read_backend(folder / "tokenizer.json")
        config = _read_json(folder / "tokenizer_config.json")
        settings = _read_json(folder / "special_tokens_map.json") | config
        _declare_added_tokens(backend, config.get("added_tokens_decoder"), folder)
        named = {name: _content(settings[name]) for name in _NAMED if settings.get(name)}
        named = {name: content for name, content in named.items() if backend.token_to_id(content) is not None}
        if "bos_token" not in named:
            named |= _bos_of_model(backend, folder)
        listed = [_content(token) for key in _LISTED for token in _as_list(settings.get(key))]
        _mark_special(backend, [*named.values(), *listed])
        return cls(
            backend,
            named=named,
            always_bos=config.get("add_bos_token") is True,
            template=ChatTemplate.load(folder, config.get("chat_template")),
        )

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, added ones too."""
        return self._backend.get_vocab_size()

    @cached_property
    def num_ids(self) -> int:
        """One more than the highest id; a vocabulary may have gaps."""
        return max(self._backend.get_vocab().values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the special tokens that tokenizer.json's post-processor puts around it.

        Where it puts none, `add_bos_token: true` in tokenizer_config.json adds the BOS token in front. A text
        without any token becomes the BOS token alone, for a model has to start from something.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("prompt", f"{text[:40]!r} is not valid Unicode text ({error})") from error
        missing = self._always_bos and (not ids or ids[0] != self.bos_id)
        if add_special_tokens and self.bos_id is not None and (missing or not ids):
            return [self.bos_id, *ids]
        return list(ids)

    def encode_within(self, text: str, limit: int, add_special_tokens: bool = True) -> list[int]:
        """What `encode` gives, for a text that should have fewer than `limit` tokens.

        A megabyte takes 1.5 s and hundreds of MB, so a long text is cut by its beginning first, twice as much each
        time. Raises PromptTooLong where a beginning has half as many again as the limit: what follows may join its
        last tokens to longer ones, but never so many.
        """
        size = CHARACTERS_PER_TOKEN * limit
        while size < len(text):
            count = len(self.encode(text[:size], add_special_tokens))
            if 2 * count >= 3 * limit:
                raise PromptTooLong(
                    "prompt",
                    f"{count} tokens, in its first {size} characters alone, leave no room in a context of {limit}: "
                    "shorten it.",
                )
            size *= 2
        return self.encode(text, add_special_tokens)

    def encoder(self, *, inside: bool) -> Callable[[str], list[int]]:
        """An encoder of text as text: it neither adds special tokens nor finds any, whatever the text spells.

        `inside` is for text behind other text: no blank is put in front of it, as some tokenizers do at the start.
        """
        state = json.loads(self._backend.to_str())
        if inside:
            state |= {part: _without_lead(state[part]) for part in ("normalizer", "pre_tokenizer")}
        backend = tokenizers.Tokenizer.from_str(json.dumps(state))
        backend.encode_special_tokens = True
        return lambda text: list(backend.encode(text, add_special_tokens=False).ids)

    @cached_property
    def encode_inside(self) -> Callable[[str], list[int]]:
        """The ids of text that stands behind other text, as `encoder` gives them."""
        return self.encoder(inside=True)

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """The ids of a word inside other text, without a blank in front and with one."""
        bare = word.lstrip() or word
        return [tuple(self.encode_inside(text)) for text in (bare, f" {bare}")]

    def byte_table(self) -> ByteTable | None:
        """What each id adds to a text, special tokens included; None for a decoder that does not join bytes."""
        return byte_table(self._backend)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids, taken together; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decoder(self, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> IncrementalDecoder:
        """A fresh decoder of ids that follow `after` (a prompt; nothing of it is shown).

        With `after` empty its text is that of `decode`. Otherwise it is what `decode` adds to the text of `after`,
        whose last character is taken as finished: "Once upon" goes on with " a", space included.
        """
        hidden = self.special_ids if skip_special_tokens else frozenset()
        before: list[int] = []
        for token_id in reversed(after):
            if token_id not in hidden and self._backend.id_to_token(token_id):
                before.insert(0, token_id)
            if len(before) == _CONTEXT_TOKENS:
                break
        return IncrementalDecoder(self._spelling(before), hidden)

    def surface(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None for an id that the vocabulary does not have."""
        return self._backend.id_to_token(token_id)

    def fingerprint(self) -> str:
        """A hash of which id means which token: equal for tokenizers whose ids can be exchanged."""
        digest = hashlib.sha256()
        by_id = sorted((token_id, token) for token, token_id in self._backend.get_vocab().items())
        for token_id, token in by_id:
            digest.update(f"{token_id}\t{token}\n".encode())
        return digest.hexdigest()

    def require_chat_template(self) -> None:
        """Raises TokenizerError where `chat` would, for want of a template that can be used."""
        self._template.compile()

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The conversation as the model was trained to read it; encode it with `add_special_tokens=False`.

        Raises TokenizerError where the checkpoint has no template or a broken one, InvalidRequest where the
        template refuses the conversation.
        """
        return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, tokens=self._named)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: Literal[False],
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> str:
        """A conversation as text, with options for the template, or with another template. Raises as `chat` does."""
        template = self._template if chat_template is None else ChatTemplate(chat_template, "chat_template")
        return template.render(conversation, add_generation_prompt, self._named, tools=tools, **options)

    def _id_of(self, name: str) -> int | None:
        token = self._named.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise TokenizerError(
            f"{path} is missing: forerun reads tokenizers in this format only. Save it with transformers "
            "(AutoTokenizer.from_pretrained(model).save_pretrained(folder)), or give a folder that has it"
        )
    try:
        return tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except ValueError as error:
        raise TokenizerError(f"{path} is damaged ({error}): download or copy it again") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in an optional file; {} where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is damaged ({error}): download or copy it again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}, not an object: download or copy it again")
    return value


def _without_lead(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer that puts nothing in front of a text."""
    if step is None or step["type"] == "Prepend":
        return None
    never: dict[str, dict[str, Any]] = {
        "Metaspace": {"prepend_scheme": "never"},
        "ByteLevel": {"add_prefix_space": False},
    }
    step = {**step, **never.get(step["type"], {})}
    for part in ("normalizers", "pretokenizers"):
        if part in step:
            step[part] = [kept for kept in map(_without_lead, step[part]) if kept is not None]
    return step


def _content(token: str | Mapping[str, Any]) -> str:
    """A token's text; files write it plainly or as a description."""
    return token if isinstance(token, str) else str(token["content"])


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value or [])


def _bos_of_model(backend: tokenizers.Tokenizer, folder: Path) -> dict[str, str]:
    """The BOS token by config.json's id, for folders whose tokenizer does not name one."""
    bos_id = _read_json(folder / "config.json").get("bos_token_id")
    token = backend.id_to_token(bos_id) if isinstance(bos_id, int) and bos_id >= 0 else None
    return {} if token is None else {"bos_token": token}


def _declare_added_tokens(backend: tokenizers.Tokenizer, declared: Any, folder: Path) -> None:
    """Adds the tokens that tokenizer_config.json declares and tokenizer.json lacks, under the ids it declares."""
    present = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
    for token_id, description in sorted((declared or {}).items(), key=lambda item: int(item[0])):
        token = tokenizers.AddedToken(**description)
        if present.get(int(token_id)) == token.content:
            continue
        backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
        if backend.token_to_id(token.content) != int(token_id):
            raise TokenizerError(
                f"{folder / 'tokenizer_config.json'} gives {token.content!r} the id {token_id}, tokenizer.json the "
                f"id {backend.token_to_id(token.content)}: take both files from the same checkpoint"
            )


def _mark_special(backend: tokenizers.Tokenizer, contents: Sequence[str]) -> None:
    """Named tokens are special even where tokenizer.json forgot to say so; tokens it lacks stay out."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    known = [text for text in contents if text not in special and backend.token_to_id(text) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in known])
