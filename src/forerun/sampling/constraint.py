"""Constraint: the tokens that the grammar of one sequence allows after its text and after draft tokens.

One matcher serves all nodes of a tree: it is moved from node to node, and the mask of a node is cached until the text
continues differently. Masks depend on the tokens alone, so nothing has to be committed or rolled back after a round.
The end tokens of a request are allowed where the grammar accepts the text. Everything is allowed after an end token and
after a draft token that the grammar forbids, since no text gets there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.errors import InvalidGrammar, RequestFailed
from forerun.sampling.matcher import Mask, Matcher, bit

Value = TypeVar("Value")
SLOW_S = 0.004  # if a mask takes longer, drafting would delay the other sequences: each draft token needs a mask
SLOW_FREE_S = 0.1  # total time of masks that is not counted, since the first masks of a grammar take longer
TOO_SLOW_S = 0.05  # if a mask takes longer, the request fails, since all sequences of a round wait for it
TOO_SLOW_FREE_S = 5.0  # total time of masks that is not counted
MOST_FORCED = 64  # forced tokens that are drafted at once; each is a row of the target's pass


@dataclass(frozen=True, slots=True)
class Allowed:
    """The tokens that may come next: a bit for every id, the lowest first; None if everything is allowed.

    `complete`: the text matches the grammar, and no token may follow it.
    """

    mask: Mask | None = None
    complete: bool = False

    def permits(self, token: int) -> bool:
        """Whether this may be the next draft token; False without a mask, where a draft token is of no use."""
        return self.mask is not None and 0 <= token < 32 * len(self.mask) and bool(self.mask[token // 32] & bit(token))

    @property
    def num_tokens(self) -> int | None:
        """How many different tokens may come next; None if everything is allowed."""
        return None if self.mask is None else int.from_bytes(self.mask.tobytes(), "little").bit_count()


ANYTHING = Allowed()


class Constraint:
    """The grammar of one sequence. `ends` are the ids that end its answer, which starts after `num_prompt` tokens.

    `follow` sets the text; the other methods take the tokens after this text. Methods raise RequestFailed for `seq_id`
    if the grammar needs too much work or too much time. The limit of time is the only thing about a request that
    depends on the machine.
    """

    def __init__(self, matcher: Matcher, seq_id: int, num_prompt: int, ends: Iterable[int]) -> None:
        self.seq_id, self.num_prompt, self.ends = seq_id, num_prompt, frozenset(ends)
        self._initial = matcher
        self._matcher, self._read = matcher.fork(), list[int]()
        self._answer: list[int] = []
        self._allowed: dict[tuple[int, ...], Allowed] = {}
        self._num_masks, self._masks_s = 0, 0.0

    @property
    def slow(self) -> bool:
        """Whether its masks take so long that drafting is slower than plain decoding."""
        return self._masks_s > SLOW_FREE_S + SLOW_S * self._num_masks

    def follow(self, tokens: Sequence[int]) -> None:
        """Set the text to the sequence's tokens, prompt and answer."""
        answer, num_before = list(tokens[self.num_prompt :]), len(self._answer)
        if answer[:num_before] != self._answer:
            self._allowed.clear()
        elif len(answer) > num_before:
            new = tuple(answer[num_before:])
            self._allowed = {
                path[len(new) :]: allowed for path, allowed in self._allowed.items() if path[: len(new)] == new
            }
        self._answer = answer

    def suffix(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The tokens after this text of a longer text, given as prompt and answer."""
        return tuple(tokens[self.num_prompt + len(self._answer) :])

    def after(self, suffix: tuple[int, ...]) -> Allowed:
        """The tokens that may come next after the text and these tokens."""
        known = self._allowed.get(suffix)
        if known is None:
            has_ended = not self.ends.isdisjoint(suffix)
            known = self._allowed[suffix] = ANYTHING if has_ended else self._attempt(lambda: self._compute(suffix))
        return known

    def forced(self, most: int) -> list[int]:
        """The next tokens, at most `most`, for which the grammar leaves no choice."""
        if most < 1 or self.after(()).num_tokens != 1:
            return []
        forced = self._attempt(lambda: self._matcher.forced() if self._move(()) else [])
        return forced[: min(most, MOST_FORCED)]

    def completed_by(self, tokens: Sequence[int]) -> int | None:
        """The number of these next tokens after which the text is complete, so that no token may follow.

        None if it is not, or if an end token ends the text before.
        """
        counts = range(1, len(tokens) + 1)  # after an end token anything may come, so nothing is complete there
        return next((count for count in counts if self.after(tuple(tokens[:count])).complete), None)

    def _attempt(self, work: Callable[[], Value]) -> Value:
        """Call `work`, which uses the matcher. If that raises InvalidGrammar, reset it and raise RequestFailed."""
        try:
            return work()
        except InvalidGrammar as error:
            self._matcher, self._read = self._initial.fork(), []
            raise RequestFailed(self.seq_id) from error

    def _compute(self, suffix: tuple[int, ...]) -> Allowed:
        started_s = time.perf_counter()
        if not self._move(suffix):
            return ANYTHING
        mask = self._matcher.mask()
        self._num_masks, self._masks_s = self._num_masks + 1, self._masks_s + time.perf_counter() - started_s
        if self._masks_s > TOO_SLOW_FREE_S + TOO_SLOW_S * self._num_masks:
            each_ms = 1000 * self._masks_s / self._num_masks
            raise InvalidGrammar(f"it takes {each_ms:.0f} ms per token, which delays other requests: simplify it.")
        if not self._matcher.accepts:
            return Allowed(mask)
        if not mask.any():
            return Allowed(complete=True)
        for token in self.ends:
            if token < 32 * len(mask):
                mask[token // 32] |= bit(token)
        return Allowed(mask)

    def _move(self, suffix: tuple[int, ...]) -> bool:
        """Move the matcher to the end of these tokens; False if the grammar does not allow them."""
        text = [*self._answer, *suffix]
        common = num_common(self._read, text, len(self._answer))
        if common < len(self._read):
            self._matcher.rewind(len(self._read) - common)
        count = self._matcher.read(text[common:]) if common < len(text) else 0
        self._read = text[: common + count]
        return common + count == len(text)


def num_common(one: Sequence[int], other: Sequence[int], likely: int) -> int:
    """The length of the common prefix; `likely` is its probable length, which is checked first."""
    most = min(len(one), len(other))
    first = min(likely, most) if one[:likely] == other[:likely] else 0
    return next((i for i in range(first, most) if one[i] != other[i]), most)


def packed(nodes: Sequence[Allowed], vocab: int) -> Int[Tensor, "nodes words"]:
    """The masks of nodes as an int32 tensor: a bit for each of `vocab` ids, the lowest first."""
    words = np.full((len(nodes), -(-vocab // 32)), 0xFFFFFFFF, dtype=np.uint32)
    for row, allowed in zip(words, nodes, strict=True):
        if allowed.mask is not None:
            size = min(len(row), len(allowed.mask))
            row[:size], row[size:] = allowed.mask[:size], 0
    return torch.from_numpy(words.view(np.int32))


def constrained(
    logits: Float[Tensor, "nodes vocab"], masks: Int[Tensor, "nodes words"]
) -> Float[Tensor, "nodes vocab"]:
    """The logits, with -inf for ids that the masks do not allow."""
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (masks[:, :, None] >> shifts & 1).bool().flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(~allowed, -math.inf)
