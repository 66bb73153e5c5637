"""Constraint: what the grammar of one sequence allows after its text and after guesses behind it.

This file decides how one matcher serves all nodes of a tree: it is moved to the node that is asked for, and what is
allowed there is kept until the text goes on elsewhere. The answers depend on the tokens alone, so nothing has to be
committed or undone, whatever becomes of a round. It also decides when a text may end: the end tokens of a request are
allowed where the grammar accepts the text. Below an end token, and below a guess that the grammar forbids, everything
is allowed, since no text gets there.
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

Got = TypeVar("Got")
SLOW_S = 0.004  # a mask: guesses, each of which needs one, would then keep the other sequences waiting
NOT_SLOW_S = 0.1  # in all: the first masks of a grammar take longer
ENDLESS_S = 0.05  # a mask: all sequences of a round wait for it, so this cannot go on
NOT_ENDLESS_S = 5.0  # in all
MOST_FORCED = 64  # tokens that are drafted at once because there is no choice; each is a row of the target's pass


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may come next somewhere: a bit for every id, the lowest first; no mask where that does not matter.

    `complete` says that the text is whole there and that nothing may follow it.
    """

    mask: Mask | None = None
    complete: bool = False

    def permits(self, token: int) -> bool:
        """Whether a guess may be this token; where it does not matter what comes next, no guess is of use."""
        return self.mask is not None and 0 <= token < 32 * len(self.mask) and bool(self.mask[token // 32] & bit(token))

    @property
    def num_tokens(self) -> int | None:
        """How many tokens may come next; None where that does not matter."""
        return None if self.mask is None else int.from_bytes(self.mask.tobytes(), "little").bit_count()


ANYTHING = Allowed()


class Constraint:
    """The grammar of one sequence. `ends` are the ids that end its answer, which begins behind `num_prompt` tokens.

    `follow` says what the text is; everything else is asked by the tokens behind that text. Methods raise RequestFailed
    for `seq_id` where the grammar takes too much work, or too much time: of all that a request can ask for, that alone
    depends on the machine.
    """

    def __init__(self, matcher: Matcher, seq_id: int, num_prompt: int, ends: Iterable[int]) -> None:
        self.seq_id, self.num_prompt, self.ends = seq_id, num_prompt, frozenset(ends)
        self._beginning = matcher
        self._matcher, self._read = matcher.fork(), list[int]()
        self._answer: list[int] = []
        self._allowed: dict[tuple[int, ...], Allowed] = {}
        self._num_masks, self._masks_s = 0, 0.0

    @property
    def slow(self) -> bool:
        """Whether its masks take so long that guesses do not pay."""
        return self._masks_s > NOT_SLOW_S + SLOW_S * self._num_masks

    def follow(self, tokens: Sequence[int]) -> None:
        """Make this the text: the sequence's tokens, prompt and answer."""
        answer, num_before = list(tokens[self.num_prompt :]), len(self._answer)
        if answer[:num_before] != self._answer:
            self._allowed.clear()
        elif len(answer) > num_before:
            new = tuple(answer[num_before:])
            kept = [(path, allowed) for path, allowed in self._allowed.items() if path[: len(new)] == new]
            self._allowed = {path[len(new) :]: allowed for path, allowed in kept}
        self._answer = answer

    def behind(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """What a longer text, prompt and answer, has behind this one."""
        return tuple(tokens[self.num_prompt + len(self._answer) :])

    def after(self, behind: tuple[int, ...]) -> Allowed:
        """What may come next behind these tokens."""
        known = self._allowed.get(behind)
        if known is None:
            over = not self.ends.isdisjoint(behind)
            known = self._allowed[behind] = ANYTHING if over else self._attempt(lambda: self._compute(behind))
        return known

    def forced(self, most: int) -> list[int]:
        """The tokens that must come next, as far as there is no choice, at most so many."""
        if most < 1 or self.after(()).num_tokens != 1:
            return []
        forced = self._attempt(lambda: self._matcher.forced() if self._move(()) else [])
        return forced[: min(most, MOST_FORCED)]

    def completed_by(self, tokens: Sequence[int]) -> int | None:
        """How many of the tokens that were drawn next make the text one that nothing may follow; None if they do not.

        A text that an end token ends needs no completing.
        """
        for count in range(1, len(tokens) + 1):
            if tokens[count - 1] in self.ends:
                return None
            if self.after(tuple(tokens[:count])).complete:
                return count
        return None

    def _attempt(self, work: Callable[[], Got]) -> Got:
        """Use the matcher; where the grammar takes too much work there, start with a new one."""
        try:
            return work()
        except InvalidGrammar as error:
            self._matcher, self._read = self._beginning.fork(), []
            raise RequestFailed(self.seq_id) from error

    def _compute(self, behind: tuple[int, ...]) -> Allowed:
        started_s = time.perf_counter()
        if not self._move(behind):
            return ANYTHING
        mask = self._matcher.mask()
        self._num_masks, self._masks_s = self._num_masks + 1, self._masks_s + time.perf_counter() - started_s
        if self._masks_s > NOT_ENDLESS_S + ENDLESS_S * self._num_masks:
            each_ms = 1000 * self._masks_s / self._num_masks
            raise InvalidGrammar(f"it takes {each_ms:.0f} ms for each token, which others wait for: use a simpler one.")
        if not self._matcher.accepts:
            return Allowed(mask)
        if not mask.any():
            return Allowed(complete=True)
        for token in self.ends:
            if token < 32 * len(mask):
                mask[token // 32] |= bit(token)
        return Allowed(mask)

    def _move(self, behind: tuple[int, ...]) -> bool:
        """Put the matcher behind these tokens; False if the grammar does not allow them."""
        text = [*self._answer, *behind]
        common = num_common(self._read, text, len(self._answer))
        if common < len(self._read):
            self._matcher.rewind(len(self._read) - common)
        count = self._matcher.read(text[common:]) if common < len(text) else 0
        self._read = text[: common + count]
        return common + count == len(text)


def num_common(one: Sequence[int], other: Sequence[int], likely: int) -> int:
    """With how many tokens both lists begin; often with the first `likely` ones."""
    most = min(len(one), len(other))
    first = min(likely, most) if one[:likely] == other[:likely] else 0
    return next((i for i in range(first, most) if one[i] != other[i]), most)


def packed(places: Sequence[Allowed], vocab: int) -> Int[Tensor, "nodes words"]:
    """Masks as a tensor: a bit for each of `vocab` ids, the lowest first, in int32."""
    words = np.full((len(places), -(-vocab // 32)), 0xFFFFFFFF, dtype=np.uint32)
    for row, place in zip(words, places, strict=True):
        if place.mask is not None:
            size = min(len(row), len(place.mask))
            row[:size], row[size:] = place.mask[:size], 0
    return torch.from_numpy(words.view(np.int32))


def constrained(
    logits: Float[Tensor, "nodes vocab"], masks: Int[Tensor, "nodes words"]
) -> Float[Tensor, "nodes vocab"]:
    """The logits with -inf for what their masks do not allow."""
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (masks[:, :, None] >> shifts & 1).bool().flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(~allowed, -math.inf)
