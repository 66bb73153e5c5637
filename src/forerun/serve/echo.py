"""Echo: a prompt as the beginning of a completion's text, with the log-probabilities of its tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.text.tokenizer import Tokenizer


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
