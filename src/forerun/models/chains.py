"""Chains of draft tokens: the values that drafters and runners exchange to generate them.

`Runner.draw_chains` generates entire chains in one call, by compiled kernels or a CUDA graph, if it can; if it cannot,
the drafter generates them token by token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.device import upload_tensor
from forerun.sampling.draws import Draws
from forerun.tree import DraftLaw, DraftTree, HostTree, padded, survival_of


class ChainStart(NamedTuple):
    """A chain to be drafted: its row in the round, the id of its sequence, and its depth.

    The chain ends before the first token whose survival is below `min_survival`.
    """

    row: int
    seq_id: int
    depth: int
    min_survival: float = 0.0


@dataclass(frozen=True, slots=True)
class UnreadTexts:
    """Text of each start that a drafter must read before its chain is generated: at least one token each.

    `features` are the target's hidden states at these tokens, in pieces. `fuse` maps them to the states that the
    drafter's layers read with the tokens, and `next_states` the layers' outputs to those that they read with draft
    tokens. `roots` receives the outputs at the last token of each text; None if they are not needed.

    With `below`, a Runner, the layers read its output states instead of tokens, for roots and draft tokens. Each text
    then ends with its root, which has no features; neither cache keeps roots and draft tokens.
    """

    tokens: Sequence[Sequence[int]]
    features: Sequence[Float[Tensor, "_ *features"]]
    roots: Float[Tensor, "starts outputs"] | None
    fuse: Callable[[Tensor], Tensor]
    next_states: Callable[[Tensor], Tensor] | None = None
    below: Any = None

    @property
    def begins_chains(self) -> bool:
        """Whether the outputs at the last token of each text predict the first draft token of its chain."""
        return self.roots is not None or self.below is not None

    @property
    def states(self) -> Float[Tensor, "total inputs"]:
        """The states that the layers read with the tokens: the fused features."""
        return self.fuse(joined(self.features))


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces concatenated; a single piece is not copied."""
    return torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]


class HeadInputs(NamedTuple):
    """The inputs of heads, one row for each chain or node: `first` is its state or, without one, the logits after its
    text; `logits` and `states` are those of the masked positions, if there are any: of all, or of the next token's."""

    first: Float[Tensor, "rows numbers"] | None
    logits: Float[Tensor, "rows places vocab"] | None = None
    states: Float[Tensor, "rows places hidden"] | None = None

    def next_logits(self, path: Int[Tensor, "rows path"]) -> Float[Tensor, "rows vocab"]:
        """The logits after the root and draft tokens `path`: those after the text, or at the next masked position."""
        place = path.shape[1] - (1 if self.first is None else 2)
        if self.logits is None or place < 0:
            assert self.first is not None, "text or masked positions were read"
            return self.first
        return self.logits[:, min(place, self.logits.shape[1] - 1)]

    def next_states(self, path: Int[Tensor, "rows path"]) -> Float[Tensor, "rows hidden"]:
        """The states at the masked position that predicts the token after `path`."""
        assert self.states is not None, "masked positions were read"
        return self.states[:, min(path.shape[1], self.states.shape[1]) - 1]


# A value for the next token of each row, from its root and previous draft tokens.
OfNextToken = Callable[[HeadInputs, Int[Tensor, "rows path"]], Tensor]


@dataclass(frozen=True, slots=True)
class MaskedPositions:
    """Mask tokens that are read after the text of each start, in one pass that predicts draft tokens.

    `count` gives their number for chains of a depth. Each mask token from index `first` on predicts one draft token, up
    to the depth. `state` is the hidden state that layers which read states get with every mask token.
    """

    tokens: Sequence[Sequence[int]]
    count: Callable[[int], int]
    first: int = 0
    state: Float[Tensor, " inputs"] | None = None

    def num_predicted(self, depth: int) -> int:
        """The number of draft tokens of a chain of this depth that are predicted at these positions."""
        return min(depth, self.count(depth) - self.first)


@dataclass(frozen=True, slots=True)
class ParallelHeads:
    """Heads that generate entire chains without a pass between tokens, from a state of each start (`states`), or from
    masked positions after the texts (`places`).

    `logits` computes the logits of each chain's next token.
    """

    logits: OfNextToken
    states: Sequence[Float[Tensor, " hidden"]] | None = None
    places: MaskedPositions | None = None


@dataclass(frozen=True, slots=True)
class VerifiedChains:
    """A round of chains that the device has verified, before the host knows the verdict.

    `nodes` are the tokens of each row, the root first, and `num_drafted` the number of draft tokens in each row.
    `verdict` is `Verdict.packed`. `features` are the target's hidden states at all nodes, row by row.
    """

    draws: Draws
    nodes: Int[Tensor, "batch nodes"]
    num_drafted: Sequence[int]
    verdict: Int[Tensor, "batch verdict"]
    features: Float[Tensor, "total taps hidden"]


@runtime_checkable
class IdMap(Protocol):
    """The mapping between a draft model's token ids and the target's. Draft tokens are sampled as the target's ids."""

    vocab_size: int  # of the target's logits
    num_model_ids: int  # ids that the model can read
    same_ids: bool  # whether every id means the same token in both; the numbers of ids may differ
    head_ids: Int[Tensor, " head_vocab"] | None  # of the columns of the model's logits, if its head has only some ids

    def target_logits(self, logits: Float[Tensor, "rows model_vocab"]) -> Float[Tensor, "rows vocab"]:
        """The model's logits as columns of the target's ids; -inf for ids that the model does not have."""
        ...

    def model_ids(self, tokens: Int[Tensor, " ..."]) -> Int[Tensor, " ..."]:
        """The model's ids of these target ids; -1, which stands for no token, is unchanged."""
        ...

    def model_id_list(self, tokens: Sequence[int]) -> Sequence[int]:
        """The model's ids of these target ids, on the host; ids that it lacks become distinct negative numbers."""
        ...


class SameIds:
    """The mapping for a model with the target's ids. Both vocabularies may be padded, to different sizes."""

    same_ids = True
    head_ids: Int[Tensor, " head_vocab"] | None = None

    def __init__(self, vocab_size: int, num_model_ids: int) -> None:
        self.vocab_size = vocab_size
        self.num_model_ids = num_model_ids

    def target_logits(self, logits: Float[Tensor, "rows model_vocab"]) -> Float[Tensor, "rows vocab"]:
        """The logits, cut to the target's width or padded with -inf."""
        missing = self.vocab_size - logits.shape[1]
        if missing == 0:
            return logits
        return functional.pad(logits, (0, missing), value=-math.inf) if missing > 0 else logits[:, : self.vocab_size]

    def model_ids(self, tokens: Int[Tensor, " ..."]) -> Int[Tensor, " ..."]:
        return tokens

    def model_id_list(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens


@dataclass(slots=True)
class Chains:
    """The chains generated after the roots of all rows of a round, as the target's ids.

    `trees` has a chain for each row. `num_read` is the number of draft tokens that the model has read, by sequence.
    Draft tokens that only the device knows are in `draft_tokens`, padded with -1, with the distributions that they were
    sampled from in rejection modes (`laws`, packed), or as entire trees in `nodes` (tokens and parents), which need no
    check. `has_survival`: whether the survival of the draft tokens is known. `states` are the residual streams at the
    draft tokens of each start, if they were requested; undefined for tokens that were not read.
    """

    trees: list[HostTree]
    num_read: dict[int, int]
    has_survival: bool = False
    draft_tokens: Int[Tensor, "batch depth"] | None = None
    laws: list[Tensor] = field(default_factory=list)
    nodes: Int[Tensor, "2 batch nodes"] | None = None
    states: Float[Tensor, "starts depth hidden"] | None = None

    def __post_init__(self) -> None:
        if self.nodes is not None:
            self.draft_tokens = self.nodes[0, :, 1:]

    def tree(self, draws: Draws) -> DraftTree:
        """The chains as a DraftTree: on the host, or on the device if only the device knows the tokens."""
        if self.nodes is not None:
            return DraftTree.drawn(self.nodes, self.trees)
        if self.draft_tokens is None:
            return DraftTree.of_hosts(self.trees, 1)
        law = None
        if self.laws:
            law_rows = padded([tree.law_rows for tree in self.trees])
            law = DraftLaw(upload_tensor(law_rows, draws.device), torch.cat(self.laws))
        return replace(DraftTree.chains(draws.roots_tokens, self.draft_tokens, law), known=self.trees)

    def survival(self) -> Float[Tensor, "batch nodes"] | None:
        """The survival of the tree's nodes; None if it is not known."""
        return survival_of(self.trees) if self.has_survival else None
