"""Bad words: texts that an answer must not contain, as a logits processor.

The file decides which token sequences spell a word and when the last token of one is ruled out. A word is known by the
tokens that it has at the start of a text and behind a blank, as in vLLM; the same letters cut into other tokens are not
recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BadWords:
    """Rules out every token that would complete one of `words` within the answer, which follows `num_prompt` tokens."""

    words: frozenset[TokenIds]
    num_prompt: int

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """The logits with -inf for what may not be said next."""
        said = tokens[self.num_prompt :]
        ends = [word[-1] for word in self.words if tuple(said[len(said) - len(word) + 1 :]) == word[:-1]]
        return logits.index_fill(0, torch.tensor(ends, dtype=torch.long, device=logits.device), -torch.inf)


def spellings(words: Sequence[str], encode: Callable[[str], list[int]]) -> frozenset[TokenIds]:
    """The tokens of each word, with a blank in front of it and without; `encode` adds none of its own."""
    texts = {text for word in words for text in (word, f" {word.lstrip()}")}
    return frozenset(ids for text in texts if (ids := tuple(encode(text))))
