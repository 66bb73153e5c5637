"""Stop conditions: end-of-sequence ids, stop ids, stop strings and limits, checked inside a run of accepted tokens.

This file decides how many tokens of a run belong to the output and how much text may be shown. A run of several tokens
ends exactly where it would if the same tokens came one at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from forerun.errors import InvalidRequest
from forerun.sampling.params import SamplingParams
from forerun.text.detokenize import Piece
from forerun.text.tokenizer import Tokenizer

StopReason = Literal["stop", "length"]


class Stop(NamedTuple):
    """The result of checking a run.

    Its first `num_kept` tokens belong to the output, including the one that ends it. `pieces` is the text that can now
    be shown. `stop_reason` is the id or string that caused a `finish_reason` of "stop".
    """

    num_kept: int
    pieces: tuple[Piece, ...] = ()
    finish_reason: StopReason | None = None
    stop_reason: int | str | None = None


CONTINUES = Stop(1)


@dataclass(frozen=True, slots=True)
class _Match:
    """An occurrence of a stop string, by its offsets in a text."""

    start: int
    end: int
    string: str


class StopChecker:
    """One sequence's stop state: its detokenizer, the text held back, and the number of output tokens.

    A sequence ends at its first token after which (in this order) the text contains a stop string, the token is an
    end-of-sequence or stop id, the text completes its grammar, or the limit is reached. Ids and strings count only from
    the token with index `min_tokens` on; for a string, this is the token that completes it. Of several stop strings the
    one completed first wins, or the longer one if two end together, whatever the token boundaries are.

    The text of a special end token is not shown. Text that may be the start of a stop string is held back until this is
    known. `limit` is the number of tokens left in the context; `prompt` is the text before the output; `shown` are
    special tokens whose text is shown even if `params` hide them. Without a tokenizer there are no pieces, and stop
    strings raise InvalidRequest.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_ids: Collection[int],
        tokenizer: Tokenizer | None,
        limit: int,
        prompt: Sequence[int] = (),
        shown: Collection[int] = (),
    ) -> None:
        self._stops = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop)
        if self._stops and tokenizer is None:
            raise InvalidRequest("stop", f"{self._stops[0]!r} needs a tokenizer: load one, or use stop_token_ids")
        self._include_stop = params.include_stop_str_in_output
        self._end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self._silent_ids = self._end_ids & (tokenizer.special_ids if tokenizer else frozenset())
        self._min_tokens = params.min_tokens
        self._limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
        assert self._limit >= 1, f"a sequence with room for {self._limit} new tokens cannot be served"
        self._decoding = partial(tokenizer.decoder, params.skip_special_tokens, prompt, shown) if tokenizer else None
        self._decoder = self._decoding() if self._decoding else None
        self._longest = max(map(len, self._stops), default=0)
        self._held: list[Piece] = []
        self._num_tokens = 0
        self._finished = False

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self._num_tokens

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids that end the sequence."""
        return self._end_ids

    def push(self, tokens: Sequence[int], completed_by: int | None = None) -> Stop:
        """Check the next tokens of the sequence, up to the one that ends it; must not be called after that.

        `completed_by` is the number of tokens after which the grammar is complete.
        """
        assert not self._finished, "tokens were pushed to a sequence that has ended"
        pieces: list[Piece] = []
        for num_kept, token in enumerate(tokens, start=1):
            end = self._check(token, pieces, num_kept == completed_by)
            if end.finish_reason is not None:
                self._finished = True
                return Stop(num_kept, tuple(pieces), end.finish_reason, end.stop_reason)
        return Stop(len(tokens), tuple(pieces))

    def restarted(self, tokens: Sequence[int]) -> StopChecker:
        """A new checker of this sequence after the output `tokens`, none of which may end it."""
        fresh = copy(self)
        fresh._decoder = self._decoding() if self._decoding else None
        fresh._held, fresh._num_tokens, fresh._finished = [], 0, False
        fresh.push(tokens)
        assert not fresh._finished, "a sequence that has ended cannot be continued"
        return fresh

    def _check(self, token: int, pieces: list[Piece], complete: bool) -> Stop:
        """Check one token: append the text that can be shown to `pieces`, and return whether the sequence ends."""
        ends = token in self._end_ids and self._num_tokens >= self._min_tokens
        self._num_tokens += 1
        match = None if ends and token in self._silent_ids else self._read(token)
        if match is not None:
            pieces += self._cut(match)
            return Stop(1, finish_reason="stop", stop_reason=match.string)
        if ends or complete or self._num_tokens >= self._limit:
            pieces += self._held
            pieces += self._decoder.close() if self._decoder else ()
            self._held = []
            reason: StopReason = "stop" if ends or complete else "length"
            return Stop(1, finish_reason=reason, stop_reason=token if ends else None)
        pieces += self._release()
        return CONTINUES

    def _read(self, token: int) -> _Match | None:
        """Decode a token into the held text; returns the stop string that it completes, if any."""
        if self._decoder is None:
            return None
        self._held += self._decoder.feed(token)
        if not self._stops:
            return None
        # Earlier undecided text has been searched already, and a new match ends in the newest text: search the tail.
        tail = self._decoder.undecided()[-self._longest :]
        return self._search(self._held + list(tail) if len(tail) < self._longest else tail)

    def _search(self, pieces: Sequence[Piece]) -> _Match | None:
        text = "".join(piece.text for piece in pieces)
        early = sum(len(piece.text) for piece in pieces if piece.ordinal < self._min_tokens)
        matches = []
        for string in self._stops:
            start = text.find(string, max(0, early - len(string) + 1))
            if start >= 0:
                matches.append(_Match(start - len(text), start + len(string) - len(text), string))
        return min(matches, key=lambda match: (match.end, match.start), default=None)

    def _cut(self, match: _Match) -> list[Piece]:
        """All text up to a match; its offsets count from the end of all text, undecided text included."""
        assert self._decoder is not None, "only a decoder finds stop strings"
        pieces = [*self._held, *self._decoder.undecided()]
        self._held = []
        length = sum(len(piece.text) for piece in pieces)
        return _split(pieces, length + (match.end if self._include_stop else match.start))[0]

    def _release(self) -> list[Piece]:
        """Remove the held text that cannot be the start of a stop string, and return it."""
        if not self._stops:
            shown, self._held = self._held, []
            return shown
        text = "".join(piece.text for piece in self._held)
        shown, self._held = _split(self._held, len(text) - self._num_undecided(text))
        return shown

    def _num_undecided(self, text: str) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0


def _split(pieces: Sequence[Piece], length: int) -> tuple[list[Piece], list[Piece]]:
    """The pieces of the first `length` characters, and those of the rest."""
    before: list[Piece] = []
    after: list[Piece] = []
    for piece in pieces:
        here, rest = piece.text[:length], piece.text[length:]
        length -= len(here)
        if here:
            before.append(piece._replace(text=here))
        if rest:
            after.append(piece._replace(text=rest))
    return before, after
