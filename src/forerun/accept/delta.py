"""Delta: the new tokens and text of one sequence in a round, as they are streamed to the client."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, NamedTuple

from forerun.accept.commit import Accepted, Origin
from forerun.accept.outcome import RowOutcome
from forerun.sampling.logprobs import TokenLogprobs
from forerun.text.detokenize import Piece

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text, the origin of its token, and whether this is a special token."""

    text: str
    origin: Origin
    special: bool = False


@dataclass(frozen=True, slots=True)
class DraftDetails:
    """The draft tokens of one round, in tree order, and where the round's tokens and segments are in the answer.

    Draft token i is `tokens[i]`; its parent is draft token `parents[i]`, or the end of the text if that is -1. The
    accepted ones form a path. `first` is the index of the round's first token in the answer; `places` has the index of
    each segment's token, which may be from an earlier round if text was held back. Recorded only for requests with
    `draft_details`, since deltas are stored until an answer is complete.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[bool, ...]
    first: int
    places: tuple[int, ...]

    @classmethod
    def of(cls, run: Accepted, pieces: Seq[Piece], first: int) -> DraftDetails:
        """The details of an accepted run; padding nodes of its tree are left out."""
        tree, kept = run.tree, frozenset(run.nodes)
        nodes = [node for node in range(1, len(tree.tokens)) if tree.tokens[node] >= 0]
        number = {0: -1} | {node: i for i, node in enumerate(nodes)}
        return cls(
            tokens=tuple(tree.tokens[node] for node in nodes),
            parents=tuple(number[tree.parents[node]] for node in nodes),
            accepted=tuple(node in kept for node in nodes),
            first=first,
            places=tuple(piece.ordinal for piece in pieces),
        )


class Delta(NamedTuple):
    """The result of one round for one sample of a request.

    Text may lag behind tokens: an incomplete character, or text that may start a stop string, is held back. `outcome`
    counts the round's draft tokens, and `draft` lists them if the request asks for it.
    """

    request_id: int
    sample: int
    seq_id: int
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    segments: tuple[Segment, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    outcome: RowOutcome | None = None  # counts of draft tokens
    draft: DraftDetails | None = None
    error: Exception | None = None  # if the request failed: what is raised to the client

    @property
    def text(self) -> str:
        """The new text; it does not change any more."""
        return "".join(segment.text for segment in self.segments)
