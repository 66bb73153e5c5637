"""Token ids as the text and bytes that log-probabilities are reported with, and a prompt as a completion repeats it."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from forerun.sampling.logprobs import TokenLogprobs
from forerun.text.tokenizer import Tokenizer


class TokenTexts:
    """What each token of one tokenizer adds to a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.table = tokenizer.byte_table()

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; those of its own text where the tokenizer does not join bytes."""
        if self.table is None:
            return self.tokenizer.decode(token).encode()
        spelled = self.table.spelled
        return (spelled[token] if token < len(spelled) else None) or b""

    def text_of(self, token: int) -> str:
        """The text of a token; U+FFFD for bytes that are no character by themselves."""
        return self.bytes_of(token).decode("utf-8", "replace")


class OffsetCounter:
    """Where each token of a growing text begins, in characters, behind `num_characters` of other text.

    A token that has half a character begins with that one.
    """

    def __init__(self, num_characters: int = 0) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_characters = num_characters

    def next(self, spelled: bytes) -> int:
        """The offset of the next token."""
        offset = self.num_characters
        self.num_characters += len(self.decoder.decode(spelled))
        return offset


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The text of a prompt; token `i` begins at character `offsets[i]` of it.

    A token that adds nothing to the text, such as a BOS token in front, begins where the next one does.
    """

    text: str
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, prompt: str | None, token_ids: Seq[int], tokenizer: Tokenizer, skip_special_tokens: bool) -> PromptEcho:
        """The echo of a prompt, which is the text that was given or, where there is none, that of its tokens."""
        decoder, offsets, pieces, length = tokenizer.decoder(skip_special_tokens), [], [], 0
        for token in token_ids:
            offsets.append(length)
            pieces.append(decoder.push(token))
            length += len(pieces[-1])
        text = "".join([*pieces, decoder.finish()]) if prompt is None else prompt
        return cls(text, tuple(min(offset, len(text)) for offset in offsets))


def chat_entries(logprobs: Seq[TokenLogprobs], texts: TokenTexts) -> list[dict[str, Any]]:
    """Log-probabilities as chat answers have them: one entry for each token."""
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
    """Log-probabilities as completions have them: parallel lists. The token that was drawn is always among the top."""
    top: list[dict[str, float]] = []
    for each in logprobs:
        pairs = zip((*each.top_ids, each.token_id), (*each.top_logprobs, each.logprob), strict=True)
        top.append(strongest((texts.text_of(token), finite(logprob)) for token, logprob in pairs))
    return {
        "tokens": [texts.text_of(each.token_id) for each in logprobs],
        "token_logprobs": [finite(each.logprob) for each in logprobs],
        "top_logprobs": top,
        "text_offset": [offsets.next(texts.bytes_of(each.token_id)) for each in logprobs],
    }


def strongest(pairs: Any) -> dict[str, float]:
    """Texts with log-probabilities; of tokens with the same text the likeliest counts."""
    strengths: dict[str, float] = {}
    for text, logprob in pairs:
        strengths[text] = max(logprob, strengths.get(text, logprob))
    return strengths


def prompt_entries(logprobs: Seq[TokenLogprobs], texts: TokenTexts) -> list[Mapping[str, Any] | None]:
    """Log-probabilities of a prompt as vLLM's server writes them: nothing for its first token."""
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
    """A log-probability that JSON can hold: OpenAI writes -9999 for what never happens."""
    return max(logprob, -9999.0)
