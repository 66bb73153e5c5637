"""Delta: what a round adds to one sequence, as given to the reader of its answer."""

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
    """A piece of text, where its token came from, and whether that is a special one."""

    text: str
    origin: Origin
    special: bool = False


@dataclass(frozen=True, slots=True)
class DraftDetails:
    """The guesses of one round, in the order of the tree, and where its tokens and segments stand in the answer.

    Guess number i is `tokens[i]`; it follows guess number `parents[i]`, or the text so far where that is -1. Accepted
    ones form a path from the text. `first` is the ordinal of the round's first token in the answer, and `places` has
    the ordinal of the token behind each segment, which may be of an earlier round where text was held back. They are
    noted for requests with `draft_details` alone, since deltas are kept until an answer is complete.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[bool, ...]
    first: int
    places: tuple[int, ...]

    @classmethod
    def of(cls, run: Accepted, pieces: Seq[Piece], first: int) -> DraftDetails:
        """What an accepted run tells; nodes of its tree that turned out to hold no guess are left out."""
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
    """What one round adds to one sample of a request.

    Text may lag behind tokens: half a character, or what may be the beginning of a stop string, is held back.
    `outcome` counts the round's guesses, and `draft` names them where the request asks for it.
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
    outcome: RowOutcome | None = None  # what became of the guesses
    draft: DraftDetails | None = None
    error: Exception | None = None  # what ended the request, where it failed; it is raised to the reader

    @property
    def text(self) -> str:
        """The text that became certain."""
        return "".join(segment.text for segment in self.segments)
