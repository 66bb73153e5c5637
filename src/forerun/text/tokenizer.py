"""The tokenizer of a checkpoint: text to ids, ids to text, and a conversation to its prompt.

It gives the same ids and special tokens as transformers, and has the most used methods of transformers' tokenizers,
with the same names and defaults.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, overload

import tokenizers

from forerun.errors import InvalidRequest, PromptTooLong
from forerun.limits import shown
from forerun.text.chat import ChatTemplate
from forerun.text.detokenize import ByteTable, IncrementalDecoder, byte_table, spelling_of
from forerun.text.files import damage_as_errors, read_tokenizer, template_of

_CONTEXT_TOKENS = 4
LONG_TEXT = 1 << 12  # characters; tokenizing more takes milliseconds
CHARACTERS_PER_TOKEN = 8  # more than texts usually have, so that few texts that fit the context are tokenized twice


class Encoding(dict[str, Any]):
    """The result of calling a tokenizer: `input_ids`, also as an attribute."""

    @property
    def input_ids(self) -> Any:
        """A list of ids, or a list of such lists."""
        return self["input_ids"]


class Tokenizer:
    """The checkpoint's tokenizer. Ids that the vocabulary lacks (a model's padding ids) decode to empty text."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named: Mapping[str, str] | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.named_tokens: Mapping[str, str] = dict(named or {})
        self._template = template or ChatTemplate(None, "this tokenizer")
        self._spelling = spelling_of(backend)
        self.bos_token, self.eos_token, self.pad_token = map(
            self.named_tokens.get, ("bos_token", "eos_token", "pad_token")
        )
        self.bos_token_id, self.eos_token_id, self.pad_token_id = map(
            self._id_of, (self.bos_token, self.eos_token, self.pad_token)
        )
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def __reduce__(self) -> Any:
        """Pickling, for copies in other processes."""
        return partial(Tokenizer, named=self.named_tokens, template=self._template), (self._backend,)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder. Raises TokenizerError if a file is missing or damaged."""
        backend, named = read_tokenizer(Path(folder))
        return cls(backend, named=named, template=template_of(Path(folder)))

    def __len__(self) -> int:
        """Number of tokens in the vocabulary, added tokens included."""
        return self.vocab_size

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoding:
        """The ids of a text, or of each text of a list, as `input_ids`."""
        ids = (
            self.encode(text, add_special_tokens)
            if isinstance(text, str)
            else [self.encode(each, add_special_tokens) for each in text]
        )
        return Encoding(input_ids=ids)

    def get_vocab(self) -> dict[str, int]:
        """The id of every token, by its spelling in the vocabulary."""
        return self._backend.get_vocab()

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of a token, given in the spelling of the vocabulary; None if it does not exist."""
        return self._backend.token_to_id(token)

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size:,} tokens, eos {self.eos_token!r})"

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary, added tokens included."""
        return self._backend.get_vocab_size()

    @cached_property
    def num_ids(self) -> int:
        """The highest id plus one; may exceed `vocab_size`, since ids may have gaps."""
        return max(self._backend.get_vocab().values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the special tokens that tokenizer.json's post-processor adds.

        A text without tokens becomes the BOS token, since a model needs at least one token.
        """
        try:
            with damage_as_errors("tokenizer.json"):
                ids = self._encoding(text, add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            at = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), 0)
            near = shown(text[max(0, at - 16) : at + 16])
            fix = "encode it as UTF-8, without lone surrogates"
            raise InvalidRequest("prompt", f"{near} is not valid Unicode text: {fix}") from error
        if add_special_tokens and self.bos_token_id is not None and not ids:
            return [self.bos_token_id]
        return list(ids)

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        """The backend's encoding of a text. A long one is encoded as a batch, which lets other threads run."""
        if isinstance(text, str) and len(text) > LONG_TEXT:
            with suppress(TypeError):  # the call below raises a better error
                return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def encode_within(self, text: str, limit: int, add_special_tokens: bool = True) -> list[int]:
        """`encode` for a text that should have fewer than `limit` tokens.

        A megabyte takes 1.5 s and hundreds of MB, so of a long text a prefix is encoded first, then one of twice its
        length, and so on. Raises PromptTooLong if a prefix has more than 1.5 times `limit` tokens: the rest of the text
        may merge its last tokens with others, but not that many.
        """
        size = CHARACTERS_PER_TOKEN * limit
        while size < len(text):
            count = len(self.encode(text[:size], add_special_tokens))
            if 2 * count >= 3 * limit:
                raise PromptTooLong(
                    "prompt",
                    f"the prompt is too long: this model's maximum context length is {limit} tokens, and its first "
                    f"{size} characters alone are {count} tokens: shorten it.",
                )
            size *= 2
        return self.encode(text, add_special_tokens)

    def encoder(self, *, inside: bool) -> Callable[[str], list[int]]:
        """An encoder that neither adds special tokens nor recognises them in the text.

        `inside` is for text that follows other text: it gets no leading blank, which some tokenizers add at the start.
        """
        state = json.loads(self._backend.to_str())
        if inside:
            state |= {part: _without_lead(state[part]) for part in ("normalizer", "pre_tokenizer")}
        backend = tokenizers.Tokenizer.from_str(json.dumps(state))
        backend.encode_special_tokens = True
        return lambda text: list(backend.encode(text, add_special_tokens=False).ids)

    @cached_property
    def encode_inside(self) -> Callable[[str], list[int]]:
        """The ids of text that follows other text, without special tokens."""
        return self.encoder(inside=True)

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """The ids of a word inside other text, without and with a blank before it."""
        bare = word.lstrip() or word
        return [tuple(self.encode_inside(text)) for text in (bare, f" {bare}")]

    def byte_table(self) -> ByteTable | None:
        """The bytes that each id adds to a text, special tokens included; None for decoders that do not join bytes."""
        return byte_table(self._backend)

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD.

        Takes one id or several, also of numpy or torch. Raises InvalidRequest for anything that is not an id.
        """
        try:
            numbers = map(operator.index, ids) if isinstance(ids, Iterable) else [operator.index(ids)]
            return self._backend.decode(list(numbers), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise InvalidRequest("ids", f"{shown(ids)} are not token ids ({error}).") from error

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        """The text of each list of ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def decoder(
        self, skip_special_tokens: bool = True, after: Sequence[int] = (), shown: Collection[int] = ()
    ) -> IncrementalDecoder:
        """A new decoder of ids that follow the ids `after` (a prompt), whose text it does not return.

        `skip_special_tokens` leaves out all special tokens except those in `shown`. The text is what `decode` of all
        ids adds to the text of `after`, whose last character is assumed to be complete: "Once upon" continues with
        " a", blank included.
        """
        hidden = self.special_ids.difference(shown) if skip_special_tokens else frozenset()
        before: list[int] = []
        for token_id in reversed(after):
            if token_id not in hidden and self._backend.id_to_token(token_id):
                before.insert(0, token_id)
            if len(before) == _CONTEXT_TOKENS:
                break
        return IncrementalDecoder(self._spelling(before), hidden, self.special_ids)

    def surface(self, token_id: int) -> str | None:
        """The spelling of a token in the vocabulary; None for an id that the vocabulary lacks."""
        return self._backend.id_to_token(token_id)

    def fingerprint(self) -> str:
        """A hash of the vocabulary: equal for tokenizers in which every id is the same token."""
        digest = hashlib.sha256()
        by_id = sorted((token_id, token) for token, token_id in self._backend.get_vocab().items())
        for token_id, token in by_id:
            digest.update(f"{token_id}\t{token}\n".encode())
        return digest.hexdigest()

    @overload
    def apply_chat_template(
        self, conversation: object, tools: object = ..., *, tokenize: Literal[False], **options: Any
    ) -> str: ...

    @overload
    def apply_chat_template(
        self, conversation: object, tools: object = ..., *, tokenize: Literal[True] = ..., **options: Any
    ) -> list[int]: ...

    def apply_chat_template(
        self, conversation: object, tools: object = None, *, tokenize: bool = True, **options: Any
    ) -> str | list[int]:
        """Render a list of messages with the chat template: token ids, or text with `tokenize=False`.

        `add_generation_prompt=True` starts the model's answer, `continue_final_message=True` leaves the last message
        open to be continued, and `chat_template` replaces the checkpoint's own; all other options (`documents`,
        `enable_thinking`, ...) are passed to the template. Raises TokenizerError if there is no template or it is
        broken, InvalidRequest if the messages are invalid or the template refuses them.
        """
        text = self.template(options.pop("chat_template", None)).render(
            conversation, tokens=self.named_tokens, tools=tools, **options
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def template(self, own: object = None) -> ChatTemplate:
        """The checkpoint's chat template, or `own` instead, if given."""
        return self._template if own is None else ChatTemplate(own, "chat_template")

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)


def _without_lead(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer, changed so that it adds nothing before a text."""
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
