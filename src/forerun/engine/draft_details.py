"""What a round drafted for one sequence, told to a reader who asked for it.

Deltas are kept until an answer is complete, so guesses are noted for requests with `draft_details` alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.accept.commit import Accepted
from forerun.text.detokenize import Piece


@dataclass(frozen=True, slots=True)
class DraftDetails:
    """The guesses of one round, in the order of the tree, and where its tokens and segments stand in the answer.

    Guess number i is `tokens[i]`; it follows guess number `parents[i]`, or the text so far where that is -1. Accepted
    ones form a path from the text. `first` is the ordinal of the round's first token in the answer, and `places` has
    the ordinal of the token behind each segment, which may be of an earlier round where text was held back.
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
        nodes = [] if tree is None else [node for node in range(1, len(tree.tokens)) if tree.tokens[node] >= 0]
        number = {0: -1} | {node: i for i, node in enumerate(nodes)}
        return cls(
            tokens=() if tree is None else tuple(tree.tokens[node] for node in nodes),
            parents=() if tree is None else tuple(number[tree.parents[node]] for node in nodes),
            accepted=tuple(node in kept for node in nodes),
            first=first,
            places=tuple(piece.ordinal for piece in pieces),
        )
