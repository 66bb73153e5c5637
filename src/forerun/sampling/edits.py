"""TextEdits: what a request and its text change in the logits: biases, banned ids and words, token counts.

A sequence keeps them from round to round, in the form that compiled kernels read. Counts are updated with new tokens,
not computed again. `transforms.py` defines their effect on logits.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.limits import INT64
from forerun.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class TextCounts:
    """The distinct ids of a text in rising order, and how often each occurs after the prompt (`times`).

    The text is `tokens[first:num_tokens]` of a sequence whose first `num_prompt` tokens are the prompt.
    """

    first: int
    num_prompt: int
    num_tokens: int
    ids: array[int]
    times: array[int]

    @classmethod
    def of(cls, tokens: Sequence[int], first: int, num_prompt: int) -> TextCounts:
        """The counts of a text, from `first` to its end."""
        ids, inverse = np.unique(np.array(tokens[first:], dtype=np.int32), return_inverse=True)
        counted = np.bincount(inverse[max(0, num_prompt - first) :], minlength=len(ids)).astype(np.int32)
        return cls(first, num_prompt, len(tokens), array("i", ids.tobytes()), array("i", counted.tobytes()))

    def at(self, tokens: Sequence[int]) -> TextCounts:
        """The counts of a continuation of this text; for a text shorter than this one they are computed again."""
        if self.num_tokens > len(tokens) or self.num_tokens < max(self.first, self.num_prompt):
            return TextCounts.of(tokens, self.first, self.num_prompt)
        if self.num_tokens == len(tokens):
            return self
        ids, times = self.ids[:], self.times[:]
        for token in tokens[self.num_tokens :]:
            place = bisect_left(ids, token)
            if place == len(ids) or ids[place] != token:
                ids.insert(place, token)
                times.insert(place, 0)
            times[place] += 1
        return replace(self, num_tokens=len(tokens), ids=ids, times=times)


@dataclass(frozen=True, slots=True)
class TextEdits:
    """The edits of one text; `at` gives those of its continuation. Immutable, so that they can be shared.

    `added[i]` is added to the logit of the id `fixed[i]` (in rising order); -inf bans it. The ids `ends` are banned
    before the position `ends_from`. `words`, concatenated, with `lengths` tokens each, must not be completed.
    """

    fixed: array[int]
    added: array[float]
    ends: array[int]
    ends_from: int
    words: array[int]
    lengths: array[int]
    num_prompt: int
    counts: TextCounts | None
    any: bool  # whether there are any edits

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        tokens: Sequence[int],
        num_prompt: int,
        eos_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
    ) -> TextEdits:
        """The edits of a request's text."""
        fixed = {**(params.logit_bias or {}), **dict.fromkeys(params.banned_tokens, -math.inf)}
        ends = sorted({*eos_ids, *params.stop_token_ids}) if params.min_tokens else []
        repeating = params.repetition_penalty != 1
        counting = params.presence_penalty != 0 or params.frequency_penalty != 0
        return cls(
            fixed=array("i", sorted(fixed)),
            added=array("f", [fixed[token] for token in sorted(fixed)]),
            ends=array("i", ends),
            ends_from=min(num_prompt + params.min_tokens, INT64),
            words=array("i", [token for word in bad_words for token in word]),
            lengths=array("i", map(len, bad_words)),
            num_prompt=num_prompt,
            counts=TextCounts.of(tokens, 0 if repeating else num_prompt, num_prompt) if repeating or counting else None,
            any=bool(fixed or ends or bad_words) or repeating or counting,
        )

    def at(self, tokens: Sequence[int]) -> TextEdits:
        """The edits of a continuation of this text."""
        counts = None if self.counts is None else self.counts.at(tokens)
        return self if counts is self.counts else replace(self, counts=counts)

    def tables(self, tokens: Sequence[int]) -> Mapping[str, array[int] | array[float]]:
        """The arrays of `RowLaw` in laws.hpp, by name; `tokens` are the text."""
        none = array("i")
        num_ending = max(self.lengths, default=1) - 1
        ending = tokens[max(self.num_prompt, len(tokens) - num_ending) :] if num_ending else ()
        return {
            "fixed": self.fixed,
            "added": self.added,
            "ends": self.ends,
            "counted": none if self.counts is None else self.counts.ids,
            "times": none if self.counts is None else self.counts.times,
            "words": self.words,
            "lengths": self.lengths,
            "ending": array("i", ending),
        }
