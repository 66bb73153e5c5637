"""Chains that a model drafts by itself: what it is asked for, and what it gives.

This module decides the values that runners and drafters exchange about whole chains. A runner draws them in one call
where it can (`Runner.draw_chains`), with a compiled library or as a captured graph; else a drafter draws them step by
step.
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
    """A sequence to be drafted: its row in the round, its id, and how deep.

    Its chain ends before a guess that survives with less than `min_survival`.
    """

    row: int
    seq_id: int
    depth: int
    min_survival: float = 0.0


@runtime_checkable
class LowerRunner(Protocol):
    """A runner of layers whose states others read in place of tokens, over a cache of its own."""

    cache: PagedCache


@dataclass(frozen=True, slots=True)
class UnreadTexts:
    """Text of each start that is to be read before its chain is drawn, one token at least.

    `features` are the target's states, in pieces, and `fuse` maps them to what the layers read beside the tokens;
    `beside` gives from their outputs what they read beside the guesses that follow. `roots` gets their outputs at the
    last token of each text; None where nothing is guessed there, or they are not wanted.

    Layers over those of `below` read the states there in place of tokens. Each text then ends with its root, of which
    there are no features: `below` reads roots and guesses, and nothing of that stays, in its cache or in that above.
    """

    tokens: Sequence[Sequence[int]]
    features: Sequence[Float[Tensor, "_ *features"]]
    roots: Float[Tensor, "starts outputs"] | None
    fuse: Callable[[Tensor], Tensor]
    beside: Callable[[Tensor], Tensor] | None = None
    below: LowerRunner | None = None

    @property
    def begins_chains(self) -> bool:
        """Whether first guesses are made at the texts' last tokens."""
        return self.roots is not None or self.below is not None

    @property
    def states(self) -> Float[Tensor, "total inputs"]:
        """What the layers read beside the tokens."""
        return self.fuse(joined(self.features))


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces, one behind the other; a single one as it is."""
    return torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]


class Foreseen(NamedTuple):
    """What heads guess from, a row for each chain: the logits behind its text, or else the state that it was given, and
    logits and states of the masked places that were read."""

    first: Float[Tensor, "chains numbers"] | None
    logits: Float[Tensor, "chains places vocab"] | None = None
    states: Float[Tensor, "chains places hidden"] | None = None


@dataclass(frozen=True, slots=True)
class MaskedPlaces:
    """Tokens that are read behind each start's text in one pass, for the guesses that are made there.

    `count` gives how many there are for a depth. Those from `first` on make a guess each, as far as the chain reaches.
    `state` is read beside them, by layers that read states.
    """

    tokens: Sequence[Sequence[int]]
    count: Callable[[int], int]
    first: int = 0
    state: Float[Tensor, " inputs"] | None = None

    def num_guesses(self, depth: int) -> int:
        """How many guesses of a chain are made at these places."""
        return min(depth, self.count(depth) - self.first)


@dataclass(frozen=True, slots=True)
class HeadsAhead:
    """Makes all guesses of chains without a pass between them, of `states` of each start, or of places behind texts.

    `logits` gives those of each chain's next guess, from its root and the guesses so far [chains, path].
    """

    logits: Callable[[Foreseen, Int[Tensor, "chains path"]], Tensor]
    states: Sequence[Float[Tensor, " hidden"]] | None = None
    places: MaskedPlaces | None = None


@dataclass(frozen=True, slots=True)
class JudgedChains:
    """A round whose chains a device has judged, as it knows it before the host does.

    `nodes` are the tokens of each row's tree, the root first, `num_guesses` how many of them are guesses; `verdict` is
    `Verdict.packed`. `features` are the target's states after all of these nodes, row by row.
    """

    draws: Draws
    nodes: Int[Tensor, "batch nodes"]
    num_guesses: Sequence[int]
    verdict: Int[Tensor, "batch verdict"]
    features: Float[Tensor, "total taps hidden"]


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
        return tokens

    def own_list(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens


@dataclass(slots=True)
class Chains:
    """What was drawn behind the roots of a round's rows, as the target's ids.

    `trees` are all rows' chains, and `num_read` says how many guesses of each sequence, its first ones, were read into
    its tail. Where the host has not seen them, they are `guesses` on the device, -1 where a row has fewer, and `laws`
    are those that they were drawn from (rejection modes), packed; or `nodes`, the tokens and parents of the whole tree,
    nothing of which has to be checked. `priced`: whether their survival is known. `states`
    are the residual streams behind the guesses of each start, if they were asked for; those of guesses that were not
    read are garbage.
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
        """The guesses as a tree: on the host, or on the device with the host knowing its shape."""
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
        """That of the tree's nodes; None where it was not asked for."""
        return survival_of(self.trees) if self.priced else None
