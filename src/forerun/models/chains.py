"""Chains that a model drafts by itself: what it is asked for, and what it gives.

This module decides the values that runners and drafters exchange about whole chains. A runner draws them in one call
where it can (`Runner.draw_chains`), with a compiled library or as a captured graph; else a drafter draws them step by
step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.device import upload
from forerun.sampling.draws import Draws
from forerun.tree import DraftLaw, DraftTree, HostView


@dataclass(frozen=True, slots=True)
class Start:
    """A sequence to be drafted: its row in the round, its id, and how deep.

    Its chain ends before a guess that survives with less than `price`.
    """

    row: int
    seq_id: int
    depth: int
    price: float = 0.0


@runtime_checkable
class IdExchange(Protocol):
    """How a model's ids and the target's are exchanged: guesses are drawn and told as the target's."""

    vocab_size: int  # columns of the target's logits
    num_own: int  # ids that the model can read
    same: bool  # whether both mean the same by an id, so that only the numbers of ids may differ
    head_ids: Int[Tensor, " head_vocab"] | None  # of the logits' columns, where they are of some ids alone

    def spread(self, logits: Float[Tensor, "rows own_vocab"]) -> Float[Tensor, "rows vocab"]:
        """The model's logits over the target's ids; -inf where it has no such token."""
        ...

    def own(self, tokens: Int[Tensor, " ..."]) -> Int[Tensor, " ..."]:
        """The model's ids of the target's; -1, which is no token, stays."""
        ...

    def own_list(self, tokens: Sequence[int]) -> Sequence[int]:
        """The model's ids of the target's, on the host; where it has none, a number below 0, each another."""
        ...


class SameIds:
    """The ids of a model whose tokens are the target's. Both vocabularies may be padded, to different sizes."""

    same = True
    head_ids: Int[Tensor, " head_vocab"] | None = None

    def __init__(self, vocab_size: int, num_own: int) -> None:
        self.vocab_size = vocab_size
        self.num_own = num_own

    def spread(self, logits: Float[Tensor, "rows own_vocab"]) -> Float[Tensor, "rows vocab"]:
        """The logits, cut or padded with -inf."""
        missing = self.vocab_size - logits.shape[1]
        if missing == 0:
            return logits
        return functional.pad(logits, (0, missing), value=-math.inf) if missing > 0 else logits[:, : self.vocab_size]

    def own(self, tokens: Int[Tensor, " ..."]) -> Int[Tensor, " ..."]:
        """The tokens as they are."""
        return tokens

    def own_list(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens as they are."""
        return tokens


@dataclass(slots=True)
class Chains:
    """What was drawn behind the roots of a round's rows, as the target's ids.

    `counts` are the guesses of each row, and `num_read` those of each sequence that were read into its tail: its first
    ones. The guesses are `texts`, roots first, where the host knows them, else `guesses` on the device, -1 where a row
    has fewer. `laws` are those that they were drawn from (rejection modes), and `law_row` says by row and guess where
    its law is packed. `survival` is that of the guesses, by row, where chains were drawn at a price. `states` are the
    residual streams behind the guesses of each start, if they were asked for; those of guesses that were not read are
    garbage.
    """

    counts: list[int]
    num_read: dict[int, int]
    texts: list[list[int]] | None = None
    guesses: Int[Tensor, "batch depth"] | None = None
    laws: list[Tensor] = field(default_factory=list)
    law_row: list[list[int]] = field(default_factory=list)
    survival: dict[int, list[float]] = field(default_factory=dict)
    states: Float[Tensor, "starts depth hidden"] | None = None

    def add(self, start: Start, guesses: Sequence[int], num_read: int) -> None:
        """Append guesses of one row that the host knows, and say how many of all were read."""
        assert self.texts is not None, "these chains are on the device"
        self.texts[start.row] += guesses
        self.counts[start.row] += len(guesses)
        self.num_read[start.seq_id] = num_read

    def chances(self) -> Float[Tensor, "batch nodes"] | None:
        """The survival of the tree's nodes, 1 at roots and 0 at padding; None where it was not asked for."""
        if not self.survival:
            return None
        nodes = 1 + max(self.counts)
        rows = [[1.0, *self.survival.get(row, ())] for row in range(len(self.counts))]
        return torch.tensor([chances + [0.0] * (nodes - len(chances)) for chances in rows])

    def tree(self, draws: Draws) -> DraftTree:
        """The guesses as a tree: on the host, or on the device with the host knowing its shape."""
        if self.texts is not None:
            return DraftTree.of_texts(self.texts)
        assert self.guesses is not None, "chains are known to the host or to the device"
        tree = DraftTree.chains(draws.roots_tokens, self.guesses, self.law(draws))
        return replace(tree, known=HostView.chains(self.counts))

    def law(self, draws: Draws) -> DraftLaw | None:
        """The laws that the guesses were drawn from, by the node that they follow; rejection modes only."""
        if not self.laws:
            return None
        rows = [
            [-1 if greedy else at for at in row] + [-1] for row, greedy in zip(self.law_row, draws.greedy, strict=True)
        ]
        return DraftLaw(upload(rows, torch.long, draws.device), torch.cat(self.laws))
