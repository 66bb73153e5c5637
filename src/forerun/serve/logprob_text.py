"""Log-probabilities in the formats of OpenAI and vLLM, with the text and bytes of tokens, and echoed prompts."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from forerun.sampling.logprobs import TokenLogprobs
from forerun.text.tokenizer import Tokenizer


class TokenTexts:
    """The bytes and text of each token of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.table = tokenizer.byte_table()

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; with a tokenizer that is not byte-level, those of its decoded text."""
        if self.table is None:
            return self.tokenizer.decode(token).encode()
        spelled = self.table.spelled
        return (spelled[token] if token < len(spelled) else None) or b""

    def text_of(self, token: int) -> str:
        """The text of a token, with U+FFFD for incomplete characters."""
        return self.bytes_of(token).decode("utf-8", "replace")


class OffsetCounter:
    """Character offsets of the tokens of a growing text whose first character is number `num_characters`.

    A token that contains part of a character starts at that character.
    """

    def __init__(self, num_characters: int = 0) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_characters = num_characters

    def next(self, spelled: bytes) -> int:
        """The offset of the next token, given its bytes."""
        offset = self.num_characters
        self.num_characters += len(self.decoder.decode(spelled))
        return offset


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The text of a prompt; token `i` starts at character `offsets[i]`.

    A token without text, such as BOS, has the offset of the next token.
    """

    text: str
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, prompt: str | None, token_ids: Seq[int], tokenizer: Tokenizer, skip_special_tokens: bool) -> PromptEcho:
        """The echo of a prompt: its text or, for a prompt of token ids, their decoded text."""
        decoder, offsets, pieces, length = tokenizer.decoder(skip_special_tokens), [], [], 0
        for token in token_ids:
            offsets.append(length)
            pieces.append(decoder.push(token))
            length += len(pieces[-1])
        text = "".join([*pieces, decoder.finish()]) if prompt is None else prompt
        return cls(text, tuple(min(offset, len(text)) for offset in offsets))


def chat_entries(logprobs: Seq[TokenLogprobs], texts: TokenTexts) -> list[dict[str, Any]]:
    """Log-probabilities in the format of chat completions: one entry per token."""
    return [
        {
            **entry(each.token_id, each.logprob, texts),
            "top_logprobs": [
                entry(token, logprob, texts) for token, logprob in zip(each.top_ids, each.top_logprobs, strict=True)
            ],
        }
        for each in logprobs
    ]


def entry(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    """One token with its log-probability."""
    spelled = texts.bytes_of(token)
    return {"token": texts.text_of(token), "logprob": finite(logprob), "bytes": list(spelled)}


def completion_lists(logprobs: Seq[TokenLogprobs], texts: TokenTexts, offsets: OffsetCounter) -> dict[str, Any]:
    """Log-probabilities in the format of completions: parallel lists. The sampled token is always among the top."""
    top: list[dict[str, float]] = []
    for each in logprobs:
        pairs = zip((*each.top_ids, each.token_id), (*each.top_logprobs, each.logprob), strict=True)
        top.append(highest_by_text((texts.text_of(token), finite(logprob)) for token, logprob in pairs))
    return {
        "tokens": [texts.text_of(each.token_id) for each in logprobs],
        "token_logprobs": [finite(each.logprob) for each in logprobs],
        "top_logprobs": top,
        "text_offset": [offsets.next(texts.bytes_of(each.token_id)) for each in logprobs],
    }


def highest_by_text(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Log-probabilities by text; the highest one if several tokens have the same text."""
    highest: dict[str, float] = {}
    for text, logprob in pairs:
        highest[text] = max(logprob, highest.get(text, logprob))
    return highest


def prompt_entries(logprobs: Seq[TokenLogprobs], texts: TokenTexts) -> list[Mapping[str, Any] | None]:
    """Log-probabilities of a prompt in vLLM's format; null for its first token."""
    entries: list[Mapping[str, Any] | None] = [None]
    for each in logprobs:
        ranks = range(1, len(each.top_ids) + 1)
        every = {t: (value, rank) for t, value, rank in zip(each.top_ids, each.top_logprobs, ranks, strict=True)}
        every[each.token_id] = each.logprob, each.rank
        entries.append(
            {
                str(token): {"logprob": finite(value), "rank": rank, "decoded_token": texts.text_of(token)}
                for token, (value, rank) in every.items()
            }
        )
    return entries


def finite(logprob: float) -> float:
    """A finite log-probability, since JSON has no infinities; like OpenAI, -9999 stands for probability 0."""
    return max(logprob, -9999.0)
