"""Chains of draft tokens: the values that runners and drafters exchange about them.

A runner generates chains in one call where it can (`Runner.draw_chains`), with compiled kernels or a CUDA graph; else a
drafter generates them step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.device import upload_tensor
from forerun.sampling.draws import Draws
from forerun.tree import DraftLaw, DraftTree, HostTree, padded, survival_of


class Start(NamedTuple):
    """A chain to be drafted: its row in the round, its sequence's id, and its depth.

    The chain ends before a token whose survival is below `min_survival`.
    """

    row: int
    seq_id: int
    depth: int
    min_survival: float = 0.0


@runtime_checkable
class LowerRunner(Protocol):
    """A runner of layers whose output states other layers read in place of tokens, with its own cache."""

    cache: PagedCache


@dataclass(frozen=True, slots=True)
class UnreadTexts:
    """Text of each start to be read before its chain is generated, at least one token.

    `features` are the target's states, in pieces, and `fuse` maps them to the states that the layers read with the
    tokens; `beside` computes from the layers' outputs the states for the draft tokens that follow. `roots` receives the
    outputs at the last token of each text; None if nothing is drafted there, or they are not needed.

    Layers on top of those of `below` read its states in place of tokens. Each text then ends with its root, which has
    no features: `below` reads roots and draft tokens, and nothing of that stays in either cache.
    """

    tokens: Sequence[Sequence[int]]
    features: Sequence[Float[Tensor, "_ *features"]]
    roots: Float[Tensor, "starts outputs"] | None
    fuse: Callable[[Tensor], Tensor]
    beside: Callable[[Tensor], Tensor] | None = None
    below: LowerRunner | None = None

    @property
    def begins_chains(self) -> bool:
        """Whether the first draft tokens are predicted at the texts' last tokens."""
        return self.roots is not None or self.below is not None

    @property
    def states(self) -> Float[Tensor, "total inputs"]:
        """The states that the layers read with the tokens."""
        return self.fuse(joined(self.features))


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces concatenated; a single one unchanged."""
    return torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]


class HeadInputs(NamedTuple):
    """The inputs of heads, a row for each chain: the logits after its text, or else the given state, and logits and
    states of the masked positions that were read.
    """

    first: Float[Tensor, "chains numbers"] | None
    logits: Float[Tensor, "chains places vocab"] | None = None
    states: Float[Tensor, "chains places hidden"] | None = None


@dataclass(frozen=True, slots=True)
class MaskedPositions:
    """Mask tokens that are read after each start's text in one pass, to predict draft tokens there.

    `count` gives their number for a depth. Those from `first` on predict one token each, as far as the chain reaches.
    `state` is read with them, by layers that read states.
    """

    tokens: Sequence[Sequence[int]]
    count: Callable[[int], int]
    first: int = 0
    state: Float[Tensor, " inputs"] | None = None

    def num_guesses(self, depth: int) -> int:
        """How many tokens of a chain are predicted at these positions."""
        return min(depth, self.count(depth) - self.first)


@dataclass(frozen=True, slots=True)
class ParallelHeads:
    """Generates whole chains without a pass in between, from `states` of each start, or from masked positions after
    texts.

    `logits` computes those of each chain's next token, from its root and the tokens so far [chains, path].
    """

    logits: Callable[[HeadInputs, Int[Tensor, "chains path"]], Tensor]
    states: Sequence[Float[Tensor, " hidden"]] | None = None
    places: MaskedPositions | None = None


@dataclass(frozen=True, slots=True)
class JudgedChains:
    """A round whose chains a device has verified, before the host knows the verdict.

    `nodes` are the tokens of each row's tree, the root first, `num_guesses` the number of draft tokens among them;
    `verdict` is `Verdict.packed`. `features` are the target's states after all of these nodes, row by row.
    """

    draws: Draws
    nodes: Int[Tensor, "batch nodes"]
    num_guesses: Sequence[int]
    verdict: Int[Tensor, "batch verdict"]
    features: Float[Tensor, "total taps hidden"]


@runtime_checkable
class IdMap(Protocol):
    """The mapping between a model's ids and the target's; draft tokens are sampled and returned as the target's."""

    vocab_size: int  # columns of the target's logits
    num_model_ids: int  # ids that the model can read
    same: bool  # whether both mean the same by an id, so that only the numbers of ids may differ
    head_ids: Int[Tensor, " head_vocab"] | None  # of the logits' columns, where they are of some ids alone

    def target_logits(self, logits: Float[Tensor, "rows model_vocab"]) -> Float[Tensor, "rows vocab"]:
        """The model's logits over the target's ids; -inf for ids that it does not have."""
        ...

    def model_ids(self, tokens: Int[Tensor, " ..."]) -> Int[Tensor, " ..."]:
        """The model's ids of these target ids; -1, which is no token, stays."""
        ...

    def model_id_list(self, tokens: Sequence[int]) -> Sequence[int]:
        """The model's ids of these target ids, on the host; missing ones get distinct negative numbers."""
        ...


class SameIds:
    """The mapping of a model with the target's ids. Both vocabularies may be padded, to different sizes."""

    same = True
    head_ids: Int[Tensor, " head_vocab"] | None = None

    def __init__(self, vocab_size: int, num_model_ids: int) -> None:
        self.vocab_size = vocab_size
        self.num_model_ids = num_model_ids

    def target_logits(self, logits: Float[Tensor, "rows model_vocab"]) -> Float[Tensor, "rows vocab"]:
        """The logits, cut or padded with -inf."""
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
    """The chains generated after the roots of a round's rows, as the target's ids.

    `trees` are all rows' chains, and `num_read` how many of each sequence's first draft tokens were read into its tail.
    If the host does not know them, they are `guesses` on the device, -1 where a row has fewer, and `laws` are the
    distributions they were sampled from (rejection modes), packed; or `nodes`, the tokens and parents of whole trees,
    which need no check. `priced`: whether their survival is known. `states` are the residual streams after the draft
    tokens of each start, if requested; those of tokens that were not read are garbage.
    """

    trees: list[HostTree]
    num_read: dict[int, int]
    priced: bool = False
    guesses: Int[Tensor, "batch depth"] | None = None
    laws: list[Tensor] = field(default_factory=list)
    nodes: Int[Tensor, "2 batch nodes"] | None = None
    states: Float[Tensor, "starts depth hidden"] | None = None

    def __post_init__(self) -> None:
        if self.nodes is not None:
            self.guesses = self.nodes[0, :, 1:]

    def tree(self, draws: Draws) -> DraftTree:
        """The chains as a tree: on the host, or on the device with its shape known to the host."""
        if self.nodes is not None:
            return DraftTree.drawn(self.nodes, self.trees)
        if self.guesses is None:
            return DraftTree.of_hosts(self.trees, 1)
        law = None
        if self.laws:
            law_rows = padded([tree.law_rows for tree in self.trees])
            law = DraftLaw(upload_tensor(law_rows, draws.device), torch.cat(self.laws))
        return replace(DraftTree.chains(draws.roots_tokens, self.guesses, law), known=self.trees)

    def survival(self) -> Float[Tensor, "batch nodes"] | None:
        """The survival of the tree's nodes; None if it was not requested."""
        return survival_of(self.trees) if self.priced else None
