"""Takeover: an answer that goes on from another replica where the first one was lost.

An answer is a function of prompt, parameters and seed, so the other replica gives the same tokens again, and what the
reader has is left out. Its rounds may end elsewhere: what is left out may end inside of a delta.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from forerun.accept.delta import Delta, Segment
from forerun.engine.sequence import Sequence
from forerun.errors import AnswerDiffers


@dataclass(slots=True)
class SampleReader:
    """One sample's answer: as far as its reader has it, in `sequence`, and as far as the present replica gave it."""

    sequence: Sequence
    num_letters: int = 0
    finished: bool = False
    at_token: int = 0  # of the present replica's answer
    at_letter: int = 0

    def restart(self) -> None:
        """Another replica gives the answer, from its beginning on."""
        self.at_token = self.at_letter = 0

    def take(self, delta: Delta) -> Delta | None:
        """What of a replica's delta is new, under the ids of the sequence, which grows by it; None for nothing.

        Raises AnswerDiffers where the replica gives other tokens than those that the reader has.
        """
        had = self.sequence.tokens[self.sequence.num_prompt + self.at_token :][: len(delta.token_ids)]
        if tuple(had) != delta.token_ids[: len(had)]:
            raise AnswerDiffers(
                "the replica that answered was lost, and another one gives other tokens, so the answer cannot go on: "
                "ask again. Replicas give the same tokens if their fingerprints are equal and verification is coupled."
            )
        skipped = min(len(delta.text), self.num_letters - self.at_letter)
        self.at_token += len(delta.token_ids)
        self.at_letter += len(delta.text)
        is_whole = not had and not skipped
        new = delta if is_whole else without(delta, len(had), skipped)
        if self.finished or not (is_whole or new.token_ids or new.segments or new.finish_reason):
            return None
        self.num_letters += len(new.text)
        self.finished = new.finish_reason is not None
        self.sequence.extend(len(self.sequence.tokens), new.token_ids, new.origins)
        outcome = None if new.outcome is None else replace(new.outcome, seq_id=self.sequence.id)
        return replace(new, request_id=self.sequence.request_id, seq_id=self.sequence.id, outcome=outcome)


def without(delta: Delta, num_tokens: int, num_letters: int) -> Delta:
    """A delta without its first tokens and letters, and without what it tells of its round."""
    return replace(
        delta,
        token_ids=delta.token_ids[num_tokens:],
        origins=delta.origins[num_tokens:],
        logprobs=delta.logprobs[num_tokens:],
        segments=tuple(behind(delta.segments, num_letters)),
        outcome=None,
        draft=None,
    )


def behind(segments: Seq[Segment], num_letters: int) -> Iterator[Segment]:
    """The segments without their first letters."""
    for segment in segments:
        if num_letters < len(segment.text):
            yield replace(segment, text=segment.text[num_letters:])
        num_letters = max(0, num_letters - len(segment.text))
