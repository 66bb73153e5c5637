"""RoundTables: the parameters of a round's transforms, as arrays with a line for each row.

This file decides which transforms a round needs (`Steps`), and how the parameters and texts of its rows become arrays;
`transforms.py` decides their effect on logits. The widths of the arrays are in `Steps` and may be larger than the rows
need: unused entries have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from forerun.device import HostArray
from forerun.sampling.constraint import Constraint
from forerun.sampling.edits import TextEdits
from forerun.sampling.params import SamplingParams

ANY, NEVER = -2, -3  # in place of a token: matches every token, matches none
NUMBERS = ("greedy", "temperature", "min_p", "top_k", "top_p", "repetition", "frequency", "presence")


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling state of one sequence in a round.

    `tokens` is all committed text, prompt and output, the root last; it is the sequence's own list and must not be
    changed. `bad_words` are words of two tokens or more that must not be completed; those of one token are banned
    tokens. `seed` has 64 bits. `edits`, if given, and `constraint` are of this text or of a prefix of it.
    """

    seq_id: int
    params: SamplingParams
    seed: int
    sample: int
    tokens: Sequence[int]
    num_prompt: int
    eos_ids: tuple[int, ...] = ()
    bad_words: Sequence[Sequence[int]] = ()
    edits: TextEdits | None = None
    constraint: Constraint | None = None

    def all_edits(self) -> TextEdits:
        """The edits of the text; made now if the row has none."""
        if self.edits is None:
            return TextEdits.of(self.params, self.tokens, self.num_prompt, self.eos_ids, self.bad_words)
        return self.edits.at(self.tokens)


class Steps(NamedTuple):
    """The transforms of a round, and the widths of their tables. A transform with 0 or False is left out.

    `fixed`: the most biased or banned ids of a row; `ends`: the most ids that would end a text that is too short;
    `words`: the most bad words, of up to `reach` + 1 tokens; `counted`: the most distinct ids of a text; `masks`: the
    32-bit words of a grammar's mask; `top_k`: the largest top-k.
    """

    greedy: bool
    sampled: bool
    heat: bool = False  # temperatures other than 1
    min_p: bool = False
    top_k: int = 0
    top_p: bool = False
    masks: int = 0
    processors: bool = False
    repeats: bool = False  # repetition penalties
    counts: bool = False  # presence and frequency penalties
    counted: int = 0
    fixed: int = 0
    ends: int = 0
    words: int = 0
    reach: int = 0


class RoundTables:
    """The tables of these rows' transforms."""

    def __init__(self, rows: Sequence[RowSampling], vocab: int) -> None:
        self.rows, self.vocab = rows, vocab

    @cached_property
    def edits(self) -> list[TextEdits]:
        """The edits of each row's text."""
        return [row.all_edits() for row in self.rows]

    @cached_property
    def steps(self) -> Steps:
        """The transforms that the rows need, with the smallest widths."""
        rows, params = self.rows, [row.params for row in self.rows]
        sampled = [p for p in params if not p.greedy]
        steps = Steps(
            greedy=len(sampled) < len(params),
            sampled=bool(sampled),
            heat=any(p.temperature != 1 for p in sampled),
            min_p=any(p.min_p > 0 for p in sampled),
            top_k=max((kept_of(p, self.vocab) for p in sampled), default=0),
            top_p=any(p.top_p < 1 for p in sampled),
            masks=-(-self.vocab // 32) if any(row.constraint is not None for row in rows) else 0,
            processors=any(p.logits_processors for p in params),
        )
        if not any(edits.any for edits in self.edits):
            return steps
        short = any(len(row.tokens) - row.num_prompt < row.params.min_tokens for row in rows)
        repeats = any(p.repetition_penalty != 1 for p in params)
        counts = any(p.presence_penalty != 0 or p.frequency_penalty != 0 for p in params)
        counted = max((len(edits.counts.ids) for edits in self.edits if edits.counts is not None), default=0)
        return steps._replace(
            repeats=repeats,
            counts=counts,
            counted=max(1, counted) if repeats or counts else 0,
            fixed=max((len(edits.fixed) for edits in self.edits), default=0),
            ends=max(1, *(len(edits.ends) for edits in self.edits)) if short else 0,
            words=max((len(row.bad_words) for row in rows), default=0),
            reach=max((len(word) - 1 for row in rows for word in row.bad_words), default=0),
        )

    def arrays(self, steps: Steps) -> dict[str, HostArray]:
        """The tables by name, with the widths of these steps, which must be at least those that the rows need.

        `numbers` has a column for each of NUMBERS. `added` is added to the logits of the ids `fixed`, -inf to ban them.
        The ids `ends` are banned before the positions `ends_from`. The ids `counted` occur `times` in the answer;
        -1 marks unused entries. `heads` are all tokens of each bad word but the last, `lasts` its last token, and
        `endings` the answer's last tokens; heads and endings are right-aligned.
        """
        numbers = [numbers_of(row.params, self.vocab) for row in self.rows]
        arrays: dict[str, HostArray] = {"numbers": np.array(numbers, np.float64).reshape(-1, len(NUMBERS))}
        if steps.fixed:
            arrays["fixed"] = repeated([edits.fixed for edits in self.edits], steps.fixed, 0, np.int64)
            arrays["added"] = repeated([edits.added for edits in self.edits], steps.fixed, 0.0, np.float32)
        if steps.ends:
            arrays["ends"] = repeated([edits.ends for edits in self.edits], steps.ends, 0, np.int64)
            arrays["ends_from"] = np.array([e.ends_from if e.ends else 0 for e in self.edits], np.int64)[:, None]
        if steps.counted:
            counts = [edits.counts for edits in self.edits]
            arrays["counted"] = repeated([c.ids if c else () for c in counts], steps.counted, 0, np.int32)
            arrays["times"] = repeated([c.times if c else () for c in counts], steps.counted, -1, np.int32)
        if steps.words:
            arrays |= self._word_arrays(steps.words, steps.reach)
        return arrays

    def _word_arrays(self, count: int, reach: int) -> dict[str, HostArray]:
        heads = np.full((len(self.rows), count, reach), NEVER, np.int64)
        lasts = np.zeros((len(self.rows), count), np.int64)
        endings = np.full((len(self.rows), reach), -1, np.int64)
        for i, row in enumerate(self.rows):
            for j, word in enumerate(row.bad_words):
                heads[i, j] = [*[ANY] * (reach + 1 - len(word)), *word[:-1]]
                lasts[i, j] = word[-1]
            if ending := row.tokens[max(row.num_prompt, len(row.tokens) - reach) :]:
                endings[i, -len(ending) :] = ending
        return {"heads": heads, "lasts": lasts, "endings": endings}


def numbers_of(params: SamplingParams, vocab: int) -> list[int | float]:
    """A row's values of NUMBERS; filters are off for a greedy row."""
    p, penalties = params, [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
    if p.greedy:
        return [1.0, 1.0, -math.inf, 0, math.inf, *penalties]
    least = math.log(p.min_p) if p.min_p else -math.inf
    return [0.0, p.temperature, least, kept_of(p, vocab), p.top_p if p.top_p < 1 else math.inf, *penalties]


def kept_of(params: SamplingParams, vocab: int) -> int:
    """A row's top-k; 0 if it keeps all tokens."""
    return params.top_k if 0 < params.top_k < vocab else 0


def repeated(
    entries: Sequence[Sequence[int | float]], width: int, none: int | float, dtype: type[np.generic]
) -> HostArray:
    """The lists as rows of an array, filled up with the first entry of each: scattering it twice has no effect."""
    table = np.full((len(entries), width), none, dtype)
    for line, entry in zip(table, entries, strict=True):
        if len(entry):
            line[:] = entry[0]
            line[: len(entry)] = entry
    return table
